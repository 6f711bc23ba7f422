"""attention=triton: in the interpreter where there is no GPU, on the GPU where there is one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from minivllm import LLM, SamplingParams
from minivllm.attention.base import AttentionBackend, StepBatch
from minivllm.attention.eager import EagerBackend
from minivllm.attention.kernels import paged, write
from minivllm.attention.kernels.tiles import LEAST_PIECE
from minivllm.attention.options import TritonAttentionOptions
from minivllm.attention.triton import TritonBackend
from minivllm.cache.compression import compress
from minivllm.cache.kv import KVCache, kv_cache
from minivllm.cache.manager import CacheManager
from minivllm.cache.spec import AttentionSpec, CacheLayout
from minivllm.config.compose import compose
from minivllm.engine.batch_inputs import pack
from minivllm.engine.executor import ModelRunner
from minivllm.engine.request import Request
from minivllm.engine.step import ScheduledRequest
from minivllm.errors import BadInput
from minivllm.kernels import common
from minivllm.kernels.device import BuildContext
from minivllm.models.rope import rotate
from tests.attention.test_backends import CPU, SPECS, reference, run_in_pieces
from tests.reference import make_checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYOUT = CacheLayout(8, 24)
CUTS = (70, 1, 3)  # a prompt, then decoding and verification, which are cut into pieces of 64 keys
backend = partial(TritonBackend, options=TritonAttentionOptions(64))


@pytest.mark.parametrize("name", ["grouped", "one kv head, odd size", "soft cap and window"])
def test_ragged_batches_match_the_reference(name: str) -> None:
    pairs = run_in_pieces(
        backend, SPECS[name], LAYOUT, torch.float32, 1, device=DEVICE, lengths=(1, 5, 21)
    )
    for out, expected in pairs:
        torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


def test_tiles_go_to_the_device_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.tensor() copies from memory that is not pinned, for which a GPU is waited."""
    monkeypatch.setattr(torch, "tensor", None)
    pairs = run_in_pieces(
        backend, SPECS["grouped"], LAYOUT, torch.float32, 1, device=DEVICE, lengths=(1, 21)
    )
    assert pairs


def test_layers_of_other_shapes_have_tiles_of_their_own() -> None:
    spec, other = SPECS["grouped"], SPECS["one kv head, odd size"]
    pairs = run_in_pieces(
        backend, spec, LAYOUT, torch.float32, 2, other, device=DEVICE, lengths=(3, 21)
    )
    for out, expected in pairs:
        torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


def in_cuts(
    attention: AttentionBackend, qkv: tuple[Tensor, ...], cuts: Sequence[int], beside: int = 0
) -> Tensor:
    """One sequence through the backend's cache, so many tokens at a time, on the CPU; `beside` as
    many of another's."""
    kv = attention.kv
    for part in kv.parts[0]:  # poisoned: what is read must have been written
        part[1:] = torch.nan if part.is_floating_point() else -1
    manager = CacheManager(kv.layout)
    device = kv.parts[0][0].device
    runner = ModelRunner(nn.Identity(), attention, device)
    total = beside * len(cuts) or len(qkv[0])
    request, other = (
        Request(name, [0] * count, SamplingParams(), max_num_tokens=count + 1, seed=0)
        for name, count in (("a", len(qkv[0])), ("b", total))
    )
    outs, start = [], 0
    for step, count in enumerate(cuts):
        manager.grow(request.cache, start, start + count)
        parts, (q, k, v) = (
            [ScheduledRequest(request, start, count)],
            (x[start : start + count] for x in qkv),
        )
        if beside:
            manager.grow(other.cache, other.num_computed_tokens, (step + 1) * beside)
            parts.insert(0, ScheduledRequest(other, step * beside, beside))
            q, k, v = (
                torch.cat((torch.randn_like(x[:1]).expand(beside, -1, -1), x)) for x in (q, k, v)
            )
        batch = runner.prepare(pack(parts, kv.layout.block_size))
        outs.append(
            attention.forward(0, q.to(device), k.to(device), v.to(device), batch).cpu()[beside:]
        )
        start += count
    return torch.cat(outs)


