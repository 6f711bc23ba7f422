"""Every attention backend against plain softmax attention over the whole sequence."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from minivllm.attention import auto
from minivllm.attention.auto import select
from minivllm.attention.base import AttentionBackend
from minivllm.attention.eager import EagerBackend
from minivllm.attention.invariant import InvariantBackend
from minivllm.attention.kernels.cpu import CPUBackend
from minivllm.attention.sdpa import SDPABackend
from minivllm.cache.kv import KVCache, kv_cache
from minivllm.cache.manager import CacheManager
from minivllm.cache.spec import AttentionSpec, CacheLayout
from minivllm.engine.batch_inputs import pack
from minivllm.engine.executor import ModelRunner
from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Request
from minivllm.engine.step import ScheduledRequest
from minivllm.errors import BadInput
from minivllm.kernels.cpu import library
from minivllm.kernels.device import BuildContext

CPU = torch.device("cpu")
LENGTHS = (1, 5, 16, 17, 40)


def reference(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention of a whole sequence, [tokens, heads, head_dim], in float64."""
    groups = spec.num_heads // spec.num_kv_heads
    q, k, v = (
        q.double(),
        k.double().repeat_interleave(groups, 1),
        v.double().repeat_interleave(groups, 1),
    )
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.soft_cap:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None, :]
    hidden = (distance < 0) | (distance >= (spec.window or len(q)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def run_in_pieces(
    make: Callable[..., AttentionBackend],
    spec: AttentionSpec,
    layout: CacheLayout,
    dtype: torch.dtype,
    seed: int,
    other: AttentionSpec | None = None,
    cut_seed: int | None = None,
    device: torch.device = CPU,
    kv_dtype: str = "auto",
    lengths: Sequence[int] = LENGTHS,
    poison: float = torch.nan,
) -> list[tuple[Tensor, Tensor]]:
    """Feed sequences through the paged cache in random pieces and batches; (output, reference) of
    each.

    The layer that is looked at is the second; the first is of `other` kind, or the same.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed if cut_seed is None else cut_seed)
    specs = [other or spec, spec]
    kv = kv_cache(specs, layout, dtype, device, kv_dtype)
    for part in itertools.chain(*kv.parts):  # poisoned: what is read must have been written
        part[1:] = poison if part.is_floating_point() else -1
    manager = CacheManager(layout)
    backend = make(specs, kv)
    runner = ModelRunner(nn.Identity(), backend, device)
    heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_dim
    requests, data, outputs = [], [], []
    for index, length in enumerate(lengths):
        requests.append(
            Request(str(index), [0] * length, SamplingParams(), max_num_tokens=length + 1, seed=0)
        )
        data.append(
            tuple(torch.randn(length, h, size).to(dtype) for h in (heads, kv_heads, kv_heads))
        )
        outputs.append(torch.full((length, heads, size), torch.nan, dtype=dtype))
    while any(r.num_computed_tokens < r.num_tokens for r in requests):
        parts = []
        for r in requests:
            remaining = r.num_tokens - r.num_computed_tokens
            if remaining and rng.random() < 0.7:
                count = rng.choice([1, rng.randint(1, remaining), remaining])
                assert manager.grow(r.cache, r.num_computed_tokens, r.num_computed_tokens + count)
                parts.append(ScheduledRequest(r, r.num_computed_tokens, count))
        if not parts:
            continue
        rng.shuffle(parts)
        batch = runner.prepare(pack(parts, layout.block_size))
        q, k, v = (
            torch.cat([data[int(p.request.request_id)][i][p.start : p.end] for p in parts]).to(
                device
            )
            for i in range(3)
        )
        out = backend.forward(1, q, k, v, batch)
        start = 0
        for p in parts:
            outputs[int(p.request.request_id)][p.start : p.end] = out[
                start : start + p.num_tokens
            ].cpu()
            p.request.num_computed_tokens = p.end
            start += p.num_tokens
    return [(out, reference(*qkv, spec)) for out, qkv in zip(outputs, data, strict=True)]


def cpu(specs: Sequence[AttentionSpec], kv: KVCache) -> AttentionBackend:
    """The C++ kernel, where it can be compiled."""
    try:
        library.load()
    except (RuntimeError, OSError) as error:
        pytest.skip(f"the C++ kernels cannot be had here: {str(error).splitlines()[0]}")
    return CPUBackend(specs, kv, BuildContext(CPU, library.load()))


MAKERS: dict[str, Callable[..., AttentionBackend]] = {
    "eager": EagerBackend,
    "sdpa": SDPABackend,
    "invariant": InvariantBackend,
    "cpu": cpu,
}
SPECS = {
    "multi-head": AttentionSpec(4, 4, 16, 0.25),
    "grouped": AttentionSpec(6, 2, 16, 0.25),
    "one kv head, odd size": AttentionSpec(3, 1, 24, 0.2),
    "window": AttentionSpec(4, 2, 16, 0.25, window=7),
    "window of one": AttentionSpec(4, 2, 16, 0.25, window=1),
    "window, one kv head": AttentionSpec(3, 1, 24, 0.2, window=16),
    "one kv head, window, wide": AttentionSpec(5, 1, 80, 0.1, window=33),
    "soft cap": AttentionSpec(4, 2, 16, 0.25, soft_cap=0.5),
    "soft cap and window": AttentionSpec(4, 1, 16, 0.25, window=7, soft_cap=0.5),
}
LAYOUTS = {
    "paged": CacheLayout(4, 40),
    "block of one": CacheLayout(1, 120),
    "contiguous": CacheLayout(48, 6),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    ("make", "spec"),
    [
        pytest.param(make, spec, id=f"{kind}-{name}")
        for kind, make in MAKERS.items()
        for name, spec in SPECS.items()
        if not (kind == "sdpa" and spec.soft_cap)
        and not (kind == "cpu" and spec.head_dim % 16)  # refused, see below
    ],
)
def test_matches_reference(
    make: Callable[..., AttentionBackend], spec: AttentionSpec, layout: CacheLayout
) -> None:
    for seed in range(3):
        for out, expected in run_in_pieces(make, spec, layout, torch.float32, seed):
            torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize(("spec", "other"), [("grouped", "window"), ("window", "grouped")])
def test_layers_have_windows_of_their_own(
    make: Callable[..., AttentionBackend], spec: str, other: str
) -> None:
    for seed in range(3):
        pairs = run_in_pieces(
            make, SPECS[spec], LAYOUTS["paged"], torch.float32, seed, SPECS[other]
        )
        for out, expected in pairs:
            torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("make", [SDPABackend, cpu])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_error_is_at_most_twice_that_of_eager(
    make: Callable[..., AttentionBackend], dtype: torch.dtype
) -> None:
    def error(make: Callable[..., AttentionBackend]) -> float:
        pairs = run_in_pieces(make, SPECS["grouped"], LAYOUTS["paged"], dtype, seed=0)
        return max(float((out.double() - expected).abs().max()) for out, expected in pairs)

    assert error(make) <= 2 * error(EagerBackend) + 1e-6


def test_soft_cap_is_refused_by_sdpa_and_auto_goes_on_to_eager() -> None:
    spec = SPECS["soft cap"]
    kv = KVCache([spec], CacheLayout(4, 4), torch.float32, CPU)
    with pytest.raises(BadInput, match="use attention=eager"):
        SDPABackend([spec], kv)
    assert select([spec], kv).name == "eager"
    assert select([SPECS["grouped"]], kv).name == "sdpa"


def test_on_a_gpu_auto_takes_the_first_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no record yet comes after what has."""
    order = ["TritonBackend", "SDPABackend", "FlashBackend"]
    refusing: list[str] = []

    def stand_in(name: str) -> Callable[..., object]:
        def make(specs: Sequence[AttentionSpec], kv: KVCache, context: object = None) -> object:
            if name in refusing:
                raise BadInput("not here")
            return name

        return make

    for name in order:
        module = next(one for one in auto.BACKENDS["cuda"] if one.endswith(name))
        monkeypatch.setattr(module, stand_in(name))
    spec = SPECS["grouped"]
    kv = KVCache([spec], CacheLayout(4, 4), torch.float32, CPU)
    kv.parts = [(SimpleNamespace(is_cuda=True),)]  # type: ignore[list-item]
    chosen = []
    for name in order:
        chosen.append(select([spec], kv))
        refusing.append(name)
    assert chosen == order
    assert select([spec], kv).name == "eager"


def test_padding_block_is_never_written() -> None:
    spec, layout = SPECS["grouped"], LAYOUTS["paged"]
    kv = KVCache([spec], layout, torch.float32, CPU)
    manager = CacheManager(layout)
    runner = ModelRunner(nn.Identity(), SDPABackend([spec], kv), CPU)
    request = Request("a", [1] * 9, SamplingParams(), max_num_tokens=10, seed=0)
    manager.grow(request.cache, 0, 9)
    batch = runner.prepare(pack([ScheduledRequest(request, 0, 9)], 4))
    assert int(batch.slot_mapping.min()) >= layout.block_size
    assert len(set(batch.slot_mapping.tolist())) == 9


def test_cpu_refuses_what_it_cannot_serve_and_auto_goes_on() -> None:
    spec, odd = SPECS["grouped"], SPECS["one kv head, odd size"]
    kv = KVCache([spec], CacheLayout(4, 4), torch.float32, CPU)
    with pytest.raises(BadInput, match="needs the C\\+\\+ kernels"):
        CPUBackend([spec], kv, BuildContext(CPU))
    assert cpu([spec], kv).name == "cpu"
    with pytest.raises(BadInput, match="multiple of 16"):
        cpu([odd], KVCache([odd], CacheLayout(4, 4), torch.float32, CPU))
    compressed = kv_cache([spec], CacheLayout(4, 4), torch.float32, CPU, "int8")
    with pytest.raises(BadInput, match="no compressed cache"):
        cpu([spec], compressed)
    context = BuildContext(CPU, library.load())
    chosen = [
        select([spec], kv, context),
        select([odd], kv, context),
        select([spec], compressed, context),
    ]
    assert [backend.name for backend in chosen] == ["cpu", "sdpa", "sdpa"]


def test_cpu_gives_a_query_the_same_bits_however_the_prompt_is_cut() -> None:
    """Pieces and neighbours are other ones with every seed; the sequences' data is made before any
    is drawn."""
    spec = SPECS["grouped"]

    def outputs(make: Callable[..., AttentionBackend], block: int) -> list[Tensor]:
        layout = CacheLayout(block, 160 // block)
        return [
            out for out, _ in run_in_pieces(make, spec, layout, torch.bfloat16, 0, cut_seed=block)
        ]

    for some, others in zip(outputs(cpu, 4), outputs(cpu, 16), strict=True):
        assert torch.equal(some, others)
