"""runtime.fused_kernels: in the interpreter where there is no GPU, on the GPU where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from minivllm import LLM, SamplingParams
from minivllm.bench.engines import MinivllmEngine
from minivllm.config import compose
from minivllm.errors import BadInput
from minivllm.kernels import common
from minivllm.models.gemma import GemmaNorm
from minivllm.models.kernels import small
from minivllm.models.layers import ACTIVATIONS, RMSNorm
from tests.reference import make_checkpoint

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
    total, normed = small.add_norm(x, delta, layer.weight, 1e-6, gemma)
    assert torch.equal(total, x + delta)
    torch.testing.assert_close(normed, layer(x + delta), **CLOSE[dtype])
    torch.testing.assert_close(small.norm(x, layer.weight, 1e-6, gemma), layer(x), **CLOSE[dtype])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", CLOSE)
def test_gated_activation(dtype: torch.dtype, activation: str) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(3, 2 * 1100) * 4).to(dtype).to(DEVICE)
    gate, up = gate_up.chunk(2, -1)
    wanted = (ACTIVATIONS[activation](gate.double()) * up.double()).to(dtype)
    torch.testing.assert_close(small.gated(gate_up, activation), wanted, **CLOSE[dtype])
    assert F.silu(torch.tensor(-200.0)) == 0  # what the extremes must come to
    extreme = torch.tensor([[-200.0, 200.0, 1.0, 1.0]], device=DEVICE)
    torch.testing.assert_close(small.gated(extreme, activation).cpu(), torch.tensor([[0.0, 200.0]]))


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "mixtral"])
@pytest.mark.parametrize("attention", ["sdpa", "triton"])
def test_tokens_are_those_of_the_plain_layers(family: str, attention: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    results, fused = [], []
    for knob in ("off", "triton"):
        overrides = [f"runtime.fused_kernels={knob}", "cache.num_blocks=20", "model.max_model_len=64"]
        with LLM(
            str(tmp_path), device=DEVICE.type, quant="fp32", attention=attention, overrides=overrides
        ) as llm:
            modules = [type(m).__name__ for m in llm.engine.loaded.model.modules()]
            fused.append({name for name in modules if name.startswith("Fused")})
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            results.append([o.outputs[0].token_ids for o in llm.generate([[5, 6, 7, 8, 9], [9]], params)])
    assert results[0] == results[1]
    layers = {
        "qwen3": {"FusedLayer"},
        "gemma3_text": {"FusedSandwich"},
        "mixtral": set(),
    }  # the last has its own
    assert fused == [set(), {"FusedNorm", "FusedMLP", "FusedAttention"} | layers[family]]


@pytest.mark.parametrize("cpu_kernels", ["auto", "'off'"])
def test_the_record_says_whose_kernels_ran(cpu_kernels: str, tmp_path: Path) -> None:
    """Either knob can be seen in what an arm leaves behind, whatever the other is set to."""
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    seen = []
    for knob in ("'off'", "triton"):
        runtime = {"device": DEVICE.type, "cpu_kernels": cpu_kernels, "fused_kernels": knob}
        knobs = (f"runtime.{name}={value}" for name, value in runtime.items())
        engine = MinivllmEngine(compose(["model=hf", f"model.path={tmp_path}", "quant=fp32", *knobs]))
        seen.append(engine.liveness()["runtime"])
        had = engine.engine.loaded.kernels is not None
        engine.close()
        assert seen[-1]["cpu_kernels"] == ("on" if had else "off")
        assert not (had and cpu_kernels != "auto")
    assert seen[0]["modules_fused"] == 0 and float(seen[1]["modules_fused"]) >= 5


def test_without_gpu_or_interpreter_it_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(common, "INTERPRETED", False)
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(
        BadInput, match=r"runtime.fused_kernels=triton needs a GPU.*runtime.fused_kernels=off"
    ):
        LLM(str(tmp_path), device="cpu", quant="fp32", overrides=["runtime.fused_kernels=triton"])
