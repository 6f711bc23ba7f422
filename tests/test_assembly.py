"""From a configuration to an engine: the device, the attention that determinism asks for, and what
is not imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minivllm import LLM
from minivllm.assembly import _attention
from minivllm.bench.options import MeasureOptions
from minivllm.errors import BadInput
from minivllm.kernels.device import BuildContext, select_device


def test_a_numbered_gpu_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("cuda:1", "cuda", "auto", "cpu"):
        select_device(name)
    assert chosen == [torch.device("cuda:1")]  # the others mean what is current already
    with pytest.raises(
        BadInput, match=r"runtime\.device=cuda:2: torch sees 2 GPUs, the first is cuda:0"
    ):
        select_device("cuda:2")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device("auto") == torch.device("cpu")
    with pytest.raises(BadInput, match=r"runtime\.device=cuda: torch sees no GPU"):
        select_device("cuda")


@pytest.mark.parametrize(
    ("device", "capability", "kernels"),
    [("cuda", (9, 0), "triton"), ("cuda", (7, 5), "invariant"), ("cpu", (9, 0), "invariant")],
)
def test_batch_determinism_takes_triton_where_it_runs(
    device: str, capability: tuple[int, int], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    auto = {"_target_": "minivllm.attention.auto.select"}
    expected: dict[str, dict[str, object]] = {
        "triton": {"_target_": "minivllm.attention.triton.TritonBackend"},
        "invariant": {"_target_": "minivllm.attention.invariant.InvariantBackend"},
    }
    assert _attention(auto, "batch", torch.device(device)) == expected[kernels]
    assert _attention(auto, "run", torch.device(device)) == auto


OWN = """
from minivllm.attention.sdpa import SDPABackend
from minivllm.models.load.loading import load_model
from minivllm.models.options import ModelOptions

made = {}

def model(*, quant, context, device, progress=None):
    made["model"] = context
    assert context.device == device
    return load_model(ModelOptions("embedded"), quant=quant, context=context, progress=progress)

class Backend(SDPABackend):
    def __init__(self, specs, kv, context):
        super().__init__(specs, kv)
        made["attention"] = context
"""


def test_a_class_of_ones_own_that_takes_the_context_is_given_it(
    user_dir: Path, plug_in: Callable[[str, str, str], None]
) -> None:
    (user_dir / "my_parts.py").write_text(OWN)
    plug_in("model", "mine", "_target_: my_parts.model")
    plug_in("attention", "mine", "_target_: my_parts.Backend")
    knobs = ["attention=mine", "runtime.moe=loop", "runtime.cpu_kernels=off"]
    with LLM("mine", device="cpu", overrides=knobs, config_dir=user_dir / "conf"):
        import my_parts

        expected = BuildContext(torch.device("cpu"), kernels=None, invariant=False, moe="loop")
        assert my_parts.made == {"model": expected, "attention": expected}


# What the embedded model's engine on a CPU has no use for.
UNUSED = (
    *(f"attention.{name}" for name in ("eager", "flash", "sdpa", "triton")),
    *("cache.compression", "cache.eviction", "cache.tiers.swap"),
    *("extras.beam", "extras.capture", "extras.graphs"),
    *("extras.masks.structured", "extras.ranked_steps", "extras.scheduling.preemption"),
    *("extras.speculative.fit", "extras.speculative.proposer", "extras.speculative.speculation"),
    *("extras.step_timing", "extras.vision.encoder", "extras.vision.pictures"),
    *("models.load.gguf", "models.load.packed_cache", "models.load.prequantized"),
    *("models.vision.registry", "models.vision.tower", "parallel.team"),
    *(f"passes.{name}" for name in ("compile", "fused", "grouped", "shard")),
    *("passes.pruning.calibration", "passes.pruning.plan", "passes.pruning.shapes"),
)

# Libraries that it does not need, nor a quantisation that is not of bitsandbytes; torch's compiler
# among them.
HEAVY = (
    *("torch._dynamo", "torch._inductor", "transformers", "triton", "bitsandbytes", "matplotlib"),
    *("pandas", "prompt_toolkit", "pyarrow", "scipy"),
)


def test_the_seed_of_sampling_is_that_of_the_measurement() -> None:
    for overrides, seed in (([], MeasureOptions().seed), (["measure.seed=3"], 3)):
        with LLM("tiny", device="cpu", overrides=["cache.num_blocks=16", *overrides]) as llm:
            assert ("measure" in llm.config) is bool(overrides)
            assert llm.engine.input_processor.seed == seed


def test_an_engine_imports_nothing_that_it_does_not_use() -> None:
    script = (
        "import sys\n"
        "from minivllm import LLM, SamplingParams\n"
        "with LLM('tiny', device='cpu', overrides=['cache.num_blocks=16']) as llm:\n"
        "    llm.generate('def', SamplingParams(max_tokens=3))\n"
        "    native = 'cpu' == llm.engine.runner.attention.name\n"
        f"unused = [f'minivllm.{{name}}' for name in {UNUSED!r} if f'minivllm.{{name}}' in "
        "sys.modules]\n"
        "import minivllm.quant.stored.base\n"
        "from minivllm.quant.int8 import Int8; Int8()\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
        "print(native, *unused)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    heavy, _, found = done.stdout.partition("\n")
    assert heavy == "[]", done.stdout + done.stderr
    if found.startswith("False"):
        pytest.skip("without the C++ kernels another attention serves the model")
    assert found == "True\n", done.stdout
