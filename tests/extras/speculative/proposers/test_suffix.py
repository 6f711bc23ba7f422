"""Suffix decoding against counts over all texts, with requests that come, grow and end."""

from __future__ import annotations

import tracemalloc
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minivllm.engine.request import Request
from minivllm.extras.speculative.options import SuffixOptions
from minivllm.extras.speculative.proposers.suffix import SuffixProposer
from minivllm.extras.speculative.proposers.suffix_index import END, MOST_VOTES
from tests.extras.speculative.growing import request, tokens


def following(texts: list[list[int]], run: list[int]) -> list[list[int]]:
    """What follows the latest occurrences of a run that are followed by a token."""
    found = [
        text[position:]
        for text in texts
        for position in range(len(run), len(text))
        if text[position - len(run) : position] == run and text[position] != END
    ]
    return found[::-1][:MOST_VOTES]


def counted(
    own: list[int], outputs: list[list[int]], most: int, options: SuffixOptions
) -> list[int]:
    """The draft, by counts over what follows each occurrence in the request and the outputs."""
    length = 1 << (options.max_tree_depth.bit_length() - 1)
    found: list[list[int]] = []
    while length and not found:
        if length <= len(own):
            ended = [[*output, END] for output in outputs]
            found = following([own], own[-length:]) or following(ended, own[-length:])
        length //= 2
    most = min(most, int(options.max_spec_factor * max(2 * length, 1)))
    draft: list[int] = []
    share = 1.0
    while len(draft) < most:
        agreeing = [text for text in found if text[: len(draft)] == draft]
        votes = Counter(text[len(draft)] for text in agreeing if len(text) > len(draft))
        if not votes:
            break
        token, count = votes.most_common(1)[0]  # of equally frequent ones the first
        share *= count / votes.total()
        if token == END or share < options.min_token_prob:
            break
        draft.append(token)
    return draft


class Suffixes(RuleBasedStateMachine):
    """Requests come, grow and end in any order."""

    @initialize(
        depth=st.integers(1, 9),
        factor=st.sampled_from([0.4, 1.0, 3.0]),
        least=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        requests=st.integers(0, 4),
        limit=st.integers(0, 60),
    )
    def begin(self, depth: int, factor: float, least: float, requests: int, limit: int) -> None:
        self.options = SuffixOptions(
            max_tree_depth=depth,
            max_spec_factor=factor,
            min_token_prob=least,
            max_cached_requests=requests,
            max_cached_tokens=limit,
        )
        self.proposer = SuffixProposer(self.options)
        self.running: list[Request] = []
        self.outputs: list[list[int]] = []  # kept, oldest first

    @rule(prompt=tokens)
    def come(self, prompt: list[int]) -> None:
        self.running.append(request([0, *prompt]))

    @rule(data=st.data(), piece=tokens, most=st.integers(0, 9))
    def grow(self, data: st.DataObject, piece: list[int], most: int) -> None:
        if not self.running:
            return
        growing = data.draw(st.sampled_from(self.running))
        growing.token_ids += piece
        before = list(growing.token_ids)
        draft = self.proposer.propose(growing, most)
        assert draft == counted(before, self.outputs, most, self.options)
        assert draft == self.proposer.propose(growing, most), "a proposal changed the index"
        assert len(draft) <= most and growing.token_ids == before

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if not self.running:
            return
        ended = data.draw(st.sampled_from(self.running))
        self.running.remove(ended)
        self.proposer.finished(ended)
        kept = ended.output_token_ids[-max(self.options.max_cached_tokens - 1, 0) :]
        if not kept or self.options.max_cached_tokens < 2:
            return
        self.outputs.append(kept)
        while len(self.outputs) > self.options.max_cached_requests or self.cached_tokens() > (
            self.options.max_cached_tokens
        ):
            del self.outputs[0]

    def cached_tokens(self) -> int:
        """Tokens of the outputs, with the marks after them."""
        return sum(len(output) + 1 for output in self.outputs)

    @invariant()
    def nothing_is_left_of_what_ended_or_was_dropped(self) -> None:
        index = self.proposer.outputs.index
        assert set(self.proposer.own) <= set(self.running)
        assert len(index) == self.cached_tokens() <= self.options.max_cached_tokens
        for length, latest in zip(index.lengths, index.latest, strict=True):
            assert latest.keys() == {
                tuple(output[position - length : position])
                for output in self.outputs
                for position in range(length, len(output))
            }


TestSuffixes = Suffixes.TestCase
TestSuffixes.settings = settings(max_examples=100, stateful_step_count=20)


def finish(proposer: SuffixProposer, prompt: list[int], output: list[int]) -> None:
    """A request that was never proposed for ends."""
    ended = request(prompt)
    ended.token_ids += output
    proposer.finished(ended)


def test_a_request_learns_from_finished_outputs_and_first_from_itself() -> None:
    proposer = SuffixProposer(SuffixOptions())
    finish(proposer, [1, 2, 3, 4], [5, 6, 7, 8, 9])
    growing = request([3, 4])
    assert proposer.propose(growing, 4) == []  # prompts are not kept
    growing.token_ids += [5, 6]
    assert proposer.propose(growing, 4) == [7, 8]  # two tokens for a run of two
    growing.token_ids += [7, 8]
    assert proposer.propose(growing, 4) == [9]
    growing.token_ids += [0, 5, 6]
    assert proposer.propose(growing, 1) == [7]
    growing.token_ids += [1, 5, 6]
    assert proposer.propose(growing, 2) == [1, 5]  # its own text, and its latest


def test_the_oldest_output_is_dropped_first_and_a_long_one_keeps_its_end() -> None:
    proposer = SuffixProposer(SuffixOptions(max_cached_tokens=10, max_cached_requests=2))
    for start in (10, 20, 30):
        finish(proposer, [0], [start, start + 1])
    drafts = [proposer.propose(request([start]), 1) for start in (10, 20, 30)]
    assert drafts == [[], [21], [31]]
    finish(proposer, [0], list(range(50)))
    drafts = [proposer.propose(request([start]), 1) for start in (30, 40, 41, 48)]
    assert drafts == [[], [], [42], [49]]


def test_memory_is_bounded_however_many_requests_end() -> None:
    proposer = SuffixProposer(SuffixOptions(max_cached_tokens=500))

    def memory(finished: range) -> int:
        for index in finished:
            ended = request([1, 2, 3])
            ended.token_ids += range(1000 * index, 1000 * index + 49)
            proposer.propose(ended, 3)
            proposer.finished(ended)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        full = memory(range(20))
        assert memory(range(20, 200)) < 1.3 * full
    finally:
        tracemalloc.stop()
