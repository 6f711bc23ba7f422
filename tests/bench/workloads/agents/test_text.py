"""Texts: prompts are exactly as long, and equal exactly where they should be."""

from __future__ import annotations

from fractions import Fraction
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.bench.workloads.agents.text import (
    MARKER_LEN,
    STRETCH,
    Runs,
    TextSpace,
    cut,
    marked,
    scaled,
)
from minivllm.errors import BadInput


def positions(runs: Runs) -> list[int]:
    return list(chain.from_iterable(runs))


def common(a: Runs, b: Runs) -> int:
    pairs = zip(positions(a), positions(b), strict=False)
    return next(
        (i for i, (x, y) in enumerate(pairs) if x != y), min(map(len, map(positions, (a, b))))
    )


def test_a_prompt_shares_the_blocks_whose_hashes_it_has() -> None:
    text = TextSpace(3)
    first = text.prompt([7, 8], 64, 150, "x")
    second = text.prompt([7, 8, 9], 64, 192, "x")
    other = text.prompt([7, 5], 64, 128, "x")
    assert [len(positions(one)) for one in (first, second, other)] == [150, 192, 128]
    assert common(first, second) == 128 and common(second, other) == 64
    assert min(positions(first)) == 3 * STRETCH


def test_a_last_block_with_a_hash_is_shared_in_part() -> None:
    """Mooncake hashes the partial last block, too."""
    text = TextSpace(0)
    assert common(text.prompt([1, 2], 64, 100, "x"), text.prompt([1, 2], 64, 128, "x")) == 100


def test_blocks_of_other_sizes_are_other_texts() -> None:
    text = TextSpace(0)
    assert common(text.prompt([1], 64, 64, "x"), text.prompt([1], 16, 16, "x")) == 0


@pytest.mark.parametrize("ids", [[1], [1, 2, 3, 4]])
def test_hashes_that_do_not_fit_are_refused(ids: list[int]) -> None:
    with pytest.raises(BadInput, match=r"^f: 150 prompt tokens are 3 blocks of 64.*\d hash_ids$"):
        TextSpace(0).prompt(ids, 64, 150, "f")


def test_without_hashes_nothing_is_shared() -> None:
    text = TextSpace(0)
    assert common(text.prompt([], 64, 70, "x"), text.prompt([], 64, 70, "x")) == 0


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=8),
    st.lists(st.integers(0, 20), min_size=1, max_size=8),
    st.fractions(Fraction(1, 50), 3),
)
def test_what_is_shared_is_shared_at_any_length(
    a: list[int], b: list[int], factor: Fraction
) -> None:
    text = TextSpace(5)
    before = [text.prompt(ids, 64, 64 * len(ids), "x") for ids in (a, b)]
    after = [scaled(runs, factor) for runs in before]
    for long, short in zip(before, after, strict=True):
        assert abs(len(positions(short)) - len(positions(long)) * factor) <= len(long) + 1
        assert len(positions(short)) >= 1
    shared = common(*before) * factor
    assert common(*after) >= min(shared - 9, *map(len, map(positions, after)))
    assert scaled(before[0], Fraction(1)) is before[0]


def test_a_marker_replaces_tokens() -> None:
    text = TextSpace(0)
    runs = (text.fresh(20), text.fresh(30))
    one, again, other = marked(runs, 10, 0), marked(runs, 10, 0), marked(runs, 10, 1)
    assert one == again and len(positions(one)) == len(positions(other)) == 50
    assert common(one, other) == 10
    assert positions(one)[10 + MARKER_LEN :] == positions(runs)[10 + MARKER_LEN :]


def test_cut_gives_the_tokens_between() -> None:
    runs = (range(5), range(100, 110))
    assert positions(cut(runs, 3, 7)) == [3, 4, 100, 101]
    assert cut(runs, 5, 5) == ()
