"""The C++ kernels of CPUs in a model: a decoder layer as one call gives the bits of the operations
called one by one, and so does the other way of a product."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.assembly import build_engine
from minivllm.bench.records.identity import cell_id
from minivllm.config.compose import compose
from minivllm.engines.minivllm.engine import MinivllmEngine
from minivllm.kernels.cpu import choices, library
from minivllm.kernels.cpu.library import Kernels
from minivllm.kernels.device import BuildContext
from minivllm.models.cpu_layers import CPUMLP, CPUAttention, CPUNorm
from minivllm.models.load.loading import load_model
from minivllm.models.options import ModelOptions
from minivllm.passes.base import PassContext, apply_passes
from minivllm.passes.native import NativeForward, NativeLayer, UseKernels
from minivllm.passes.order import BEFORE_ENGINE
from minivllm.quant.plain import Plain
from tests.reference import VARIANTS, make_checkpoint

PROMPTS = [[5, 17, 3, 99, 42, 8], [9, 4, 30] * 9, [1], [7, 3, 99, 12, 55, 31, 8, 64, 90, 11, 2]]
CPU = torch.device("cpu")
KNOBS = ["runtime.threads=1", "model.max_model_len=64", "cache.num_blocks=40", "cache.block_size=8"]


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    try:
        if not library.load().has_linear:
            pytest.skip("this processor has no AVX2")
    except (RuntimeError, OSError) as error:
        pytest.skip(f"the C++ kernels cannot be had here: {str(error).splitlines()[0]}")


def open_llm(folder: Path, *overrides: str, quant: str = "bf16") -> LLM:
    return LLM(str(folder), device="cpu", quant=quant, overrides=[*KNOBS, *overrides])


def make_variant(folder: Path, variant: str) -> None:
    """As wide as four bits and the rotation of sixteen pairs at a time ask for."""
    family, overrides = VARIANTS[variant]
    make_checkpoint(
        folder,
        family,
        **{**overrides, "hidden_size": 128, "head_dim": 32, "intermediate_size": 128},
    )


def native(llm: LLM) -> int:
    return sum(isinstance(layer, NativeLayer) for layer in llm.engine.loaded.model.model.layers)


@pytest.mark.parametrize(
    ("variant", "quant", "layers"),
    [
        *(
            (name, "bf16", 3)
            for name in ("llama", "llama biases", "qwen2", "qwen3", "mistral", "phi3")
        ),
        *((name, "bf16", 3) for name in ("llama dynamic rope", "qwen3 one kv head", "qwen3 tied")),
        *(("qwen3", quant, 3) for quant in ("int8", "int4", "nf4")),
        *((name, "bf16", 0) for name in ("gemma", "gemma2", "gemma3_text", "mixtral", "qwen3_moe")),
        ("qwen3", "fp32", 0),
    ],
)
@pytest.mark.parametrize(
    "tokens", [2048, 7]
)  # a step; so few that some steps of the last layer are trimmed to one row
def test_logprobs_are_the_same_to_the_bit(
    variant: str, quant: str, layers: int, tokens: int, tmp_path: Path
) -> None:
    make_variant(tmp_path, variant)
    params = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    found = []
    for knob, expected in (("false", 0), ("true", layers)):
        config = [f"runtime.native_layers={knob}", f"batching.max_num_batched_tokens={tokens}"]
        with open_llm(tmp_path, *config, quant=quant) as llm:
            assert native(llm) == expected
            whole = llm.generate(PROMPTS, params)
            trimmed = llm.generate(
                PROMPTS, SamplingParams(max_tokens=5, ignore_eos=True, logprobs=2)
            )
            assert llm.engine.runner.rows_trimmed > 0
        found.append(
            [
                (request.prompt_logprobs, request.outputs[0].token_ids, request.outputs[0].logprobs)
                for request in (*whole, *trimmed)
            ]
        )
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "knob", ["attention=sdpa", "runtime.cpu_kernels=off", "runtime.determinism=batch"]
)
def test_other_layers_stay_what_they_are(knob: str, tmp_path: Path) -> None:
    make_variant(tmp_path, "qwen3")
    with open_llm(tmp_path, knob) as llm:
        assert native(llm) == 0
        assert len(llm.generate(PROMPTS, SamplingParams(max_tokens=2))) == len(PROMPTS)


def test_a_profile_sees_the_operators_by_name(tmp_path: Path) -> None:
    make_variant(tmp_path, "qwen3")
    counts = []
    for knob in ("false", "true"):
        with open_llm(tmp_path, f"runtime.native_layers={knob}") as llm:
            llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2))
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU]
            ) as profile:
                llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2, ignore_eos=True))
        names = (event.name for event in profile.events())
        counts.append(Counter(name for name in names if name.startswith("minivllm_cpu::")))
    assert counts[0] == counts[1]
    assert counts[0]["minivllm_cpu::linear"] >= 2 * (3 * 4 + 1)


def test_the_record_says_how_many(tmp_path: Path) -> None:
    make_variant(tmp_path, "qwen3")
    knobs = ["model=hf", f"model.path={tmp_path}", "quant=bf16", "runtime.device=cpu"]
    for knob, layers in (("false", 0), ("true", 3)):
        engine = MinivllmEngine(compose([*knobs, f"runtime.native_layers={knob}"]))
        assert engine.liveness()["runtime"]["native_layers"] == layers
        engine.close()


@pytest.mark.parametrize(
    ("variant", "quant", "whole"),
    [("qwen3", "bf16", True), ("qwen3 tied", "int8", True), ("llama dynamic rope", "bf16", False)],
)
def test_one_object_is_the_forward_pass_where_all_parts_are_native(
    variant: str, quant: str, whole: bool, tmp_path: Path
) -> None:
    make_variant(tmp_path, variant)
    with open_llm(tmp_path, quant=quant) as llm:
        engine = llm.engine
        assert isinstance(engine.runner.model, NativeForward) == whole
        ours = llm.logits(PROMPTS[0])
        engine.runner.model = engine.loaded.model
        assert torch.equal(llm.logits(PROMPTS[0]), ours)


def test_it_is_the_first_pass_and_wanted_where_there_are_kernels() -> None:
    some: Any = SimpleNamespace()
    first = BEFORE_ENGINE[0]
    contexts = [PassContext(BuildContext(CPU, kernels), {}) for kernels in (None, some)]
    assert first.name == UseKernels.name and [*map(first.is_wanted, contexts)] == [False, True]


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
