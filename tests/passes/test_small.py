"""Passes of a few lines: when they run, what they change and what they report."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minivllm import LLM, SamplingParams
from minivllm.assembly import build_engine
from minivllm.bench.records.identity import cell_id
from minivllm.config.compose import compose
from minivllm.engines.minivllm.engine import MinivllmEngine
from minivllm.kernels.context import BuildContext
from minivllm.kernels.cpu import choices
from minivllm.kernels.cpu.library import Kernels
from minivllm.models.costs import trims
from minivllm.models.cpu_layers import CPUMLP, CPUAttention, CPUNorm
from minivllm.models.load.loading import load_model
from minivllm.models.options import ModelOptions
from minivllm.passes.base import PassContext, apply_passes
from minivllm.passes.order import BEFORE_ENGINE
from minivllm.passes.small import UseKernels
from minivllm.quant.plain import Plain
from tests.reference import FAMILIES, VARIANTS, make_checkpoint

CPU = torch.device("cpu")


def test_it_is_the_first_pass_and_wanted_where_there_are_kernels() -> None:
    some: Any = SimpleNamespace()
    wanted = [UseKernels().is_wanted(PassContext(BuildContext(CPU, k), {})) for k in (None, some)]
    assert isinstance(BEFORE_ENGINE[0], UseKernels) and wanted == [False, True]


def test_it_reports_the_layers_that_it_changes(kernels: Kernels) -> None:
    context = BuildContext(CPU, kernels)
    loaded = load_model(ModelOptions("embedded"), quant=Plain(), context=context)
    kinds = (CPUNorm, CPUAttention, CPUMLP)
    assert not any(isinstance(module, kinds) for module in loaded.model.modules())
    apply_passes([UseKernels()], loaded, PassContext(context, {}))
    changed = [type(module) for module in loaded.model.modules() if type(module) in kinds]
    (report,) = loaded.passes
    layers = loaded.config.num_layers
    assert (report.name, report.count, report.bytes) == ("cpu_kernels", len(changed), 0)
    assert report.seconds > 0 and len(changed) == 4 * layers + 1


def test_a_model_that_was_loaded_without_kernels_stays_so(kernels: Kernels) -> None:
    """As one of a user's own function may be."""
    loaded = load_model(ModelOptions("embedded"), quant=Plain(), context=BuildContext(CPU))
    apply_passes([UseKernels()], loaded, PassContext(BuildContext(CPU, kernels), {}))
    assert loaded.passes[0].count == 0


def test_determinism_keeps_it(kernels: Kernels, tmp_path: Path) -> None:
    """It would not know an MLP whose activation is computed row by row."""
    make_checkpoint(tmp_path)
    knobs = ["model=hf", f"model.path={tmp_path}", "runtime.device=cpu", "cache.num_blocks=20"]
    counts = []
    for level in ("off", "batch"):
        engine = build_engine(compose([*knobs, f"runtime.determinism={level}"]))
        counts.append({report.name: report.count for report in engine.loaded.passes}["cpu_kernels"])
        engine.close()
    assert counts[0] == counts[1] > 0


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [[5, 17, 3, 99, 42, 8], [9, 4, 30] * 9, [1], [7, 3, 99, 12, 55, 31, 8, 64, 90, 11, 2]]
KNOBS = [
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
        config = [*KNOBS, *overrides, f"runtime.trim_last_layer={knob}"]
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
    with LLM(overrides=[*KNOBS, f"model.path={tmp_path}"]) as llm:
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
            *KNOBS,
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


TOKENS = [5, 17, 3, 99, 42, 8, 61] * 9


@pytest.fixture
def _folder(panels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "cache_folder", lambda: tmp_path / "cache")


def engine_of(folder: Path, *overrides: str) -> MinivllmEngine:
    family, shape = VARIANTS["qwen3"]
    sizes = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128}
    if not (folder / "model").exists():
        (folder / "model").mkdir()
        make_checkpoint(folder / "model", family, **{**shape, **sizes})
    knobs = ["model=hf", f"model.path={folder / 'model'}", "runtime.device=cpu"]
    knobs += ["runtime.threads=1", "model.max_model_len=64", "cache.num_blocks=40"]
    return MinivllmEngine(compose([*knobs, *overrides]))


@pytest.mark.usefixtures("_folder")
@pytest.mark.parametrize("native", ["false", "true"])
def test_the_record_names_the_choice_and_no_bit_is_changed(
    native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = ["quant=int4", "quant.activations=int8", f"runtime.native_layers={native}"]
    fixed = engine_of(tmp_path, *narrow)
    logits = fixed.logits(TOKENS)
    assert "measured" not in str(fixed.liveness()["quant"]["kernels"])
    fixed.close()
    for faster, bound in (("few", 256), ("many", 1)):
        monkeypatch.setattr(
            choices,
            "_seconds",
            lambda layer, x, few, faster=faster: 1.0 + ((len(x) <= few) != (faster == "few")),
        )
        (tmp_path / "cache" / "kernel-choices.json").unlink(missing_ok=True)
        engine = engine_of(tmp_path, *narrow, "runtime.kernel_choice=measured")
        name = f"PanelLinear, 8-bit activations, few rows up to {bound} as measured"
        assert f"12 {name}" in str(engine.liveness()["quant"]["kernels"])
        assert (engine.logits(TOKENS) == logits).all()
        assert {one.name: one.count for one in engine.engine.loaded.passes}["choose"] == 12
        engine.close()


@pytest.mark.usefixtures("_folder")
@pytest.mark.parametrize("mode", ["auto", "off"])
def test_what_has_nothing_to_choose_says_so(mode: str, tmp_path: Path) -> None:
    knobs = ["quant=bf16", f"runtime.cpu_kernels={mode}", "runtime.kernel_choice=measured"]
    engine = engine_of(tmp_path, *knobs)
    assert any("has nothing to choose" in text for text in engine.info.warnings)
    assert not (tmp_path / "cache").exists()
    engine.close()


@pytest.mark.usefixtures("_folder")
def test_only_a_measured_choice_is_another_cell() -> None:
    old, fixed, measured = (
        compose([] if knob is None else [f"runtime.kernel_choice={knob}"])
        for knob in (None, "fixed", "measured")
    )
    del old["runtime"]["kernel_choice"]
    assert cell_id(old, "f") == cell_id(fixed, "f") != cell_id(measured, "f")
