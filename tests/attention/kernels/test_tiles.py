"""Tiles of queries and pieces of keys: their sizes."""

from __future__ import annotations

import pytest

from minivllm.attention.kernels.tiles import LEAST_PIECE, piece_size, power_of_two, tile_shape
from minivllm.cache.spec import AttentionSpec


def test_the_least_power_of_two() -> None:
    powers = [1 << exponent for exponent in range(10)]
    for number in range(1, 500):
        assert power_of_two(number) == min(power for power in powers if power >= number)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "shape"),
    [(8, 8, 16, (16, 16)), (16, 8, 16, (16, 8)), (24, 1, 16, (32, 1)), (12, 4, 16, (16, 5))],
)
def test_a_tile_holds_whole_groups_of_heads(
    heads: int, kv_heads: int, rows: int, shape: tuple[int, int]
) -> None:
    assert tile_shape(AttentionSpec(heads, kv_heads, 64, 1.0), rows) == shape


@pytest.mark.parametrize(
    ("most", "longest", "programs", "size"),
    [
        (None, 10_000, 1, 0),  # never cut
        (512, 10_000, 600, 0),  # programs fill the GPU
        (512, 500, 100, 128),  # one piece each is fewer than two for a processor
        (512, 10_000, 100, 512),
        (128, 500, 1, LEAST_PIECE),
        (512, 100, 1, 0),  # all keys are in one piece
    ],
)
def test_pieces_fill_the_gpu(most: int | None, longest: int, programs: int, size: int) -> None:
    assert piece_size(most, longest, programs, processors=132) == size
