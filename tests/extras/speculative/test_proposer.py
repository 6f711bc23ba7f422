"""Drafts for several requests at once, and their counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.extras.speculative.options import NgramOptions, SuffixOptions
from minivllm.extras.speculative.proposer import Proposer, SpeculationCounters
from minivllm.extras.speculative.proposers.ngram import NgramProposer
from minivllm.extras.speculative.proposers.suffix import SuffixProposer
from tests.extras.speculative.growing import request


@pytest.mark.parametrize(
    "proposer", [NgramProposer(NgramOptions()), SuffixProposer(SuffixOptions())]
)
def test_each_request_gets_a_draft_of_its_own_length(proposer: Proposer) -> None:
    requests = [request([1, 2, 3, 4] * 4), request([5, 6]), request([7, 8, 9] * 5)]
    drafts = [proposer.propose(*pair) for pair in zip(requests, [2, 2, 4], strict=True)]
    assert drafts == [[1, 2], [], [7, 8, 9, 7]]
    assert [proposer.propose(one, 0) for one in requests] == [[], [], []]


drafts = st.integers(1, 5).flatmap(
    lambda length: st.tuples(st.sampled_from("ab"), st.just(length), st.integers(0, length))
)


@given(st.lists(drafts))
def test_counts_agree_with_the_drafts_themselves(noted: list[tuple[str, int, int]]) -> None:
    counters = SpeculationCounters()
    for one in noted:
        counters.note(*one)
    assert counters.num_drafts == len(noted)
    assert counters.num_draft_tokens == sum(length for _, length, _ in noted)
    assert counters.num_accepted_tokens == sum(right for _, _, right in noted)
    for place in range(6):
        assert counters.drafted_per_pos[place] == sum(place < length for _, length, _ in noted)
        assert counters.accepted_per_pos[place] == sum(place < right for _, _, right in noted)
        of_length = [right for _, length, right in noted if length == place]
        assert counters.drafts_of_length[place] == len(of_length)
        assert counters.accepted_of_length[place] == sum(of_length)
    for name in "ab":
        own = [one for one in noted if one[0] == name]
        totals = len(own), sum(one[1] for one in own), sum(one[2] for one in own)
        assert counters.requests.get(name, (0, 0, 0)) == totals
