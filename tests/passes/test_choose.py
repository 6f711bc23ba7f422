"""runtime.kernel_choice: the record names what was measured, and tokens do not depend on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from minivllm.bench.records.identity import cell_id
from minivllm.config.compose import compose
from minivllm.engines.minivllm.engine import MinivllmEngine
from minivllm.kernels.cpu import choices
from minivllm.kernels.cpu.library import Kernels
from tests.reference import VARIANTS, make_checkpoint

TOKENS = [5, 17, 3, 99, 42, 8, 61] * 9


@pytest.fixture(autouse=True)
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


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_what_has_nothing_to_choose_says_so(mode: str, tmp_path: Path) -> None:
    knobs = ["quant=bf16", f"runtime.cpu_kernels={mode}", "runtime.kernel_choice=measured"]
    engine = engine_of(tmp_path, *knobs)
    assert any("has nothing to choose" in text for text in engine.info.warnings)
    assert not (tmp_path / "cache").exists()
    engine.close()


def test_only_a_measured_choice_is_another_cell() -> None:
    old, fixed, measured = (
        compose([] if knob is None else [f"runtime.kernel_choice={knob}"])
        for knob in (None, "fixed", "measured")
    )
    del old["runtime"]["kernel_choice"]
    assert cell_id(old, "f") == cell_id(fixed, "f") != cell_id(measured, "f")
