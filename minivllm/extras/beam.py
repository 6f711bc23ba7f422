"""Beam search: the likeliest outputs as a whole, kept `beam_width` at a time. Pure Python, no tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from minivllm.engine.request import Hypothesis, Request
from minivllm.engine.scheduler import Scheduler


class BeamSearch:
    """One beam search: rounds in which every beam gets one token, as transformers' `generate(num_beams=k)` has them.

    The beams are requests that the scheduler serves like any others, in any order and any number a step. A beam whose
    continuations are known has nothing to compute and waits; once they are known of all, the `k` best continuations
    of all beams are the next beams. One that has no continuation among them gives its blocks up and shares those
    of a beam that has several, until either writes (Kwon et al. 2023, section 4.4).

    A continuation that ends is no beam any more: if it is among the `k` best it becomes a hypothesis, and the `k`
    hypotheses with the best scores are kept.

    Args:
        beams: the first one computes the prompt; the others are its siblings, `k` in all.
    """

    def __init__(self, beams: list[Request]) -> None:
        self.beams = beams
        self.params = beams[0].params
        # A beam at -inf is the copy of another one and counts for nothing, as all but one do at first.
        self.scores = [0.0] + [-math.inf] * (len(beams) - 1)
        self.found: dict[Request, Sequence[tuple[float, int]]] = {}
        self.hypotheses: list[Hypothesis] = []

    def take(self, beam: Request, continuations: Sequence[tuple[float, int]], scheduler: Scheduler) -> None:
        """Note a beam's likeliest continuations, (natural log of the probability, token id), and let beams that
        waited for it start: at the beginning, and after a preemption."""
        for sibling in tuple(beam.siblings):
            known = range(beam.num_prompt_tokens, beam.num_tokens)
            same = (i for i in known if beam.token_ids[i] != sibling.token_ids[i])
            scheduler.fork(beam, sibling, next(same, beam.num_tokens))
        beam.num_computed_tokens = beam.num_tokens  # also where nothing is kept: it waits
        self.found[beam] = continuations

    @property
    def ready(self) -> bool:
        """Whether the continuations of all beams are known."""
        return all(
            s == -math.inf or beam in self.found for beam, s in zip(self.beams, self.scores, strict=True)
        )

    def advance(self, scheduler: Scheduler) -> bool:
        """End the round; False if that was the last one."""
        width = len(self.beams)
        every = [
            (self.scores[index] + logprob, index, token)
            for index, beam in enumerate(self.beams)
            for logprob, token in self.found.get(beam, ())
            if self.scores[index] > -math.inf
        ]
        every.sort(key=lambda one: -one[0])
        chosen: list[tuple[float, int, int]] = []
        for place, (total, index, token) in enumerate(every):
            beam = self.beams[index]
            reason = beam.ends(token)
            if reason is None:
                chosen.append((total, index, token))
            elif place < width:
                output = [*beam.output_token_ids, token]
                score = self._score(total, len(output))
                self.hypotheses.append(Hypothesis(output, total, score, reason))
            if len(chosen) == width:
                break
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[width:]
        if not chosen or self._is_done(chosen[0][0]):
            return False
        # A mask may leave too few: then the best one is there several times, but counts once.
        chosen += [(-math.inf, *chosen[0][1:])] * (width - len(chosen))
        self._rearrange(chosen, scheduler)
        self.found.clear()
        return True

    def _rearrange(self, chosen: list[tuple[float, int, int]], scheduler: Scheduler) -> None:
        """Let the beams be `chosen`: (score, beam that goes on, token)."""
        moved: list[tuple[float, int, int]] = []
        stay: dict[int, tuple[float, int]] = {}
        for total, index, token in chosen:
            if index in stay:
                moved.append((total, index, token))
            else:
                stay[index] = (total, token)
        idle = [index for index in range(len(self.beams)) if index not in stay]
        for place, (total, index, token) in zip(idle, moved, strict=True):
            beam, parent = self.beams[place], self.beams[index]
            scheduler.fork(parent, beam)
            beam.token_ids = [*parent.token_ids, token]
            self.scores[place] = total
        for index, (total, token) in stay.items():
            self.beams[index].token_ids.append(token)
            self.scores[index] = total
        if not scheduler.cache.layout.keeps:
            for beam in self.beams:
                beam.num_computed_tokens = 0

    def _is_done(self, best: float) -> bool:
        """Whether to stop, with beams of which the best has the sum `best`, one token longer than they are now."""
        if len(self.hypotheses) < len(self.beams):
            return False
        if self.params.early_stopping is True:
            return True
        first = self.beams[0]
        length = first.num_output_tokens + 1
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = first.max_num_tokens - first.num_prompt_tokens
        return self._score(best, length) <= self.hypotheses[-1].score

    def _score(self, total: float, length: int) -> float:
        return total / length**self.params.length_penalty
