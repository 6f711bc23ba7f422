"""The C++ kernel on contexts of several pieces, which are shared out and joined, with this
processor's instructions and others."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm.kernels.cpu.library import Kernels
from tests.kernels.cpu.test_processors import compiled

BLOCK, KEYS, DIM = 16, 4_300, 64  # three pieces; the last one ends within a tile
# Compiler flags, and what the processor must have to run them.
WAYS = {
    "AVX2": (["-fopenmp", "-mavx2", "-mfma", "-mf16c"], {"avx2"}),
    "the matrix unit's twin": (
        ["-fopenmp", "-march=cooperlake", "-DMINIVLLM_TWIN_TILES"],
        {"avx512_bf16", "avx512_vnni", "avx512vl", "avx512dq"},
    ),
}
ENTRY = """
#include "attention.cpp"
using namespace minivllm;
extern "C" __attribute__((visibility("default"))) void run(
    long requests, long tokens, long heads, long kv_heads, long dim, long block_size, long width,
    long window, const BFloat16* q, const BFloat16* k, const BFloat16* v, BFloat16* k_cache,
    BFloat16* v_cache, const int64_t* slots, const int32_t* starts, const int32_t* lengths,
    const int32_t* table, BFloat16* out) {
  const float scale = 1 / std::sqrt(static_cast<float>(dim));
  const Attention shape{requests, tokens, heads, kv_heads, dim, block_size, width, scale, window,
                        0.0f, heads * dim, kv_heads * dim, kv_heads * dim, slots, starts, lengths,
                        table};
  attend(shape, q, k, v, k_cache, v_cache, out);
}
"""


def cached(
    paged_attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor
) -> Callable[[int, int, int], Tensor]:
    """What gives the outputs of some last queries of a context, by their number, the window and how
    many other requests with one token each lie beside it."""
    blocks, most = math.ceil(KEYS / BLOCK), 300
    table = torch.zeros(1 + most, blocks, dtype=torch.int32)
    table[0] = 1 + most + torch.randperm(blocks)
    table[1:, 0] = 1 + torch.arange(most)
    place = torch.arange(KEYS)
    slots = table[0].long()[place // BLOCK] * BLOCK + place % BLOCK
    shape = (1 + most + blocks, BLOCK, *k.shape[1:])
    caches = [torch.full(shape, torch.nan, dtype=k.dtype) for _ in range(2)]

    def attend(fresh: int, window: int, beside: int) -> Tensor:
        rows = [torch.cat([x[-fresh:], x[:beside]]) for x in (q, k, v)]
        own = torch.cat([slots[-fresh:], table[1 : 1 + beside, 0].long() * BLOCK])
        starts = torch.tensor([0, *range(fresh, fresh + beside + 1)], dtype=torch.int32)
        lengths = torch.tensor([KEYS] + [1] * beside, dtype=torch.int32)
        where = (own, starts, lengths, table[: 1 + beside])
        return paged_attention(*rows, *caches, *where, DIM**-0.5, window, 0.0)[:fresh]

    attend(KEYS, 1, 0)
    return attend


def check(
    paged_attention: Callable[..., Tensor], dtype: torch.dtype, window: int, kv_heads: int
) -> None:
    """A query gets what it should, and the same bits however its context is shared out. Alone its
    pieces are tasks of their own; beside many others they are one, and at the end of a prompt,
    too."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(KEYS, heads, DIM).to(dtype) for heads in (4, kv_heads, kv_heads))
    attend = cached(paged_attention, q, k, v)
    alone = attend(1, window, 0)
    for fresh, beside in ((3, 0), (1, 300), (3, 300), (100, 2)):
        assert torch.equal(attend(fresh, window, beside)[-1:], alone), (fresh, beside)
    keys, values = (x[-window:].double().repeat_interleave(4 // kv_heads, 1) for x in (k, v))
    scores = torch.einsum("hd,khd->hk", q[-1].double(), keys) * DIM**-0.5
    exact = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
    error = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(alone[0].double(), exact, rtol=0, atol=error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [0, 2_300])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_a_query_has_the_same_bits_however_its_context_is_shared_out(
    kernels: Kernels, dtype: torch.dtype, window: int, kv_heads: int
) -> None:
    check(kernels.paged_attention, dtype, window, kv_heads)


@pytest.mark.parametrize("way", WAYS)
def test_it_is_right_with_the_instructions_of_other_processors(way: str, tmp_path: Path) -> None:
    run = compiled(*WAYS[way], ENTRY, tmp_path)

    def paged_attention(q: Tensor, k: Tensor, *others: Any) -> Tensor:
        *tensors, _, window, _ = others
        table, out = tensors[-1], torch.full_like(q, torch.nan)
        sizes = (table.shape[0], *q.shape[:2], k.shape[1], DIM, BLOCK, table.shape[1], window)
        words = [x.view(torch.int16) if x.is_floating_point() else x for x in (q, k, *tensors, out)]
        run(sizes, [word.contiguous().numpy() for word in words])
        return out

    check(paged_attention, torch.bfloat16, 2_300, 1)
