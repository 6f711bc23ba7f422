"""Attention over the paged cache: one kernel for prompts, chunks, decoding and verification.

The online softmax of FlashAttention-2 (Dao 2023) over keys and values that a block table locates
(PagedAttention, Kwon et al. 2023). Long sequences with few queries are cut into pieces of a fixed
number of keys, and a second kernel combines the results of the pieces (Flash-Decoding, Dao et al.
2023)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.attention.base import StepBatch
from minivllm.attention.kernels.storage import FORMATS, widen
from minivllm.attention.kernels.tiles import Tiles, keys_per_step, launch_options, power_of_two
from minivllm.cache.kv import KVCache
from minivllm.cache.spec import AttentionSpec
from minivllm.kernels.common import dot, narrow, tanh


@triton.jit
def _tile(tiles, query_starts, seq_lens):
    """This program's tile: its request, the first of its queries, the first token of the request in
    the step, the request's queries, and the tokens that the request holds before them. Programs are
    (key-value head, tile, ...): programs that run together read the heads of one token, which are
    adjacent."""
    tile = tl.program_id(1)
    request, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    begin = tl.load(query_starts + request)
    query_len = tl.load(query_starts + request + 1) - begin
    return request, first, begin, query_len, tl.load(seq_lens + request) - query_len


@triton.jit
def _rows(m, GROUP: tl.constexpr):
    """Rows of a tile: the query, counted from the tile's first, and the head. Heads that share keys
    are adjacent."""
    return m // GROUP, tl.program_id(0) * GROUP + m % GROUP


@triton.jit
def _key_range(
    first,
    query_len,
    context,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The keys that a query of this program's tile sees: from a step of BLOCK_N on."""
    low = 0
    high = context + tl.minimum(first + QUERIES, query_len)
    if WINDOW:
        low = tl.maximum(context + first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    return low, high


@triton.jit
def _weigh(scores, maximum, total):
    """One step of the online softmax: the new keys' weights, the factor of the previous sums,
    maximum and total."""
    highest = tl.maximum(maximum, tl.max(scores, 1))
    pivot = tl.where(highest == float("-inf"), 0.0, highest)  # a row without keys so far
    weights = tl.exp2(scores - pivot[:, None])
    decay = tl.exp2(maximum - pivot)
    return weights, decay, highest, total * decay + tl.sum(weights, 1)


@triton.jit
def _blocks(table_row, n, high, BLOCK_SIZE: tl.constexpr):
    """The cache blocks of keys n, of those below `high`."""
    return tl.load(table_row + n // BLOCK_SIZE, mask=n < high, other=0)


PIECES = 16  # pieces of one query and head that are combined at a time
_LOG2_E = 1.4426950408889634  # weights are powers of two, as a GPU computes them
# Views of the step's one buffer with any alignment: a kernel for each alignment gains nothing.
_UNALIGNED = ["tiles", "block_table", "query_starts", "seq_lens"]
# Numbers that change with the step. Triton would compile a kernel for values that are 1 or a
# multiple of 16 while requests are served.
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
    """A program computes one key-value head, one tile of queries and one piece of the keys (all
    keys if SPLIT_SIZE is 0).

    A step's blocks are looked up in the step before: then the addresses of keys and values are
    known early enough to prefetch them."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    request, first, begin, query_len, context = _tile(tiles, query_starts, seq_lens)
    low, high = _key_range(first, query_len, context, BLOCK_M // GROUP, WINDOW, BLOCK_N)
    if SPLIT_SIZE:
        split = tl.program_id(2)
        low, high = tl.maximum(low, split * SPLIT_SIZE), tl.minimum(high, (split + 1) * SPLIT_SIZE)
        if low >= high:
            # The grid has pieces for the longest sequence, or the longest of a recorded step.
            return
    kv_head = tl.program_id(0)
    m = tl.arange(0, BLOCK_M)
    query_of, head = _rows(m, GROUP)
    index = first + query_of
    held = (m < BLOCK_M // GROUP * GROUP) & (index < query_len)
    rows = (begin + index).to(tl.int64)
    position = tl.where(held, context + index, -1)
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
    table_row = block_table + request * table_stride
    ahead = _blocks(table_row, low + tl.arange(0, BLOCK_N), high, BLOCK_SIZE)
    for start in range(low, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        exists = n < high
        block, ahead = ahead, _blocks(table_row, n + BLOCK_N, high, BLOCK_SIZE)
        at = (block.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE) * KV_HEADS + kv_head
        key = tl.load(
            keys + at[None, :] * HEAD_DIM + d[:, None],
            mask=exists[None, :] & inside[:, None],
            other=0,
        )
        scores = (
            dot(query, widen(key, dtype, FORMAT), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)) * scale
        )
        if FORMAT:
            scores *= tl.load(key_scales + at, mask=exists, other=0.0)[None, :]
        if CAPPED:
            scores = soft_cap * tanh(scores)
        seen = n[None, :] <= position[:, None]  # no key beyond `high`
        if WINDOW:
            seen = seen & (n[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        weights, decay, maximum, total = _weigh(scores, maximum, total)
        value = tl.load(
            values + at[:, None] * HEAD_DIM + d[None, :],
            mask=exists[:, None] & inside[None, :],
            other=0,
        )
        if FORMAT:
            factor = tl.load(value_scales + at, mask=exists, other=0.0)
            if dtype == tl.float16:  # float16 has too few exponents for a weight times a scale
                value = narrow(widen(value, tl.float32, FORMAT) * factor[:, None], dtype)
            else:
                value = widen(value, dtype, FORMAT)
                weights *= factor[None, :]
        acc = dot(narrow(weights, dtype), value, acc * decay[:, None])
    kept = held[:, None] & inside[None, :]
    if SPLIT_SIZE:
        piece = (tl.program_id(1) * KV_HEADS + kv_head).to(tl.int64) * tl.num_programs(2) + split
        tl.store(maxima + piece * BLOCK_M + m, maximum)
        tl.store(sums + piece * BLOCK_M + m, total)
        tl.store(
            partial + (piece * partial_rows + m[:, None]) * HEAD_DIM + d[None, :], acc, mask=kept
        )
    else:
        tl.store(
            out + (rows[:, None] * HEADS + head[:, None]) * HEAD_DIM + d[None, :],
            narrow(acc / tl.where(total == 0.0, 1.0, total)[:, None], out.dtype.element_ty),
            mask=kept,
        )


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _combine(
    partial,
    maxima,
    sums,
    out,
    tiles,
    query_starts,
    seq_lens,
    splits,
    partial_rows,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Combine the pieces of one query and head, from the first to the last that has keys, PIECES at
    a time."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    _, first, begin, query_len, context = _tile(tiles, query_starts, seq_lens)
    m = tl.program_id(2)
    query_of, head = _rows(m, GROUP)
    if first + query_of >= query_len:
        return
    low, high = _key_range(first, query_len, context, BLOCK_M // GROUP, WINDOW, BLOCK_N)
    last = tl.cdiv(high, SPLIT_SIZE)
    before = (tl.program_id(1) * KV_HEADS + tl.program_id(0)).to(tl.int64) * splits
    d = tl.arange(0, DIM)
    inside = d < HEAD_DIM
    maximum = float("-inf")
    total = 0.0
    acc = tl.zeros([DIM], tl.float32)
    for start in range(low // SPLIT_SIZE, last, PIECES):
        split = start + tl.arange(0, PIECES)
        there = split < last
        piece = before + split
        piece_maxima = tl.load(maxima + piece * BLOCK_M + m, mask=there, other=float("-inf"))
        piece_sums = tl.load(sums + piece * BLOCK_M + m, mask=there, other=0.0)
        part = tl.load(
            partial + (piece * partial_rows + m)[:, None] * HEAD_DIM + d[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        highest = tl.maximum(maximum, tl.max(piece_maxima, 0))
        # The query sees no key of these pieces.
        pivot = tl.where(highest == float("-inf"), 0.0, highest)
        share, decay = tl.exp2(piece_maxima - pivot), tl.exp2(maximum - pivot)
        total = total * decay + tl.sum(piece_sums * share, 0)
        acc = acc * decay + tl.sum(part * share[:, None], 0)
        maximum = highest
    row = (begin + first + query_of).to(tl.int64)
    tl.store(
        out + (row * HEADS + head) * HEAD_DIM + d,
        narrow(acc / total, out.dtype.element_ty),
        mask=inside,
    )


class _Pieces(NamedTuple):
    """Results of the pieces of each tile's keys, before `_combine` adds them up."""

    partial: Tensor  # float32 [tiles, KV_HEADS, splits, rows, HEAD_DIM]
    maxima: Tensor  # float32 [tiles, KV_HEADS, splits, BLOCK_M]
    sums: Tensor  # as `maxima`

    @classmethod
    def empty(cls, spec: AttentionSpec, tiles: Tiles, rows: int, device: torch.device) -> _Pieces:
        """Memory for the pieces of `tiles`, each with `rows` (query, head) pairs."""
        pieces = (tiles.count, spec.num_kv_heads, tiles.splits)
        partial = torch.empty(*pieces, rows, spec.head_dim, dtype=torch.float32, device=device)
        both = torch.empty(2, *pieces, tiles.block_m, dtype=torch.float32, device=device)
        return cls(partial, *both)


def attend(
    q: Tensor,
    kv: KVCache,
    layer: int,
    spec: AttentionSpec,
    tiles: Tiles,
    out: Tensor,
    batch: StepBatch,
) -> None:
    """Attention of the queries of `tiles`, whose keys and values are in the cache.

    Args:
        q: [T, num_heads, head_dim], the last dimension dense.
        kv: the cache; layer: its index; spec: of the layer.
        tiles: the queries to compute.
        out: [T, num_heads, head_dim], dense; rows of other queries stay unchanged.
        batch: the step.
    """
    keys, values, *scales = kv.parts[layer]
    key_scales, value_scales = scales or (keys, values)
    sizes = {
        "HEADS": spec.num_heads,
        "KV_HEADS": spec.num_kv_heads,
        "HEAD_DIM": spec.head_dim,
        "DIM": max(16, power_of_two(spec.head_dim)),  # 16: the least that tl.dot adds up
        "WINDOW": spec.window or 0,
        "SPLIT_SIZE": tiles.split_size,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": keys_per_step(spec.head_dim, q.dtype),
    }
    rows, pieces = 0, _Pieces(out, out, out)
    if tiles.split_size:
        rows = tiles.queries * (spec.num_heads // spec.num_kv_heads)
        pieces = _Pieces.empty(spec, tiles, rows, q.device)
    starts_and_lens = batch.query_start_loc, batch.seq_lens
    _attend[(spec.num_kv_heads, tiles.count, tiles.splits)](
        *(q, keys, values, key_scales, value_scales, out),
        *pieces,
        *(tiles.table, batch.block_table, *starts_and_lens),
        *(q.stride(0), q.stride(1), batch.block_table.stride(0)),
        rows,
        spec.scale / spec.soft_cap if spec.soft_cap else spec.scale * _LOG2_E,
        (spec.soft_cap or 0.0) * _LOG2_E,
        BLOCK_SIZE=kv.layout.block_size,
        CAPPED=spec.soft_cap is not None,
        FORMAT=FORMATS[kv.kv_dtype],
        **sizes,
        **launch_options(tiles.block_m, spec.head_dim, kv.compressed),
    )
    if tiles.split_size:
        _combine[(spec.num_kv_heads, tiles.count, rows)](
            *(*pieces, out, tiles.table, *starts_and_lens, tiles.splits, rows),
            PIECES=PIECES,
            num_warps=1,  # so that no warp waits for another one
            **sizes,
        )
