"""Masks of bits do what masks of booleans do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.extras.masks.bitmask import (
    allow,
    allows_any,
    apply_bitmask,
    every_token,
    forbid,
    intersect,
    num_bytes,
    row_from,
    row_of,
)


def flags(row: bytearray) -> list[bool]:
    return np.unpackbits(np.frombuffer(row, np.uint8), bitorder="little").astype(bool).tolist()


@settings(deadline=None)
@given(st.data(), st.integers(1, 100))
def test_rows_are_sets_of_tokens(data: st.DataObject, vocab_size: int) -> None:
    masks = st.lists(st.booleans(), min_size=vocab_size, max_size=vocab_size)
    tokens = st.lists(st.integers(0, vocab_size - 1), max_size=5)
    first, second = data.draw(masks), data.draw(masks)
    more, fewer = data.draw(tokens), data.draw(tokens)
    row = row_of(torch.tensor(first))
    intersect(row, row_of(torch.tensor(second)))
    allow(row, more)
    forbid(row, fewer)
    expected = [
        ((a and b) or token in more) and token not in fewer
        for token, (a, b) in enumerate(zip(first, second, strict=True))
    ]
    padding = [False] * (8 * num_bytes(vocab_size) - vocab_size)
    assert len(row) % 4 == 0 and flags(row) == expected + padding
    assert allows_any(row) == any(expected)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100])
def test_bits_of_another_vocabulary_are_cut_or_padded(vocab_size: int) -> None:
    every = every_token(vocab_size)
    assert sum(flags(every)) == vocab_size and len(every) == num_bytes(vocab_size)
    assert row_from(b"\xff" * 20, vocab_size) == every
    assert flags(row_from(b"\x01", vocab_size)).count(True) == 1


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [0, 2], [3]])
@pytest.mark.parametrize("vocab_size", [7, 64, 101])
def test_one_operation_masks_the_rows_that_have_a_mask(rows: list[int], vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(4, vocab_size, generator=generator)
    logits[rows[0], 0] = torch.nan
    masks = torch.rand(len(rows), vocab_size, generator=generator) < 0.5
    masks[:, 0] = True
    expected = logits.clone()
    expected[rows] = expected[rows].masked_fill(~masks, -torch.inf)
    apply_bitmask(logits, rows, bytearray(b"".join(map(row_of, masks))))
    torch.testing.assert_close(logits, expected, rtol=0, atol=0, equal_nan=True)
