"""Tiles of queries and pieces of keys that the programs of paged.py compute. Free of Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.cache.spec import AttentionSpec

LEAST_PIECE = 64  # the most keys that a program takes at a time
# Tiles times key-value heads that fill a GPU without being split.
MOST_SPLIT_PROGRAMS = 512


@dataclass(frozen=True)
class Tiles:
    """Queries that one launch of the kernel computes, by tiles of `block_m` (query, head) pairs."""

    table: Tensor  # int32 [n, 2]: request, first of its queries
    count: int
    block_m: int  # rows of a tile
    queries: int  # most queries that any tile holds
    splits: int = 1
    split_size: int = 0  # keys a piece; 0: all in one


def power_of_two(number: int) -> int:
    """The least power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def tile_shape(spec: AttentionSpec, rows: int) -> tuple[int, int]:
    """Rows of a tile, at least `rows` and a power of two, and the queries that it holds."""
    group = spec.num_heads // spec.num_kv_heads
    block_m = max(rows, power_of_two(group))
    return block_m, block_m // group


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; for the interpreter those of an H100."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def piece_size(most: int | None, longest: int, programs: int, processors: int) -> int:
    """Keys of a piece; 0: all of a request in one.

    Args:
        most: keys of a piece, or a quarter of it where there would be fewer than two pieces for a
            processor; None: never cut.
        longest: keys of any request.
        programs: tiles times key-value heads.
        processors: multiprocessors of the GPU.
    """
    if most is None or programs > MOST_SPLIT_PROGRAMS:
        return 0
    size = most if programs * -(-longest // most) >= 2 * processors else max(LEAST_PIECE, most // 4)
    return size if longest > size else 0


def prompt_rows(head_dim: int, dtype: torch.dtype, compressed: bool) -> int:
    """Rows of the widest tile that fits the registers, as compiled for compute capabilities 8.0,
    8.9 and 9.0. `compressed`: whether the cache is."""
    if dtype is torch.float32:
        return 16
    return 64 if head_dim > 128 or compressed else 128


def keys_per_step(head_dim: int, dtype: torch.dtype) -> int:
    """Keys that a program loads at a time."""
    if dtype is torch.float32:
        return 16
    return max(16, min(64, 8192 // power_of_two(head_dim)))


def launch_options(block_m: int, head_dim: int, compressed: bool) -> dict[str, int]:
    """Number of warps, and stages of prefetching of `_attend`: one stage of three is the look-up of
    blocks."""
    wide = block_m >= 64
    # A third stage exceeds the shared memory of compute capability 8.9, or the registers.
    few = wide and (head_dim > 128 or compressed)
    return {"num_warps": 8 if wide else 4, "num_stages": 2 if few else 3}
