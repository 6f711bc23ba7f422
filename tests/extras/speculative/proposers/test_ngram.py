"""Prompt lookup against a search through the whole text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.extras.speculative.options import NgramOptions
from minivllm.extras.speculative.proposers.ngram import NgramProposer
from tests.extras.speculative.growing import request, tokens

lengths = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted)


def searched(text: Sequence[int], most: int, shortest: int, longest: int) -> list[int]:
    """The draft, by a search from the end of the text for each length."""
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        for position in range(len(text) - 1, length - 1, -1):
            if text[position - length : position] == text[-length:]:
                copied = list(text)
                for step in range(most):
                    copied.append(copied[position + step])
                return copied[len(text) :]
    return []


@given(tokens, st.lists(tokens), st.integers(0, 9), lengths)
def test_every_way_of_appending_finds_what_a_search_finds(
    prompt: list[int], pieces: list[list[int]], most: int, bounds: list[int]
) -> None:
    shortest, longest = bounds
    proposer = NgramProposer(NgramOptions(prompt_lookup_min=shortest, prompt_lookup_max=longest))
    growing = request([0, *prompt])
    for piece in [[], *pieces]:
        growing.token_ids += piece
        before = list(growing.token_ids)
        draft = proposer.propose(growing, most)
        assert draft == searched(before, most, shortest, longest)
        assert draft == proposer.propose(growing, most), "a proposal changed the index"
        assert len(draft) <= most and growing.token_ids == before


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ([1, 2, 3, 9, 1, 2, 4, 1, 2], [4, 1, 2, 4]),  # of two occurrences the latest
        ([1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 1, 2, 3, 4], [5, 9, 2, 3]),  # of two lengths the longest
        ([5, 1, 2, 1, 2], [1, 2, 1, 2]),  # beyond the end of the text
        ([7, 7, 7], [7, 7, 7, 7]),
        ([1, 2, 3, 2], []),  # one token is too few
        ([1], []),
    ],
)
def test_the_latest_occurrence_of_the_longest_run(text: list[int], draft: list[int]) -> None:
    assert NgramProposer(NgramOptions()).propose(request(text), 4) == draft


def test_requests_have_nothing_in_common_and_a_finished_one_leaves_nothing() -> None:
    proposer = NgramProposer(NgramOptions())
    first, second = request([1, 2, 3, 1, 2]), request([8, 1, 2])
    assert proposer.propose(first, 1) == [3]
    assert proposer.propose(second, 1) == []
    assert set(proposer.indexes) == {first, second}
    for ended in (first, second, first, request()):
        proposer.finished(ended)
    assert not proposer.indexes


def test_an_index_has_an_entry_a_token_and_length_at_most() -> None:
    proposer, growing = NgramProposer(NgramOptions()), request(range(100))
    for token in range(100, 1100):
        growing.token_ids.append(token)
        proposer.propose(growing, 3)
    index = proposer.indexes[growing]
    assert index.num_tokens == 1100
    assert {length: len(after) for length, after in index.after.items()} == {
        4: 1100 - 4,
        3: 1100 - 3,
        2: 1100 - 2,
    }
