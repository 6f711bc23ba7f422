"""Triton's kernels on a GPU at the shapes of real models; tests/attention, tests/quant and
tests/models have the small ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from minivllm.attention.base import AttentionBackend, StepBatch
from minivllm.attention.eager import EagerBackend
from minivllm.attention.flash import FlashBackend
from minivllm.attention.triton import TritonBackend
from minivllm.cache.kv import KVCache, kv_cache
from minivllm.cache.spec import AttentionSpec, CacheLayout
from minivllm.errors import BadInput
from minivllm.quant.base import Quantizer
from minivllm.quant.int4 import Int4
from minivllm.quant.int8 import Int8
from minivllm.quant.nf4 import NF4
from tests.quant.kernels import test_narrow as narrow
from tests.quant.kernels.test_products import Streamed, stored

pytestmark = pytest.mark.gpu
SPECS = {
    "qwen3": AttentionSpec(16, 8, 128, 128**-0.5),
    "qwen2.5": AttentionSpec(14, 2, 64, 64**-0.5),
    "gemma2": AttentionSpec(8, 4, 256, 256**-0.5, window=4096, soft_cap=50.0),
    "gemma3": AttentionSpec(4, 1, 256, 256**-0.5, window=512),
    "phi3": AttentionSpec(32, 32, 96, 96**-0.5, window=2047),
}


def batch_of(query_lens: list[int], seq_lens: list[int], block_size: int) -> StepBatch:
    """Requests whose blocks lie at random places of the cache."""
    counts = [-(-length // block_size) for length in seq_lens]
    order = (torch.randperm(sum(counts)) + 1).split(counts)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, blocks in enumerate(order):
        table[row, : len(blocks)] = blocks
    positions = torch.cat(
        [torch.arange(s - q, s) for q, s in zip(query_lens, seq_lens, strict=True)]
    )
    rows = torch.arange(len(counts)).repeat_interleave(torch.tensor(query_lens))
    slots = table[rows, positions // block_size].long() * block_size + positions % block_size
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    tensors = (
        positions,
        positions,
        slots,
        starts,
        torch.tensor(seq_lens).int(),
        table,
        positions[:0],
    )
    lens = (tuple(query_lens), tuple(seq_lens), tuple(seq_lens))
    return StepBatch(*(t.cuda() for t in tensors), *lens)


def errors(
    make: Callable[..., AttentionBackend],
    name: str,
    dtype: torch.dtype,
    kv_dtype: str,
    block_size: int = 16,
) -> Iterator[tuple[float, float]]:
    """Relative error of the backend, and that of eager in the same dtype: when decoding, and in a
    mixed batch."""
    torch.manual_seed(0)
    spec, layout = SPECS[name], CacheLayout(block_size, 25_600 // block_size)
    for query_lens, seq_lens in (
        ([1] * 6, [1, 17, 600, 2048, 3000, 9000]),
        ([5, 1, 300, 64], [905, 4000, 5000, 64]),
    ):
        batch = batch_of(query_lens, seq_lens, layout.block_size)
        exact_kv = KVCache([spec], layout, torch.float32, torch.device("cuda"))
        kv = kv_cache([spec], layout, dtype, torch.device("cuda"), kv_dtype)
        slots = torch.arange(layout.num_blocks * layout.block_size, device="cuda")
        past = torch.randn(2, len(slots), spec.num_kv_heads, spec.head_dim, device="cuda").to(dtype)
        kv.write(0, slots, *past)
        exact_kv.write(0, slots, *past.float())
        total = sum(query_lens)
        q = torch.randn(total, spec.num_heads, spec.head_dim, device="cuda").to(dtype)
        k, v = past[:, batch.slot_mapping].unbind(0)
        exact = EagerBackend([spec], exact_kv).forward(0, q.float(), k.float(), v.float(), batch)
        eager = EagerBackend([spec], kv).forward(0, q, k, v, batch)
        backend = make([spec], kv)
        batch = batch._replace(attention=backend.prepare(batch))
        out = backend.forward(0, q, k, v, batch)
        ours, others = (float((y.float() - exact).norm() / exact.norm()) for y in (out, eager))
        yield ours, others


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SPECS)
@torch.inference_mode()
def test_attention_is_within_twice_the_error_of_eager(
    name: str, dtype: torch.dtype, kv_dtype: str
) -> None:
    for ours, eager in errors(TritonBackend, name, dtype, kv_dtype):
        assert ours <= 2 * eager


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SPECS)
@torch.inference_mode()
def test_flash_attn_is_given_what_it_needs(name: str, dtype: torch.dtype, block_size: int) -> None:
    try:
        for other, eager in errors(FlashBackend, name, dtype, "auto", block_size):
            assert other <= 2 * eager
    except BadInput as refused:
        pytest.skip(str(refused))


@pytest.mark.parametrize("rows", [1, 5, 16, 33, 64])
@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 3072), (4096, 12288)])
@pytest.mark.parametrize(
    "make",
    [
        Streamed,
        partial(Int8, kernel="triton"),
        partial(NF4, kernel="triton"),
        partial(NF4, double_quant=False, kernel="triton"),
        partial(NF4, "float16", kernel="triton"),
        partial(Int4, kernel="triton"),
        partial(Int4, "float16", kernel="triton"),
    ],
    ids=["plain", "int8", "nf4", "nf4 plain scales", "nf4 fp16", "int4", "int4 fp16"],
)
@torch.inference_mode()
def test_products_are_within_twice_the_error_of_the_converted_weight(
    make: Callable[[], Quantizer], shape: tuple[int, int], rows: int
) -> None:
    torch.manual_seed(0)
    method = make()  # not sooner: without bitsandbytes NF4 alone is an error
    layer = method.pack((torch.randn(*shape, device="cuda") * 0.02).to(method.dtype), None)
    weight = stored(layer)
    x = torch.randn(rows, shape[1], device="cuda").to(method.dtype)
    exact = x.double() @ weight.t()
    plain, out = x @ weight.to(method.dtype).t(), layer(x)
    errors = [float((y.double() - exact).norm() / exact.norm()) for y in (out, plain)]
    assert errors[0] <= 2 * errors[1] + 1e-4, errors


@pytest.mark.parametrize("rows", [1, 16, 64, 300])
@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 3072), (4096, 12288)])
@pytest.mark.parametrize("name", narrow.METHODS)
@torch.inference_mode()
def test_products_of_8_bits_are_those_of_rounded_activations(
    name: str, shape: tuple[int, int], rows: int
) -> None:
    torch.manual_seed(0)
    layer = narrow.layer_of(name, (torch.randn(*shape, device="cuda") * 0.02).bfloat16())
    x = torch.randn(rows, shape[1], device="cuda").bfloat16()
    exact = narrow.rounded(x, layer.group) @ narrow.stored(layer).t()
    error = (layer(x).double() - exact).norm() / exact.norm()
    assert float(error) <= 2 * float((exact.bfloat16().double() - exact).norm() / exact.norm())
