"""The C++ kernel on contexts of several pieces, which are shared out and joined."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from minivllm.kernels.cpu.library import Kernels

BLOCK, KEYS, DIM = 16, 4_300, 64  # three pieces; the last one ends within a tile


def cached(kernels: Kernels, q: Tensor, k: Tensor, v: Tensor) -> Callable[[int, int, int], Tensor]:
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
        out: Tensor = kernels.paged_attention(*rows, *caches, *where, DIM**-0.5, window, 0.0)
        return out[:fresh]

    attend(KEYS, 1, 0)
    return attend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [0, 2_300])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_a_query_has_the_same_bits_however_its_context_is_shared_out(
    kernels: Kernels, dtype: torch.dtype, window: int, kv_heads: int
) -> None:
    """Alone its pieces are tasks of their own; beside many others they are one, and at the end of a
    prompt, too."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(KEYS, heads, DIM).to(dtype) for heads in (4, kv_heads, kv_heads))
    attend = cached(kernels, q, k, v)
    alone = attend(1, window, 0)
    for fresh, beside in ((3, 0), (1, 300), (3, 300), (100, 2)):
        assert torch.equal(attend(fresh, window, beside)[-1:], alone), (fresh, beside)
    keys, values = (x[-window:].double().repeat_interleave(4 // kv_heads, 1) for x in (k, v))
    scores = torch.einsum("hd,khd->hk", q[-1].double(), keys) * DIM**-0.5
    exact = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
    error = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(alone[0].double(), exact, rtol=0, atol=error)
