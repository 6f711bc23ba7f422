"""runtime.fused_kernels: in the interpreter where there is no GPU, on the GPU where there is
one."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from minivllm import LLM, SamplingParams
from minivllm.attention.base import AttentionBackend, StepBatch
from minivllm.config.compose import compose
from minivllm.engines.minivllm.engine import MinivllmEngine
from minivllm.errors import BadInput
from minivllm.kernels import common
from minivllm.kernels.device import BuildContext
from minivllm.models.cpu_layers import plain_class
from minivllm.models.families.gemma import GemmaNorm
from minivllm.models.layers import ACTIVATIONS, DecoderLayer, RMSNorm
from minivllm.models.load.loading import load_model
from minivllm.models.options import ModelOptions
from minivllm.passes import fused_kernels as kernels
from minivllm.passes.base import PassContext
from minivllm.passes.fused import FusedDecoder, FusedSandwich, fuse
from minivllm.passes.order import TrimLastLayer
from minivllm.quant.plain import Plain
from tests.reference import CausalAttention, make_batch, make_checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CLOSE = {
    torch.float32: {"atol": 1e-6, "rtol": 1e-5},
    torch.bfloat16: {
        "atol": 0.01,
        "rtol": 0.008,
    },  # one step of the last bit, where a sum's last bit differed
    torch.float16: {"atol": 0.002, "rtol": 0.001},
}


@pytest.mark.parametrize("kind", [RMSNorm, GemmaNorm])
@pytest.mark.parametrize("dtype", CLOSE)
def test_residual_and_norm(dtype: torch.dtype, kind: type[RMSNorm]) -> None:
    torch.manual_seed(0)
    layer = kind(80, 1e-6).to(dtype)
    layer.weight.data.copy_(torch.randn(80))
    x, delta = torch.randn(2, 5, 80).to(dtype).unbind(0)
    layer, x, delta = layer.to(DEVICE), x.to(DEVICE), delta.to(DEVICE)
    gemma = kind is GemmaNorm
    total, normed = kernels.add_norm(x, delta, layer.weight, 1e-6, gemma)
    assert torch.equal(total, x + delta)
    torch.testing.assert_close(normed, layer(x + delta), **CLOSE[dtype])
    torch.testing.assert_close(kernels.norm(x, layer.weight, 1e-6, gemma), layer(x), **CLOSE[dtype])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", CLOSE)
def test_gated_activation(dtype: torch.dtype, activation: str) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(3, 2 * 1100) * 4).to(dtype).to(DEVICE)
    gate, up = gate_up.chunk(2, -1)
    expected = (ACTIVATIONS[activation](gate.double()) * up.double()).to(dtype)
    torch.testing.assert_close(kernels.gated(gate_up, activation), expected, **CLOSE[dtype])
    assert F.silu(torch.tensor(-200.0)) == 0  # what the extremes must come to
    extreme = torch.tensor([[-200.0, 200.0, 1.0, 1.0]], device=DEVICE)
    torch.testing.assert_close(
        kernels.gated(extreme, activation).cpu(), torch.tensor([[0.0, 200.0]])
    )


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "mixtral"])
@pytest.mark.parametrize("attention", ["sdpa", "triton"])
def test_tokens_are_those_of_the_plain_layers(family: str, attention: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    results, fused = [], []
    for knob in ("off", "triton"):
        overrides = [
            f"runtime.fused_kernels={knob}",
            "cache.num_blocks=20",
            "model.max_model_len=64",
        ]
        with LLM(
            str(tmp_path),
            device=DEVICE.type,
            quant="fp32",
            attention=attention,
            overrides=overrides,
        ) as llm:
            modules = [type(m).__name__ for m in llm.engine.loaded.model.modules()]
            fused.append({name for name in modules if name.startswith("Fused")})
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            results.append(
                [o.outputs[0].token_ids for o in llm.generate([[5, 6, 7, 8, 9], [9]], params)]
            )
    assert results[0] == results[1]
    layer = "FusedSandwich" if family == "gemma3_text" else "FusedLayer"
    assert fused == [set(), {"FusedNorm", "FusedMLP", "FusedAttention", "FusedDecoder", layer}]


def test_an_activation_that_is_computed_by_rows_stays(tmp_path: Path) -> None:
    """As runtime.determinism=batch has it on a CPU."""
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    overrides = ["runtime.fused_kernels=triton", "runtime.determinism=batch", "cache.num_blocks=20"]
    with LLM(str(tmp_path), device=DEVICE.type, quant="fp32", overrides=overrides) as llm:
        modules = Counts(plain_class(m).__name__ for m in llm.engine.loaded.model.modules())
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert modules["FusedAttention"] == 1
    assert (modules["MLP"], modules["FusedMLP"]) == ((1, 0) if DEVICE.type == "cpu" else (0, 1))


class Counter(TorchDispatchMode):
    """Counts sums of hidden states, and launches of norms with and without one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.calls: Counts[str] = Counts()
        for name in ("norm", "add_norm"):
            patch.setattr(kernels, name, partial(self.counted, name, getattr(kernels, name)))

    def counted(self, name: str, kernel: Callable[..., Any], *args: Any) -> Any:
        self.calls[name] += 1
        return kernel(*args)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        terms = [value for value in args if isinstance(value, Tensor) and value.shape[1:] == (48,)]
        self.calls["sum"] += str(function).startswith("aten.add.Tensor") and len(terms) == 2
        return function(*args, **(kwargs or {}))


