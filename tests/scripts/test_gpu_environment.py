"""scripts/gpu_environment.py: what is missing is named, with the command that adds it."""

from __future__ import annotations

import subprocess

import pytest

from tests.scripts.load import load_script

script = load_script("gpu_environment")


def test_every_package_of_the_project_is_looked_for() -> None:
    found = script.packages()
    assert {"torch", "hydra-core", "bitsandbytes", "fastapi", "gguf", "pytest-xdist"} <= {*found}
    assert found["hydra-core"] == "hydra" and found["pytest-timeout"] == "pytest_timeout"
    names, missing = script.imported(found)
    assert missing == [] and len(names) == len(found)  # here all are installed


def test_a_missing_package_ends_with_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "packages", lambda: {"json": "json", "none-such": "none_such"})
    monkeypatch.setattr(script.importlib.metadata, "version", lambda name: "1.0")
    monkeypatch.setattr(script, "smi", lambda: "no driver")
    assert script.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "no driver" and lines[1].endswith(": json 1.0")
    assert "none-such (ModuleNotFoundError" in lines[2]
    assert "pip install '.[run,serve,gguf]'" in lines[3]
    assert lines[4].endswith("python scripts/gpu_wheels.py")


@pytest.mark.parametrize(("device", "code"), [(None, 1), ("NVIDIA H200, 9.0", 0)])
def test_a_machine_without_a_gpu_fails(
    device: str | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "packages", dict)
    monkeypatch.setattr(script, "gpu", lambda: device)
    monkeypatch.setattr(script, "smi", str)
    assert script.main() == code


def test_no_driver_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", absent)
    assert script.smi() == "nvidia-smi: nvidia-smi"
