"""What speculation did, counted by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minivllm.extras.speculative.counters import SpeculationCounters

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
