"""Beam search: the `beam_width` most likely outputs are kept at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.cache.manager import CacheManager
from minivllm.engine.request import Group, Request
from minivllm.engine.scheduler import Scheduler
from minivllm.errors import BadInput, NonFiniteLogits
from minivllm.extras.adjust_logits import adjust_logits
from minivllm.kernels.ranking import largest

# (natural log of the probability, token id), the best first
Continuations = Sequence[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One output of a beam search."""

    token_ids: list[int]
    cumulative_logprob: float  # natural log
    score: float  # cumulative_logprob / (tokens ** length_penalty): what beams are compared by
    finish_reason: str


class BeamSearch(Group):
    """One beam search: rounds in which every beam gets one token, as transformers'
    `generate(num_beams=k)` has them.

    The beams are requests that the scheduler serves like any others, in any order and any number a
    step. A beam whose continuations are known has nothing to compute and waits; once they are known
    of all, the `k` best continuations of all beams are the next beams. One that has no continuation
    among them gives its blocks up and shares those of a beam that has several, until either writes
    (Kwon et al. 2023, section 4.4).

    A continuation that ends is no beam any more: if it is among the `k` best it becomes a
    hypothesis, and the `k` hypotheses with the best scores are kept.

    Args:
        beams: `k` requests; the first one computes the prompt.
    """

    knob = "beam_width"
    joint = True

    def __init__(self, beams: Sequence[Request]) -> None:
        super().__init__(beams)
        self.beams = beams
        self.params = beams[0].params
        # A beam at -inf is the copy of another one and counts for nothing, as all but one do at
        # first.
        self.scores = [0.0] + [-math.inf] * (len(beams) - 1)
        self.continuations: dict[Request, Continuations] = {}
        self.hypotheses: list[Hypothesis] = []

    def check(self, cache: CacheManager) -> None:
        """Beams share the prompt's full blocks at least, even if they are computed
        again, unless some are evicted."""
        first, width = self.beams[0], len(self.beams)
        longest = first.max_num_tokens - 1  # the last token is never computed
        held = cache.footprint(longest)
        shared = first.num_prompt_tokens // cache.layout.block_size if held == longest else 0
        blocks = shared + width * (cache.blocks_for(held) - shared)
        if cache.layout.retains_kv and blocks > cache.pool.num_usable:
            raise BadInput(
                f"request {first.request_id} may need {blocks} cache blocks for its {width} "
                f"beams, and there are {cache.pool.num_usable}: lower beam_width or max_tokens, "
                "or raise cache.num_blocks (with cache=contiguous, cache.num_sequences)"
            )

    def take(self, beam: Request, continuations: Continuations, scheduler: Scheduler) -> None:
        """Keep a beam's most likely continuations, (natural log of the probability, token id), and
        start beams that waited for it: at the beginning, and after a preemption."""
        for other in tuple(beam.unstarted):
            known = range(beam.num_prompt_tokens, beam.num_tokens)
            same = (i for i in known if beam.token_ids[i] != other.token_ids[i])
            scheduler.fork(beam, other, next(same, beam.num_tokens))
        beam.num_computed_tokens = beam.num_tokens  # also where nothing is kept: it waits
        self.continuations[beam] = continuations

    @property
    def ready(self) -> bool:
        """Whether the continuations of all beams are known."""
        return all(
            s == -math.inf or beam in self.continuations
            for beam, s in zip(self.beams, self.scores, strict=True)
        )

    def advance(self, scheduler: Scheduler) -> bool:
        """End the round; False if that was the last one."""
        width = len(self.beams)
        every = [
            (self.scores[index] + logprob, index, token)
            for index, beam in enumerate(self.beams)
            for logprob, token in self.continuations.get(beam, ())
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
        self.continuations.clear()
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
        if not scheduler.cache.layout.retains_kv:
            for beam in self.beams:
                beam.num_computed_tokens = 0

    def _is_done(self, best: float) -> bool:
        """Whether to stop, with beams of which the best has the sum `best`, one token longer than
        they are now."""
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


class BeamDecoding:
    """Beam search for the engine; see `JointDecoding`.

    Args:
        one_by_one: choose for each beam by itself, so that no shape depends on the others.
    """

    def __init__(self, one_by_one: bool = False) -> None:
        self.one_by_one = one_by_one
        self.counters = {"beam_rounds": 0}

    def group(self, members: Sequence[Request]) -> BeamSearch:
        """A search whose beams are `members`."""
        return BeamSearch(members)

    def choose(self, logits: Tensor, members: Sequence[Request]) -> Sequence[Continuations]:
        """The most likely continuations of each beam; see `best_continuations`."""
        return best_continuations(logits, members, self.one_by_one)

    def advance(
        self, members: Sequence[Request], choices: Sequence[Continuations], scheduler: Scheduler
    ) -> Iterator[tuple[Request, list[int], str]]:
        """Give beams the continuations found for them, and end the rounds that are complete.

        Yields:
            Of each search that is over its first beam, the tokens of its best hypothesis, and why
            that one ended; of one that failed no tokens, when the first beam has the `error`.
        """
        searches: dict[BeamSearch, None] = {}
        for beam, continuations in zip(members, choices, strict=True):
            assert isinstance(beam.group, BeamSearch)
            beam.group.take(beam, continuations, scheduler)
            searches[beam.group] = None
        for search in searches:
            first = search.beams[0]
            first.error = next((beam.error for beam in search.beams if beam.error), None)
            if first.error is not None:
                yield first, [], "error"
            elif search.ready:
                self.counters["beam_rounds"] += 1
                if not search.advance(scheduler):
                    del search.hypotheses[first.params.n :]
                    best = search.hypotheses[0]
                    yield first, best.token_ids, best.finish_reason


@torch.inference_mode()
def best_continuations(
    logits: Tensor, beams: Sequence[Request], one_by_one: bool = False
) -> list[list[tuple[float, int]]]:
    """Each beam's most likely next tokens, as (natural log of the probability, token id), the best
    first.

    They are as many as make sure that `beam_width` of them do not end the output. Bias, penalties
    and masks act on the log-probabilities, as in transformers. A beam whose logits are not finite
    has its `error` set.

    Args:
        logits: [R, vocab], any float dtype; row i belongs to beams[i].
        one_by_one: for each beam by itself, so that no shape depends on the others.
    """
    if one_by_one and len(beams) > 1:
        return [
            best_continuations(row[None], [beam])[0]
            for row, beam in zip(logits, beams, strict=True)
        ]
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    positions = [beam.num_tokens for beam in beams]
    adjust_logits(beams, positions, logprobs.shape[1]).apply(logprobs)
    most = max(beam.params.beam_width * max(2, 1 + len(beam.stop_ids)) for beam in beams)
    finite = (~logprobs.amax(-1).isnan()).tolist()
    values, token_ids = largest(logprobs, min(most, logprobs.shape[1]))
    candidates = [
        [*zip(*row, strict=True)] for row in zip(values.tolist(), token_ids.tolist(), strict=True)
    ]
    for beam, is_finite in zip(beams, finite, strict=True):
        if not is_finite:
            beam.error = beam.error or NonFiniteLogits.of(beam.request_id, beam.num_tokens)
    return [[pair for pair in pairs if pair[0] > -math.inf] for pairs in candidates]
