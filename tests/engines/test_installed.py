"""Which engines are there, asked before anything is started; `preset=peers` compares those that
are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from minivllm.bench.records.provenance import peer_packages
from minivllm.config.compose import compose
from minivllm.engines import installed
from minivllm.errors import NotInstalled


@pytest.mark.parametrize("option", ["transformers", "transformers_continuous", "openai"])
def test_a_package_that_is_missing_is_named_with_its_remedy(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    with pytest.raises(
        NotInstalled, match=rf"engine={option} needs .* pip install -e '\.\[peers\]'"
    ):
        installed.require(compose([f"engine={option}"]))


@pytest.mark.parametrize("option", ["minivllm", "simulated"])
def test_our_own_engines_need_nothing(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for name in ("find_spec", "peer_packages"):
        monkeypatch.setattr(installed, name, asked.append)
    installed.require(compose([f"engine={option}"]))
    assert asked == []
    with pytest.raises(NotInstalled):
        installed.require(compose(["engine=transformers"]))
    assert asked == ["transformers"]


@pytest.mark.parametrize(
    ("python", "said"),
    [
        (None, "needs an interpreter that has vLLM"),
        ("/nowhere/python", "is no Python interpreter that runs"),
        (sys.executable, "has no vLLM"),
    ],
)
def test_vllm_is_looked_for_in_its_own_interpreter(
    python: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MINIVLLM_VLLM_PYTHON", raising=False)
    config = compose(["engine=vllm"])
    config["engine"]["python"] = python
    with pytest.raises(NotInstalled, match=f"{said}.*pip install vllm"):
        installed.require(config)


def test_the_packages_of_another_interpreter() -> None:
    versions = peer_packages(sys.executable)
    assert versions is not None and versions["torch"] and versions["python"]
    assert "vllm" not in versions and peer_packages(None) is None


def test_the_preset_compares_what_is_there(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_PYTHON", "OPENVINO_PYTHON"):
        monkeypatch.delenv(f"MINIVLLM_{name}", raising=False)
    monkeypatch.setenv("MINIVLLM_LLAMA_SERVER", "/nowhere/llama-server")
    plan = cli("preset=peers", "model=tiny", "sweep.dry_run=true")
    assert plan.code == 0, plan.err
    absent = [line for line in plan.err.splitlines() if line.startswith("left out: ")]
    assert len(absent) == 3 and "left out: engine=vllm needs an interpreter" in plan.err
    # minivllm at three precisions, two of them with 8-bit activations too, and transformers at one,
    # each with 1, 8 and 32 at once
    assert "18 of 18 measurements" in plan.out and plan.out.count("not installed") == 21
    assert not Path("runs").exists()


def test_an_absent_engine_is_a_row_of_the_preset_and_no_failure(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MINIVLLM_VLLM_PYTHON", raising=False)
    small = ("workload.num_requests=2", "workload.input_len=8", "workload.output_len=4")
    command = ("-m", "engine=minivllm,vllm", *small, "sweep.skip_absent=true", "sweep.name=two")
    done = cli(*command, "measure.roofline=false", "runtime.threads=1")
    assert done.code == 0, done.err
    assert "not installed" in Path("reports/two/table.md").read_text()
    assert "Not installed, so not measured: vllm." in Path("reports/two/index.html").read_text()


def test_an_absent_engine_is_a_row_of_any_other_sweep(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MINIVLLM_VLLM_PYTHON", raising=False)
    result = cli("-m", "engine=minivllm,vllm", "workload.num_requests=2", "sweep.dry_run=true")
    assert "left out" not in result.err and "engine=vllm" in result.out
