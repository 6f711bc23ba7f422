"""From a configuration to an engine: the device, and the attention that determinism asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minivllm import LLM, assembly
from minivllm.assembly import _attention, require_memory_for_weights
from minivllm.config.compose import compose
from minivllm.errors import BadInput
from minivllm.kernels.context import BuildContext
from minivllm.kernels.device import select_device


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


HUGE = ("model=qwen3_30b_a3b", "model.weights=random", "runtime.device=cpu")


@pytest.mark.parametrize(
    ("quant", "device", "fits"),
    [
        ("bf16", "cpu", False),
        ("int8", "cpu", False),
        ("nf4", "cpu", True),
        ("bf16", "cuda", True),  # which says so itself
    ],
)
def test_what_is_needed_is_what_the_precision_stores(
    quant: str, device: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "free_memory", lambda device: 24e9)
    config = compose([*HUGE, f"quant={quant}"])
    if fits:
        require_memory_for_weights(config, torch.device(device))
    else:
        with pytest.raises(MemoryError):
            require_memory_for_weights(config, torch.device(device))


def test_of_a_users_own_precision_nothing_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "free_memory", lambda device: 24e9)
    config = compose([*HUGE])
    with pytest.raises(MemoryError, match="the weights take about"):
        require_memory_for_weights(config, torch.device("cpu"))
    require_memory_for_weights(
        {**config, "quant": {"_target_": "my_package.TwoBits"}}, torch.device("cpu")
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", 1 << 18, "the weights take about"),
        ("max_position_embeddings", 1 << 26, "rotary tables of 67,108,864 positions take"),
    ],
)
def test_absurd_sizes_are_told_before_anything_is_made(key: str, value: int, message: str) -> None:
    config = compose(
        ["model=qwen3", "model.weights=random", "model.max_model_len=null", "runtime.device=cpu"]
    )
    config["model"]["architecture"] |= {key: value}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError, match=message):
        patch.setattr(assembly, "free_memory", lambda device: 16e9)
        require_memory_for_weights(config, torch.device("cpu"))


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
