"""Attention over the paged cache: one kernel for prompts, chunks, decoding and verification.

The online softmax of FlashAttention-2 (Dao 2023) over keys and values that are found through a block table
(PagedAttention, Kwon et al. 2023). Long sequences with few queries are cut into pieces of a fixed number of keys,
whose results a second kernel puts together (Flash-Decoding, Dao et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.attention.base import AttentionSpec
from minivllm.attention.kernels.storage import FORMATS, widen
from minivllm.cache.kv import KVCache
from minivllm.kernels.common import dot, narrow, tanh


@triton.jit
def _rows(tiles, query_starts, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_M: tl.constexpr):
    """This program's tile: its request, the first of its queries, how many the request has; of each row the query within
    the request and within the step, the head, and whether there is one. The heads that share keys lie together."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile = tl.program_id(0)
    request, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    begin = tl.load(query_starts + request)
    query_len = tl.load(query_starts + request + 1) - begin
    m = tl.arange(0, BLOCK_M)
    index = first + m // GROUP
    head = tl.program_id(1) * GROUP + m % GROUP
    held = (m < BLOCK_M // GROUP * GROUP) & (index < query_len)
    return request, first, query_len, index, (begin + index).to(tl.int64), head, held


@triton.jit
def _key_range(
    first,
    query_len,
    context,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The keys of this program: those that a query of its tile sees, in its piece if there are pieces."""
    low = 0
    high = context + tl.minimum(first + QUERIES, query_len)
    if WINDOW:
        low = tl.maximum(context + first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    if SPLIT_SIZE:
        split = tl.program_id(2)
        low = tl.maximum(low, split * SPLIT_SIZE)
        high = tl.minimum(high, (split + 1) * SPLIT_SIZE)
    return low, high


@triton.jit
def _weigh(scores, maximum, total):
    """The step of the online softmax: the new keys' weights, the factor of what was summed before, maximum and total."""
    highest = tl.maximum(maximum, tl.max(scores, 1))
    pivot = tl.where(highest == float("-inf"), 0.0, highest)  # a row that has seen nothing yet
    weights = tl.exp2(scores - pivot[:, None])
    decay = tl.exp2(maximum - pivot)
    return weights, decay, highest, total * decay + tl.sum(weights, 1)


@triton.jit
def _finish(
    out, acc, total, rows, head, held, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr
):
    """Write what the rows' queries and heads come to; 0 for one that saw nothing."""
    d = tl.arange(0, DIM)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + (rows[:, None] * HEADS + head[:, None]) * HEAD_DIM + d[None, :],
        narrow(acc, out.dtype.element_ty),
        mask=held[:, None] & (d < HEAD_DIM)[None, :],
    )


_LOG2_E = 1.4426950408889634  # weights are powers of two, as a GPU computes them
# Views of the step's one buffer, which begin anywhere: a kernel compiled for each alignment would gain nothing.
_UNALIGNED = ["tiles", "block_table", "query_starts", "seq_lens"]
# Numbers that change with the step: one compiled for each that is 1 or a multiple of 16 would be compiled while serving.
_VARYING = ["table_stride", "partial_rows", "splits"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _attend(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    out,
    partial,  # float32 [tiles, KV_HEADS, splits, rows, HEAD_DIM]
    maxima,  # float32 [tiles, KV_HEADS, splits, BLOCK_M]
    sums,
    tiles,  # int32 [tiles, 2]: request, first of its queries
    block_table,
    query_starts,
    seq_lens,
    q_stride,
    q_head_stride,
    table_stride,
    partial_rows,
    scale,  # of scores, in units of log2(e); with a cap, in units of the cap
    soft_cap,  # in units of log2(e)
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    FORMAT: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One tile of queries, one key-value head, one piece of the keys (all of them if SPLIT_SIZE is 0) a program."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    request, first, query_len, index, rows, head, held = _rows(tiles, query_starts, HEADS, KV_HEADS, BLOCK_M)
    kv_head = tl.program_id(1)
    context = tl.load(seq_lens + request) - query_len
    position = tl.where(held, context + index, -1)
    low, high = _key_range(first, query_len, context, BLOCK_M // GROUP, WINDOW, SPLIT_SIZE, BLOCK_N)
    d = tl.arange(0, DIM)
    inside = d < HEAD_DIM
    query = tl.load(
        q + rows[:, None] * q_stride + head[:, None] * q_head_stride + d[None, :],
        mask=held[:, None] & inside[None, :],
        other=0.0,
    )
    dtype: tl.constexpr = q.dtype.element_ty
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    for start in range(low, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        exists = n < high
        block = tl.load(block_table + request * table_stride + n // BLOCK_SIZE, mask=exists, other=0)
        at = (block.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE) * KV_HEADS + kv_head
        key = tl.load(
            keys + at[None, :] * HEAD_DIM + d[:, None], mask=exists[None, :] & inside[:, None], other=0
        )
        scores = dot(query, widen(key, dtype, FORMAT), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)) * scale
        if FORMAT:
            scores *= tl.load(key_scales + at, mask=exists, other=0.0)[None, :]
        if CAPPED:
            scores = soft_cap * tanh(scores)
        seen = n[None, :] <= position[:, None]  # none of them beyond `high`
        if WINDOW:
            seen = seen & (n[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        weights, decay, maximum, total = _weigh(scores, maximum, total)
        value = tl.load(
            values + at[:, None] * HEAD_DIM + d[None, :], mask=exists[:, None] & inside[None, :], other=0
        )
        if FORMAT:
            factor = tl.load(value_scales + at, mask=exists, other=0.0)
            value = narrow(widen(value, tl.float32, FORMAT) * factor[:, None], dtype)
        acc = dot(narrow(weights, dtype), value, acc * decay[:, None])
    if SPLIT_SIZE:
        piece = ((tl.program_id(0) * KV_HEADS + kv_head) * tl.num_programs(2) + tl.program_id(2)).to(tl.int64)
        m = tl.arange(0, BLOCK_M)
        tl.store(maxima + piece * BLOCK_M + m, maximum)
        tl.store(sums + piece * BLOCK_M + m, total)
        tl.store(
            partial + (piece * partial_rows + m[:, None]) * HEAD_DIM + d[None, :],
            acc,
            mask=(held & (maximum > float("-inf")))[:, None] & inside[None, :],
        )
    else:
        _finish(out, acc, total, rows, head, held, HEADS, HEAD_DIM, DIM)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["tiles", "query_starts"])
def _combine(
    partial,
    maxima,
    sums,
    out,
    tiles,
    query_starts,
    splits,
    partial_rows,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Put the pieces of one tile and one key-value head together, always from the first to the last."""
    _, _, _, _, rows, head, held = _rows(tiles, query_starts, HEADS, KV_HEADS, BLOCK_M)
    d = tl.arange(0, DIM)
    inside = d < HEAD_DIM
    m = tl.arange(0, BLOCK_M)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    first = ((tl.program_id(0) * KV_HEADS + tl.program_id(1)) * splits).to(tl.int64)
    for split in range(0, splits):
        piece = first + split
        found = tl.load(maxima + piece * BLOCK_M + m)
        there = held & (found > float("-inf"))  # nothing was written for the others
        highest = tl.where(there, tl.maximum(maximum, found), maximum)
        pivot = tl.where(highest == float("-inf"), 0.0, highest)
        decay, share = tl.exp2(maximum - pivot), tl.where(there, tl.exp2(found - pivot), 0.0)
        total = total * decay + tl.load(sums + piece * BLOCK_M + m) * share
        part = tl.load(
            partial + (piece * partial_rows + m[:, None]) * HEAD_DIM + d[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        acc = acc * decay[:, None] + part * share[:, None]
        maximum = highest
    _finish(out, acc, total, rows, head, held, HEADS, HEAD_DIM, DIM)


@dataclass(frozen=True)
class Tiles:
    """Queries that one launch of the kernel computes, by tiles of `rows` (query, head) pairs."""

    table: Tensor  # int32 [n, 2]: request, first of its queries
    count: int
    block_m: int  # rows that a tile has room for
    queries: int  # most queries that any tile holds
    splits: int = 1
    split_size: int = 0  # keys a piece; 0: all in one


def tile_shape(spec: AttentionSpec, rows: int) -> tuple[int, int]:
    """Rows of a tile, at least `rows` and a power of two, and the queries that it holds."""
    group = spec.num_heads // spec.num_kv_heads
    block_m = max(rows, triton.next_power_of_2(group))
    return block_m, block_m // group


def prompt_rows(head_dim: int, dtype: torch.dtype) -> int:
    """Rows of the widest tile that fits the registers of sm_80 and sm_90 without spilling (as compiled for both)."""
    if dtype is torch.float32:
        return 16
    return 128 if head_dim <= 128 else 64


def keys_per_step(head_dim: int, dtype: torch.dtype) -> int:
    """Keys that a program takes at a time."""
    if dtype is torch.float32:
        return 16
    return max(16, min(64, 8192 // triton.next_power_of_2(head_dim)))


def attend(
    q: Tensor,
    kv: KVCache,
    layer: int,
    spec: AttentionSpec,
    tiles: Tiles,
    out: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
) -> None:
    """Attention of the queries of `tiles`, whose keys and values are in the cache.

    Args:
        q: [T, num_heads, head_dim], the last dimension dense.
        kv: the cache; layer: of it; spec: of the layer.
        tiles: which queries.
        out: [T, num_heads, head_dim], dense; rows of other queries are left alone.
        block_table: int32 [R, B]; query_starts: int32 [R + 1]; seq_lens: int32 [R].
    """
    keys, values, *scales = kv.parts[layer]
    key_scales, value_scales = scales or (keys, values)
    dim = triton.next_power_of_2(spec.head_dim)
    sizes = {
        "HEADS": spec.num_heads,
        "KV_HEADS": spec.num_kv_heads,
        "HEAD_DIM": spec.head_dim,
        "DIM": dim,
        "BLOCK_M": tiles.block_m,
    }
    partial = maxima = sums = out
    rows = 0
    if tiles.split_size:
        pieces = (tiles.count, spec.num_kv_heads, tiles.splits)
        rows = tiles.queries * (spec.num_heads // spec.num_kv_heads)
        partial = torch.empty(*pieces, rows, spec.head_dim, dtype=torch.float32, device=q.device)
        maxima, sums = torch.empty(2, *pieces, tiles.block_m, dtype=torch.float32, device=q.device)
    wide = tiles.block_m >= 128 or (tiles.block_m >= 64 and dim > 128)
    _attend[(tiles.count, spec.num_kv_heads, tiles.splits)](
        q,
        keys,
        values,
        key_scales,
        value_scales,
        out,
        partial,
        maxima,
        sums,
        tiles.table,
        block_table,
        query_starts,
        seq_lens,
        q.stride(0),
        q.stride(1),
        block_table.stride(0),
        rows,
        spec.scale / spec.soft_cap if spec.soft_cap else spec.scale * _LOG2_E,
        (spec.soft_cap or 0.0) * _LOG2_E,
        BLOCK_SIZE=kv.layout.block_size,
        WINDOW=spec.window or 0,
        CAPPED=spec.soft_cap is not None,
        FORMAT=FORMATS[kv.kv_dtype],
        SPLIT_SIZE=tiles.split_size,
        BLOCK_N=keys_per_step(spec.head_dim, q.dtype),
        num_warps=8 if wide else 4,
        num_stages=2,
        **sizes,
    )
    if tiles.split_size:
        _combine[(tiles.count, spec.num_kv_heads)](
            partial, maxima, sums, out, tiles.table, query_starts, tiles.splits, rows, **sizes
        )