def sequence(spec: AttentionSpec, length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(length)
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    return tuple(torch.randn(length, h, spec.head_dim).to(dtype) for h in heads)


@pytest.mark.parametrize(("name", "size"), [*((name, 64) for name in SPECS), ("grouped", None)])
def test_pieces_of_the_keys_are_put_together(name: str, size: int | None) -> None:
    spec = SPECS[name]
    layout = CacheLayout(160, 3) if name == "window" else LAYOUT
    attention = TritonBackend(
        [spec],
        KVCache([spec], layout, torch.float32, DEVICE),
        TritonAttentionOptions(size),
    )
    qkv = sequence(spec, sum(CUTS), torch.float32)
    torch.testing.assert_close(
        in_cuts(attention, qkv, CUTS).double(), reference(*qkv, spec), atol=2e-6, rtol=1e-5
    )
    assert attention.counters == {"launches": 3, "launches_split": 0 if size is None else 2}


@pytest.mark.parametrize("name", ["grouped", "window"])
def test_more_pieces_than_are_put_together_at_a_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And pieces without keys, since the step's longest request is another, or the window begins
    behind them."""
    monkeypatch.setattr(paged, "PIECES", 2)
    layout = CacheLayout(32, 14)
    lengths = (150, 3, 70)
    pairs = run_in_pieces(
        backend, SPECS[name], layout, torch.float32, 1, device=DEVICE, lengths=lengths
    )
    for out, expected in pairs:
        torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("requests", "length", "size"),
    [(1, 512, 128), (1, 128, 0), (4, 4096, 128), (5, 4096, 512), (65, 4096, 0)],
)
def test_pieces_are_shorter_where_whole_ones_would_not_fill_a_gpu(
    requests: int, length: int, size: int
) -> None:
    spec = AttentionSpec(16, 8, 16, 0.25)
    attention = TritonBackend([spec], KVCache([spec], CacheLayout(16, 2), torch.float32, DEVICE))
    attention.processors = 132
    batch = SimpleNamespace(
        query_lens_host=(1,) * requests,
        seq_lens_host=(length,) * requests,
        token_ids=torch.zeros(requests),
        block_table=torch.zeros(requests, 1, device=DEVICE),
    )
    ((tiles,),) = attention.prepare(cast(StepBatch, batch)).values()
    assert (tiles.split_size, tiles.splits) == (size, -(-length // size) if size else 1)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_small_values_and_weights_are_not_lost_in_float16(kv_dtype: str) -> None:
    """A weight times a scale would be less than float16 has, where one key takes most of the
    weight."""
    spec = AttentionSpec(1, 1, 16, 1.0)
    kv = kv_cache([spec], CacheLayout(32, 10), torch.float16, DEVICE, kv_dtype)
    attention = TritonBackend([spec], kv)
    length = 257
    q, k, v = torch.zeros(3, length, 1, 16, dtype=torch.float16).unbind(0)
    q[:, 0, 0], k[:, 0, 0], k[0, 0, 0] = 1.0, -9.0, 0.0  # 256 keys of weight exp(-9), and one of 1
    v[1:] = 0.02
    out = in_cuts(attention, (q, k, v), (length - 1, 1))[-1, 0].float()
    share = (length - 1) * math.exp(-9.0)
    torch.testing.assert_close(
        out, torch.full((16,), 0.02 * share / (1 + share)), rtol=0.05, atol=0
    )


def test_tiles_with_the_most_keys_begin_first() -> None:
    spec = SPECS["grouped"]
    attention = backend([spec], KVCache([spec], LAYOUT, torch.float32, DEVICE))
    batch = SimpleNamespace(
        query_lens_host=(40, 20),
        seq_lens_host=(40, 90),
        token_ids=torch.zeros(60),
        block_table=torch.zeros(2, 1, device=DEVICE),
    )
    ((tiles,),) = attention.prepare(cast(StepBatch, batch)).values()
    begins = [
        (0, 70)[row] + first for row, first in tiles.table.tolist()
    ]  # of their queries, in the sequence
    assert begins == sorted(begins, reverse=True) and len(begins) > 2


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.bfloat16, "auto"),
        (torch.bfloat16, "int8"),
        (torch.float16, "auto"),
        (torch.float16, "fp8"),
        (torch.float32, "fp8"),
    ],
)
def test_error_is_at_most_twice_that_of_eager(dtype: torch.dtype, kv_dtype: str) -> None:
    spec = SPECS["grouped"]
    qkv = sequence(spec, sum(CUTS), dtype)
    expected = reference(*qkv, spec)
    errors = []
    for make, device in ((backend, DEVICE), (EagerBackend, CPU)):
        attention = make([spec], kv_cache([spec], LAYOUT, dtype, device, kv_dtype))
        errors.append(float((in_cuts(attention, qkv, CUTS).double() - expected).abs().max()))
    assert errors[0] <= 2 * errors[1] + 1e-6


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [("grouped", "auto"), ("one kv head, odd size", "int8"), ("window", "auto")],
)
def test_invariant_results_are_the_same_bits_however_a_prompt_is_cut_and_beside_others(
    name: str, kv_dtype: str
) -> None:
    spec, whole = SPECS[name], [70]
    cuts = [65, 1, 3, 1]  # all but the first behind more keys than a program takes at a time
    qkv = sequence(spec, sum(whole), torch.bfloat16)

    def outs(make: Callable[..., TritonBackend], cuts: Sequence[int], beside: int = 0) -> Tensor:
        kv = kv_cache([spec], LAYOUT, torch.bfloat16, DEVICE, kv_dtype)
        return in_cuts(make([spec], kv), qkv, cuts, beside)

    invariant = partial(TritonBackend, context=BuildContext(DEVICE, invariant=True))
    alone = outs(invariant, whole)
    assert torch.equal(outs(invariant, cuts, 3), alone)
    if (
        spec.window is None
    ):  # or this would prove nothing: tiles for few queries, in pieces, sum in another order
        assert not torch.equal(outs(backend, cuts), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_what_is_written_is_what_compression_says(kv_dtype: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    spec, layout = AttentionSpec(4, 2, 24, 1.0), CacheLayout(4, 8)
    k, v = torch.randn(2, 9, 2, 24).to(dtype).unbind(0)
    k = k * torch.logspace(-8, 2, 9, dtype=torch.float32).to(dtype)[:, None, None]
    v[3] = 0.0
    k[2, 1, :16] *= 1e-3  # numbers that fp8 has only without an exponent
    slots = torch.randperm(28)[:9] + 4
    kv = kv_cache([spec], layout, dtype, DEVICE, kv_dtype)
    write.write(kv, 0, slots.to(DEVICE), k.to(DEVICE), v.to(DEVICE))
    for x, bits, scales in zip((k, v), kv.parts[0][:2], kv.parts[0][2:], strict=True):
        wanted_bits, wanted_scales = compress(x, kv_dtype)
        assert torch.equal(scales.flatten(0, 1)[slots.to(DEVICE)].cpu(), wanted_scales)
        found = bits.flatten(0, 1)[slots.to(DEVICE)].cpu()
        zero = wanted_bits.view(torch.uint8) & 0x7F == 0  # minus zero is as good
        assert torch.equal(found[~zero], wanted_bits[~zero])
        assert not (found[zero].view(torch.uint8) & 0x7F).any()


@pytest.mark.parametrize("norm", ["none", "plain", "gemma"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (24, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_rotation_and_write_in_one(
    dtype: torch.dtype, head_dim: int, rotary_dim: int, norm: str
) -> None:
    torch.manual_seed(0)
    heads, kv_heads, tokens = 6, 2, 5
    layout = CacheLayout(4, 8)
    spec = AttentionSpec(heads, kv_heads, head_dim, 1.0)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    qk, v = (
        part.unflatten(1, (-1, head_dim))
        for part in qkv.split([(heads + kv_heads) * head_dim, kv_heads * head_dim], 1)
    )
    cos, sin = torch.randn(tokens, 2, 1, rotary_dim).to(dtype).unbind(1)
    weight = torch.randn(heads + kv_heads, head_dim).to(dtype)
    normed = torch.nn.functional.rms_norm(qk, (head_dim,), None, 1e-6)
    expected = {
        "none": qk,
        "plain": normed * weight,
        "gemma": torch.addcmul(normed, normed, weight),
    }[norm]
    expected = rotate(expected, cos, sin)
    slots = (torch.randperm(28)[:tokens] + 4).to(DEVICE)
    given = None if norm == "none" else (weight.to(DEVICE), 1e-6, norm)
    on_device = [t.to(DEVICE) for t in (qkv, cos, sin)]
    qk, v = (
        part.unflatten(1, (-1, head_dim))
        for part in on_device[0].split([(heads + kv_heads) * head_dim, kv_heads * head_dim], 1)
    )
    kv = KVCache([spec], layout, dtype, DEVICE)
    for part in kv.parts[0]:
        part.fill_(torch.nan)
    q = write.rotate_and_write(qk, v, heads, *on_device[1:], given, kv, 0, slots)
    keys, values = (part.flatten(0, 1)[slots].cpu() for part in kv.parts[0])
    alone = write.rotate(qk, *on_device[1:], given)
    # Rounded at the same places; sums of squares may differ in their last bit, and with it what is
    # rounded.
    close = (
        {"atol": 2e-6, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.04, "rtol": 0.008}
    )
    torch.testing.assert_close(torch.cat((q.cpu(), keys), 1), expected, **close)
    torch.testing.assert_close(alone.cpu(), expected, **close)
    assert torch.equal(values, v.cpu())
    assert (
        sum(int(part.isfinite().sum()) for part in kv.parts[0]) == 2 * tokens * kv_heads * head_dim
    )


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_tokens_are_those_of_eager(family: str, tmp_path: Path) -> None:
    """Chunks, joined batches and a warm prefix cache; gemma2 has soft caps and windows."""
    make_checkpoint(tmp_path, family)
    prompts = [list(range(3, 30)), [9, 8, 7], list(range(3, 25))]
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    overrides = [
        "batching.max_num_batched_tokens=16",
        "cache.block_size=8",
        "cache.prefix_caching=true",
        "model.max_model_len=64",
        "cache.num_blocks=30",
    ]
    tokens = []
    for attention, device in (("eager", "cpu"), ("triton", DEVICE.type)):
        with LLM(
            str(tmp_path), device=device, quant="fp32", attention=attention, overrides=overrides
        ) as llm:
            assert llm.engine.runner.attention.name == attention
            tokens.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
    assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_batch_determinism_gives_a_request_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    """Alone, in chunks beside another, and from a prefix cache that is warm."""
    make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16)
    prompts = [[*range(3, 73)], [9, 8, 7]]  # of the first more keys than a program takes at a time
    params = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=2)
    common = ["runtime.determinism=batch", "model.max_model_len=80", "cache.num_blocks=30"]

    def ask(overrides: list[str], orders: list[list[int]]) -> list[tuple[list[int], object]]:
        knobs = [*common, *overrides]
        with LLM(str(tmp_path), device=DEVICE.type, attention="triton", overrides=knobs) as llm:
            chosen = llm.engine.runner.attention
            assert (
                isinstance(chosen, TritonBackend) and chosen.invariant and chosen.split_size is None
            )
            found = [llm.generate([prompts[i] for i in order], params) for order in orders]
        return [
            (out.outputs[0].token_ids, out.outputs[0].logprobs) for outs in found for out in outs
        ]

    alone = ask([], [[0], [1]])
    knobs = [
        "batching.max_num_batched_tokens=66",
        "cache.prefix_caching=true",
        "cache.block_size=8",
    ]
    assert ask(knobs, [[1, 0], [0]]) == [alone[1], alone[0], alone[0]]


def test_without_gpu_or_interpreter_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "INTERPRETED", False)
    kv = KVCache([SPECS["grouped"]], LAYOUT, torch.float32, CPU)
    with pytest.raises(
        BadInput, match=r"attention=triton needs a GPU, or TRITON_INTERPRET=1.*attention=sdpa"
    ):
        TritonBackend([SPECS["grouped"]], kv)


def test_a_split_size_is_refused_that_pieces_cannot_have() -> None:
    fields = TritonAttentionOptions.__dataclass_fields__
    assert fields["split_size"].metadata["at_least"] == LEAST_PIECE
    for size in (LEAST_PIECE, 1024, None):
        assert compose(["attention=triton", f"attention.split_size={size or 'null'}"])
    for size in (32, 100):
        with pytest.raises(BadInput, match=rf"attention.split_size={size} must be "):
            compose(["attention=triton", f"attention.split_size={size}"])
