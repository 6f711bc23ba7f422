"""runtime.moe: experts in grouped matrix products are the experts of the loop, and nothing waits
for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm import LLM, SamplingParams
from minivllm.config.compose import compose
from minivllm.engine.events import StepTimed
from minivllm.engines.minivllm.engine import MinivllmEngine
from minivllm.errors import BadInput
from minivllm.kernels.device import BuildContext
from minivllm.models.load import loading
from minivllm.models.load.loading import LoadedModel, load_model
from minivllm.models.moe import MoE
from minivllm.models.options import ModelOptions
from minivllm.passes.fused import fuse
from minivllm.passes.grouped import GroupedMoE, group_experts
from minivllm.quant.int8 import Int8
from minivllm.quant.plain import Plain
from tests.models.test_moe import mixtures, save
from tests.models.test_parity import PROMPTS, load, run
from tests.reference import FAMILIES, SMALL

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ARCHITECTURE = (
    SMALL
    | FAMILIES["qwen3_moe"]
    | {"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 32, "num_hidden_layers": 1}
)
CLOSE = {"float32": 1e-6, "bfloat16": 0.02}

both_dtypes = pytest.mark.parametrize("dtype", CLOSE)


def loaded(dtype: str = "float32", **changes: Any) -> LoadedModel:
    architecture = ARCHITECTURE | changes
    return load_model(
        ModelOptions("", weights="random", architecture=architecture),
        quant=Plain(dtype),
        context=BuildContext(CPU),
    )


def pair(dtype: str, **changes: Any) -> tuple[MoE, MoE]:
    """The same mixture as a loop and grouped."""
    loop, model = mixtures(loaded(dtype, **changes).model)[0], loaded(dtype, **changes).model
    assert group_experts(model, "grouped", CPU) == 1
    return loop, mixtures(model)[0]


@both_dtypes
@given(
    routing=st.lists(
        st.lists(st.integers(0, 7), min_size=2, max_size=2, unique=True), min_size=1, max_size=24
    )
)
@torch.inference_mode()
def test_any_routing_gives_what_the_loop_gives(dtype: str, routing: list[list[int]]) -> None:
    loop, grouped = _CACHED[dtype]
    rows = torch.tensor(routing)
    scores = torch.zeros(len(routing), 8).scatter_(
        1, rows, torch.tensor([[3.0, 2.0]]).expand(len(routing), 2)
    )
    x = torch.randn(len(routing), 32, generator=torch.Generator().manual_seed(len(routing)))
    x = x.to(getattr(torch, dtype))
    outs = []
    for moe in (loop, grouped):
        moe.gate = torch.nn.Identity()
        moe.gate.forward = lambda _: scores  # type: ignore[assignment]
        outs.append(moe(x).float())
        assert int(moe.experts_run) == len({expert for pair in routing for expert in pair})
    torch.testing.assert_close(
        outs[1], outs[0], atol=CLOSE[dtype] * outs[0].abs().max().item(), rtol=0
    )
    assert outs[0].abs().max() > 0


_CACHED = {dtype: pair(dtype) for dtype in CLOSE}


@torch.inference_mode()
def test_the_host_never_waits() -> None:
    """Tensors of the meta device have shapes and no values: whatever asks for one fails."""
    loop, grouped = pair("bfloat16")
    x = torch.empty(5, 32, dtype=torch.bfloat16, device="meta")
    for moe in (loop, grouped):
        moe.gate = torch.nn.Linear(32, 8, bias=False, dtype=torch.bfloat16, device="meta")
    assert grouped.to("meta")(x).shape == x.shape
    with pytest.raises(RuntimeError, match="meta"):
        loop(x)


@torch.inference_mode()
def test_the_count_is_written_to_the_same_place() -> None:
    """A captured graph knows the address alone."""
    _, grouped = pair("float32")
    place = grouped.experts_run
    grouped(torch.randn(1, 32))
    assert grouped.experts_run is place and int(place) == 2
    grouped(torch.randn(64, 32))
    assert grouped.experts_run is place and int(place) > 2


@pytest.mark.parametrize(
    "case", ["mixtral", "qwen3 moe some dense layers", "qwen3 moe not normalised"]
)
def test_a_model_and_its_steps_are_those_of_the_loop(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    plain, changed = load(tmp_path), load(tmp_path)
    assert group_experts(changed.model, "grouped", CPU) == len(mixtures(plain.model))
    for prompt in ([5], PROMPTS[0]):
        torch.testing.assert_close(
            run(changed, [prompt])[1], run(plain, [prompt])[1], atol=1e-5, rtol=0
        )
        assert changed.model.experts_run == plain.model.experts_run > 0
    assert changed.model.expert_bytes == plain.model.expert_bytes  # no second copy


def test_together_with_fused_layers(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    plain, fused = load(tmp_path), load(tmp_path)
    fuse(fused.model)
    assert group_experts(fused.model, "grouped", CPU) > 0
    x = torch.randn(3, SMALL["hidden_size"])
    with torch.inference_mode():
        torch.testing.assert_close(
            mixtures(fused.model)[0](x), mixtures(plain.model)[0](x), atol=1e-5, rtol=0
        )


def test_the_knob_and_the_counter(tmp_path: Path) -> None:
    save("qwen3 moe", tmp_path)
    tokens, seen = [], []
    for knob in ("loop", "grouped", "auto"):
        overrides = [f"runtime.moe={knob}", "runtime.cpu_kernels=off"]
        with LLM(str(tmp_path), quant="fp32", device="cpu", overrides=overrides) as llm:
            params = SamplingParams(max_tokens=8, ignore_eos=True)
            tokens.append([out.outputs[0].token_ids for out in llm.generate(PROMPTS, params)])
            seen.append({type(moe) for moe in mixtures(llm.engine.loaded.model)})
    assert tokens[0] == tokens[1] == tokens[2] and seen == [{MoE}, {GroupedMoE}, {MoE}]
    knobs = ["quant=fp32", "runtime.moe=grouped", "runtime.cpu_kernels=off", "runtime.device=cpu"]
    engine = MinivllmEngine(compose(["model=hf", f"model.path={tmp_path}", *knobs]))
    engine.submit("a", PROMPTS[0], SamplingParams(max_tokens=2, ignore_eos=True))
    while engine.engine.has_unfinished:
        engine.poll()
    counted = engine.liveness()
    assert counted["runtime"]["mixtures_grouped"] == 3 and counted["model"]["experts_run"] == sum(
        step["experts_run"] for step in engine.steps()
    )
    engine.close()


def test_experts_of_overlapping_steps_are_read_with_their_tokens(tmp_path: Path) -> None:
    """Sooner would be a wait for the step. Every step is told of once, with its own experts."""
    save("qwen3 moe", tmp_path)
    told = []
    for overlap in ("false", "true"):
        knobs = ["runtime.moe=grouped", "runtime.cpu_kernels=off", f"runtime.overlap={overlap}"]
        with LLM(str(tmp_path), quant="fp32", device="cpu", overrides=knobs) as llm:
            steps: list[StepTimed] = []
            llm.engine.events.subscribe(steps.append, StepTimed)
            params = SamplingParams(max_tokens=6, ignore_eos=True)
            for _ in range(2):
                llm.engine.add_request("a", PROMPTS[0], params)
                launched = len(steps)
                while llm.engine.has_unfinished:
                    llm.engine.step()
                    launched += 1
                    late = overlap == "true" and llm.engine.has_unfinished
                    assert len(steps) <= launched - late
            told.append([(step.num_tokens, step.experts_run) for step in steps])
            llm.engine.add_request("a", PROMPTS[0], params)
            llm.engine.step()
            llm.engine.abort_all()
            assert len(steps) == len(told[-1]) + 1, "nobody is left to wait for"
    assert told[0] == told[1] and all(count > 0 for _, count in told[0])


@pytest.mark.parametrize(("capability", "replaced"), [((9, 0), 1), ((8, 0), 0), ((12, 0), 0)])
def test_auto_is_for_plain_16_bit_experts_on_hopper(
    capability: tuple[int, int], replaced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    quantised = load_model(
        ModelOptions("", weights="random", architecture=ARCHITECTURE),
        quant=Int8("bfloat16"),
        context=BuildContext(CPU),
    )
    assert group_experts(loaded("bfloat16").model, "auto", CUDA) == replaced
    assert group_experts(loaded("float32").model, "auto", CUDA) == 0
    assert group_experts(quantised.model, "auto", CUDA) == 0
    assert group_experts(loaded("bfloat16").model, "auto", CPU) == 0
    assert group_experts(loaded("bfloat16").model, "loop", CUDA) == 0


def test_a_model_without_experts_is_refused_before_its_weights(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "filled_model", lambda *_: pytest.fail("the weights are read"))
    done = cli("task=generate", "task.prompt=a", "runtime.moe=grouped", "runtime.device=cpu")
    assert done.code == 2 and done.err.count("\n") == 1, done.err
    assert (
        "runtime.moe=grouped: the model has no experts to group; use runtime.moe=auto" in done.err
    )
    # A model option that is not told what is wanted is found out afterwards.
    dense = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(BadInput, match="no experts to group"):
        group_experts(dense, "grouped", CPU)
    assert group_experts(dense, "loop", CPU) == group_experts(dense, "auto", CPU) == 0


def test_what_cannot_be_grouped_is_named(tmp_path: Path) -> None:
    quantised = load_model(
        ModelOptions("", weights="random", architecture=ARCHITECTURE),
        quant=Int8("bfloat16"),
        context=BuildContext(CPU),
    )
    with pytest.raises(
        BadInput, match=r"runtime.moe=grouped: model.layers.0.mlp .* experts are Int8Linear"
    ):
        group_experts(quantised.model, "grouped", CPU)
    odd = loaded("bfloat16", moe_intermediate_size=20)
    with pytest.raises(BadInput, match="rows of 20 weights are no multiple of 16 bytes"):
        group_experts(odd.model, "grouped", CPU)
    save("mixtral", tmp_path)
    with pytest.raises(BadInput, match=r"runtime.moe=grouped.*BatchInvariantLinear"):
        LLM(
            str(tmp_path),
            device="cpu",
            overrides=["runtime.moe=grouped", "runtime.determinism=batch"],
        )