def here(prompts: list[list[int]]) -> StepBatch:
    batch = make_batch(prompts)
    moved = {name: x.to(DEVICE) for name, x in batch._asdict().items() if isinstance(x, Tensor)}
    return batch._replace(**moved)


@torch.inference_mode()
def each_sum_at_once(
    decoder: FusedDecoder, batch: StepBatch, attention: AttentionBackend
) -> Tensor:
    """What a FusedDecoder gives, with a sum after each layer and norms without one before the
    next."""
    x = decoder.embed_tokens(batch.token_ids)
    rotations = [rotary(batch) for rotary in decoder.rotaries]
    for layer, rope in zip(decoder.layers, decoder.rope_of_layer, strict=True):
        x, delta = layer(x, None, *rotations[rope], batch, attention)
        x = x + delta
    out: Tensor = decoder.norm(x)
    return out


@pytest.mark.parametrize(
    ("family", "dtype", "trims"),
    [
        *((family, "bfloat16", False) for family in ("llama", "gemma", "gemma2")),
        *(
            (family, "bfloat16", trims)
            for family in ("qwen3", "gemma3_text", "qwen3_moe")
            for trims in (False, True)
        ),
        *(("qwen3", dtype, False) for dtype in ("float32", "float16")),
    ],
)
@torch.inference_mode()
def test_sums_across_layers_are_those_of_each_layer_to_the_bit(
    family: str, dtype: str, trims: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, family)
    context = BuildContext(DEVICE)
    loaded = load_model(ModelOptions(str(tmp_path)), quant=Plain(dtype), context=context)
    if trims:
        TrimLastLayer().apply(loaded, PassContext(context, {}))
    model = loaded.model
    assert fuse(model) == sum(
        type(module).__module__ == fuse.__module__ for module in model.modules()
    )
    assert isinstance(model.model, FusedDecoder)
    batch = here([[5, 17], [1], [9, 4]])
    batch = batch._replace(logit_rows=batch.logit_rows[::2])  # the second prompt goes on
    attention = CausalAttention(model.attention_specs)
    expected = each_sum_at_once(model.model, batch, attention)
    with monkeypatch.context() as patch, Counter(patch) as counter:
        found = model(batch, attention)
    assert found.shape == (2 if trims else 5, 48) and torch.equal(found, expected)
    after = 2 if isinstance(model.model.layers[0], FusedSandwich) else 0  # norms of what is added
    assert counter.calls == {"norm": 1 + after * 3, "add_norm": 2 * 3, "sum": 0}


def test_a_model_with_a_layer_or_norm_of_its_own_keeps_its_sums(tmp_path: Path) -> None:
    class OwnLayer(DecoderLayer):
        pass

    class OwnNorm(RMSNorm):
        pass

    make_checkpoint(tmp_path)
    batch = here([[5, 17, 3, 99, 42, 8]])
    for own in (OwnLayer, OwnNorm):
        loaded = load_model(
            ModelOptions(str(tmp_path)), quant=Plain("float32"), context=BuildContext(DEVICE)
        )
        model, attention = loaded.model, CausalAttention(loaded.model.attention_specs)
        expected = model(batch, attention)
        changed = model.model.layers[1]
        if own is OwnNorm:
            changed = changed.input_layernorm
        changed.__class__ = own
        fuse(model)
        names = {type(module).__name__ for module in model.modules()}
        assert {"Decoder", "DecoderLayer", "FusedNorm", own.__name__} <= names
        torch.testing.assert_close(model(batch, attention), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cpu_kernels", ["auto", "'off'"])
def test_the_record_says_whose_kernels_ran(cpu_kernels: str, tmp_path: Path) -> None:
    """Either knob can be seen in what an arm leaves behind, whatever the other is set to."""
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    seen = []
    for knob in ("'off'", "triton"):
        runtime = {"device": DEVICE.type, "cpu_kernels": cpu_kernels, "fused_kernels": knob}
        knobs = (f"runtime.{name}={value}" for name, value in runtime.items())
        engine = MinivllmEngine(
            compose(["model=hf", f"model.path={tmp_path}", "quant=fp32", *knobs])
        )
        seen.append(engine.liveness()["runtime"])
        had = engine.engine.loaded.kernels is not None
        engine.close()
        assert seen[-1]["cpu_kernels"] == ("on" if had else "off")
        assert not (had and cpu_kernels != "auto")
    assert seen[0]["modules_fused"] == 0 and float(seen[1]["modules_fused"]) >= 5


def test_without_gpu_or_interpreter_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(common, "INTERPRETED", False)
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(
        BadInput, match=r"runtime.fused_kernels=triton needs a GPU.*runtime.fused_kernels=off"
    ):
        LLM(str(tmp_path), device="cpu", quant="fp32", overrides=["runtime.fused_kernels=triton"])
