"""Occurrences, and the votes of those who agree so far."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.extras.speculative.proposers.suffix_index import END, MOST_VOTES, SuffixIndex
from tests.extras.speculative.growing import tokens


def filled(*texts: list[int], longest: int = 4) -> SuffixIndex:
    """An index of these texts, all ended."""
    index = SuffixIndex(longest)
    for text in texts:
        index.extend(text)
        index.end_text()
    return index


@pytest.mark.parametrize(
    ("longest", "lengths"), [(1, [1]), (2, [1, 2]), (3, [1, 2]), (24, [1, 2, 4, 8, 16])]
)
def test_lengths_double_up_to_the_longest(longest: int, lengths: list[int]) -> None:
    assert SuffixIndex(longest).lengths == lengths


@given(st.lists(tokens, max_size=6), st.integers(0, 6), st.integers(1, 9))
def test_what_is_dropped_was_never_there(
    texts: list[list[int]], dropped: int, longest: int
) -> None:
    """Dropping leaves what an index of the other texts has, and positions that count on."""
    index, others = filled(*texts, longest=longest), filled(*texts[dropped:], longest=longest)
    index.drop(sum(len(text) + 1 for text in texts[:dropped]))
    for text in ([0, 1, 0], [1, 1]):
        for one in (index, others):
            one.extend(text)
            one.end_text()
    assert index.tokens == others.tokens and len(index) == len(others)
    for level in range(len(index.lengths)):
        assert index.latest[level].keys() == others.latest[level].keys()
        assert len(index.earlier[level]) == len(index.tokens)
        for run in index.latest[level]:
            places = index.occurrences(level, run)
            assert places == others.occurrences(level, run) and END not in run
            assert places == sorted(places, reverse=True) and 0 < len(places) <= MOST_VOTES
            for place in places:
                assert tuple(index.tokens[place - len(run) : place]) == run
                assert index.tokens[place] != END


@pytest.mark.parametrize(
    ("texts", "least", "draft"),
    [
        ([[1, 2, 3], [1, 2, 4], [1, 2, 3]], 0.0, [2, 3]),  # the most frequent
        ([[1, 2, 3], [1, 2, 4]], 0.0, [2, 4]),  # of equally frequent ones the latest
        ([[1, 2, 3], [1, 2, 4]], 0.6, [2]),  # half is too few
        ([[1, 2, 3, 5], [1, 2, 3, 6], [1, 2, 4], [1, 2, 4]], 0.3, [2, 4]),
        ([[1, 2, 3, 5], [1, 2, 3, 6], [1, 2, 3, 7], [1, 2, 4]], 0.3, [2, 3]),  # 3/4 of a third
        ([[1, 2], [1, 2], [1, 2, 4]], 0.0, [2]),  # most texts end there
        ([[1, 2, 3, 4, 5, 6, 7, 8]], 1.0, [2, 3, 4, 5, 6]),  # as many as asked for
    ],
)
def test_votes(texts: list[list[int]], least: float, draft: list[int]) -> None:
    index = filled(*texts)
    places = index.occurrences(0, (1,))
    assert index.continuation(places, 5, least) == draft
    assert index.continuation(places, 0, least) == []


def test_a_text_that_still_grows_abstains_at_its_end() -> None:
    index = SuffixIndex(1)
    index.extend([7, 1, 7, 2, 7, 1])
    assert index.continuation(index.occurrences(0, (7,)), 9, 0.5) == [1, 7, 2, 7, 1]


def test_only_the_latest_occurrences_vote() -> None:
    index = filled(*[[1, 2]] * 20, *[[1, 3]] * MOST_VOTES)
    assert index.continuation(index.occurrences(0, (1,)), 1, 1.0) == [3]
