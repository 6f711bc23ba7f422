"""scripts/save_openvino.py, against a stand-in for what its interpreter has."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.scripts.load import load_script

script = load_script("save_openvino")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What optimum-intel is asked for."""
    asked: list[Any] = []

    class Model:
        @classmethod
        def from_pretrained(cls, folder: Path, **given: Any) -> Any:
            asked.append(given)
            return cls()

        def save_pretrained(self, folder: Path) -> None:
            folder.mkdir()
            (folder / "openvino_model.xml").write_text("x")

    intel: Any = ModuleType("optimum.intel")
    intel.OVModelForCausalLM = Model
    intel.OVWeightQuantizationConfig = lambda **given: SimpleNamespace(**given)
    monkeypatch.setitem(sys.modules, "optimum", ModuleType("optimum"))
    monkeypatch.setitem(sys.modules, "optimum.intel", intel)
    monkeypatch.setattr(script, "save_tokenizer", lambda checkpoint, output: None)
    return asked


def save(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["save_openvino.py", *map(str, arguments)])
    return int(script.main())


def test_precisions_are_asked_for(
    calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    for kind in ("bf16", "int8", "int4"):
        assert save(monkeypatch, tmp_path, tmp_path / kind, "--type", kind) == 0
        assert (tmp_path / kind / "openvino_model.xml").is_file()
    plain, eight, four = calls
    assert plain["load_in_8bit"] is False and all(call["local_files_only"] for call in calls)
    assert eight["quantization_config"].bits == 8
    assert four["quantization_config"].bits == 4 and four["quantization_config"].group_size == 128
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("bf16", "config.json", "int4", "int8")
    ]


def test_what_cannot_be_saved_is_one_line(
    calls: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert save(monkeypatch, tmp_path, tmp_path) == 2
    assert save(monkeypatch, tmp_path, tmp_path / "new") == 2
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "optimum.intel", None)
    assert save(monkeypatch, tmp_path, tmp_path / "new") == 2
    exists, config, package = capsys.readouterr().err.splitlines()
    assert "exists already" in exists and "has no config.json" in config
    assert "optimum-intel" in package and not calls
