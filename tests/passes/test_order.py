"""Which passes run, as knobs ask, and in which order; and the pass that trims the last layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minivllm import LLM, SamplingParams
from minivllm.assembly import build_engine
from minivllm.config.compose import compose
from minivllm.engines.minivllm.engine import MinivllmEngine
from minivllm.errors import BadInput
from minivllm.kernels import common
from minivllm.kernels.device import BuildContext
from minivllm.models.costs import trims
from minivllm.passes.base import PassContext
from minivllm.passes.order import AFTER_ENGINE, BEFORE_ENGINE, OWN_NAMES, RuntimePass
from minivllm.platform.plug_ins import locate
from tests.reference import FAMILIES, make_checkpoint

CPU = torch.device("cpu")


def chosen_passes(passes: tuple[RuntimePass, ...], *overrides: str) -> list[str]:
    runtime: dict[str, Any] = compose(["runtime.device=cpu", *overrides])["runtime"]
    context = PassContext(BuildContext(CPU, moe=runtime["moe"]), runtime)
    return [one.name for one in passes if one.is_wanted(context)]


def test_names_are_one_pass_s_each() -> None:
    assert {"prune"} | {one.name for one in (*BEFORE_ENGINE, *AFTER_ENGINE)} == OWN_NAMES
    assert len(OWN_NAMES) == 1 + len(BEFORE_ENGINE) + len(AFTER_ENGINE)


@pytest.mark.parametrize("one", [*BEFORE_ENGINE, *AFTER_ENGINE], ids=lambda one: one.name)
def test_a_pass_has_the_name_of_its_class(one: RuntimePass) -> None:
    pytest.importorskip("triton")
    assert locate(f"minivllm.passes.{one.target}")().name == one.name


@pytest.mark.parametrize(
    ("overrides", "before", "after"),
    [
        ([], ["trim"], ["native"]),
        (["runtime.trim_last_layer=false", "runtime.native_layers=false"], [], []),
        (["runtime.moe=grouped"], ["trim", "grouped"], ["native"]),
        (["runtime.determinism=batch"], ["determinism", "trim"], ["native"]),
        (["runtime.compile=true"], [], ["native", "compile"]),
    ],
)
def test_knobs_turn_them_on(overrides: list[str], before: list[str], after: list[str]) -> None:
    assert (chosen_passes(BEFORE_ENGINE, *overrides), chosen_passes(AFTER_ENGINE, *overrides)) == (
        before,
        after,
    )


@pytest.mark.parametrize("knob", ["fused_kernels", "linear_kernel"])
def test_what_cannot_run_here_is_told_before_weights_are_loaded(
    knob: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "INTERPRETED", False)
    monkeypatch.setattr(
        "minivllm.models.load.loading.resolve", lambda *_, **__: pytest.fail("loaded")
    )
    with pytest.raises(BadInput, match=rf"runtime.{knob}=triton needs a GPU"):
        build_engine(compose(["runtime.device=cpu", f"runtime.{knob}=triton"]))


def test_the_model_says_what_was_done_to_it() -> None:
    engine = build_engine(compose(["runtime.device=cpu", "runtime.cpu_kernels=off"]))
    assert [(one.name, one.count) for one in engine.loaded.passes] == [
        ("trim", 1),
        ("native", 0),
    ]
    engine.close()


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [[5, 17, 3, 99, 42, 8], [9, 4, 30] * 9, [1], [7, 3, 99, 12, 55, 31, 8, 64, 90, 11, 2]]
TRIMMING = [
    "model=hf",
    "quant=fp32",
    f"runtime.device={DEVICE}",
    "runtime.threads=1",
    "model.max_model_len=64",
    "cache.num_blocks=40",
]


@pytest.mark.parametrize(
    ("family", "way", "tokens"),
    [
        *((family, "torch", 2048) for family in FAMILIES),
        # a step, so that some have no logits at all
        *((family, "torch", 7) for family in FAMILIES),
        *((family, "cpu", 7) for family in FAMILIES),
        *((family, "triton", 12) for family in ("qwen3", "gemma3_text", "mixtral")),
    ],
)
def test_logprobs_are_those_of_all_rows(family: str, way: str, tokens: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    overrides = [
        *(f"model.path={tmp_path}", f"batching.max_num_batched_tokens={tokens}"),
        f"runtime.cpu_kernels={'auto' if way == 'cpu' else 'off'}",
        f"runtime.fused_kernels={'triton' if way == 'triton' else 'off'}",
    ]
    params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=3)
    found, trimmed = [], []
    for knob in ("false", "true"):
        config = [*TRIMMING, *overrides, f"runtime.trim_last_layer={knob}"]
        with LLM(overrides=config) as llm:
            found.append([request.outputs[0] for request in llm.generate(PROMPTS, params)])
            trimmed.append(llm.engine.runner.rows_trimmed)
    prefilled = sum(len(prompt) - 1 for prompt in PROMPTS)
    assert trimmed[0] == 0 and (
        trimmed[1] == prefilled if tokens > 99 else 0 < trimmed[1] <= prefilled
    )
    for plain, trim in zip(*found, strict=True):
        assert trim.token_ids == plain.token_ids
        assert trim.logprobs is not None and plain.logprobs is not None
        for one, other in zip(trim.logprobs, plain.logprobs, strict=True):
            assert one == pytest.approx(other, abs=1e-5)


def test_where_every_token_has_logits_nothing_is_trimmed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    with LLM(overrides=[*TRIMMING, f"model.path={tmp_path}"]) as llm:
        asked = SamplingParams(max_tokens=2, prompt_logprobs=1)
        assert llm.generate([PROMPTS[0]], asked)[0].prompt_logprobs
        assert llm.engine.runner.rows_trimmed == 0
        llm.generate([PROMPTS[0]], SamplingParams(max_tokens=2))
        assert llm.engine.runner.rows_trimmed == len(PROMPTS[0]) - 1


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_operations_saved_are_those_that_the_roofline_leaves_out(
    family: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, family)
    counted, costs = [], []
    for knob in ("false", "true"):
        knobs = [
            *TRIMMING,
            f"model.path={tmp_path}",
            f"runtime.trim_last_layer={knob}",
            "runtime.cpu_kernels=off",
        ]
        engine = MinivllmEngine(compose([*knobs, "attention=eager"]))
        engine.submit("0", PROMPTS[1], SamplingParams(max_tokens=1))
        done: list[int] = []

        def count(_: nn.Module, x: tuple[Tensor], y: Tensor, done: list[int] = done) -> None:
            done.append(2 * y.numel() * x[0].shape[1])

        for name in engine.engine.loaded.linear_inputs:
            engine.engine.loaded.model.get_submodule(name).register_forward_hook(count)
        engine.poll()
        counted.append(sum(done))
        costs.append(engine.info.model)
        live = engine.liveness()["runtime"]["rows_trimmed"]
        assert live == (len(PROMPTS[1]) - 1 if knob == "true" else 0)
        engine.close()
    a_token = [cost["flops_per_token"] for cost in costs]
    a_row = [cost["head_flops_per_row"] for cost in costs]
    assert a_token[0] - a_token[1] == a_row[1] - a_row[0] > 0
    # A mixture's router is a product, too, which is no part of an expert.
    router = 2 * 8 * 48 * (len(PROMPTS[1]) - 1) if family == "qwen3_moe" else 0
    assert counted[0] - counted[1] == (a_token[0] - a_token[1]) * (len(PROMPTS[1]) - 1) + router


@pytest.mark.parametrize(
    ("runtime", "expected"),
    [
        ({"trim_last_layer": True, "compile": False}, True),
        ({"trim_last_layer": True, "compile": True}, False),
        ({"trim_last_layer": False}, False),
        ({}, False),
    ],
)
def test_compiled_layers_keep_all_rows(runtime: dict[str, bool], expected: bool) -> None:
    assert trims(runtime) is expected


@pytest.mark.parametrize("knob", [False, True])
def test_the_last_layer_is_marked(knob: bool) -> None:
    engine = build_engine(compose(["runtime.device=cpu", f"runtime.trim_last_layer={knob}"]))
    assert engine.loaded.model.trims is knob
    assert [one.count for one in engine.loaded.passes if one.name == "trim"] == [1] * knob
    engine.close()
