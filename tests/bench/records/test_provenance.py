"""Where a number comes from."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from importlib.machinery import ModuleSpec
from pathlib import Path

import psutil
import pytest

from minivllm.bench.hardware import gpu
from minivllm.bench.records import provenance as module
from minivllm.bench.records.provenance import environment, provenance
from tests.bench.fake_nvml import FakeNVML

FIELDS = {
    "weights_digest",
    "assembler",
    "git_sha",
    "dirty_hash",
    "code_hash",
    "command",
    "packages",
    "peer_packages",
    "device",
    "driver",
    "clocks",
    "power_limit",
    "cpu",
    "threads",
    "seed",
    "started_at",
    "host",
}


def test_every_field_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.orig_argv", ["/usr/bin/python3", "/home/me/run.py", "model=tiny"])
    facts = provenance({"runtime": {"device": "cpu", "threads": 3}, "measure": {"seed": 7}}, "code")
    assert set(facts) == FIELDS
    assert (facts["code_hash"], facts["threads"], facts["seed"]) == ("code", 3, 7)
    assert (
        facts["device"]["kind"] == "cpu"
        and facts["driver"] is None
        and facts["power_limit"] is None
    )
    assert facts["packages"]["torch"] and facts["packages"]["python"]
    assert facts["cpu"]["logical_cores"] >= facts["cpu"]["usable_cores"] >= 1
    assert facts["command"] == "python3 run.py model=tiny"


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="Windows")
def test_a_clock_that_cannot_be_read_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def cpu_freq() -> None:
        raise NotImplementedError("can't find current frequency file")

    monkeypatch.setattr(psutil, "cpu_freq", cpu_freq)
    assert provenance({}, "code")["clocks"]["cpu_mhz"] is None


def test_the_beginning_is_told_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of machines in several time zones are ordered by its text."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        text = provenance({}, "code")["started_at"]
    finally:
        monkeypatch.undo()
        time.tzset()
    assert text.endswith("+00:00")
    assert abs(datetime.now(UTC) - datetime.fromisoformat(text)) < timedelta(minutes=1)


@pytest.mark.parametrize(
    ("cuda", "device", "named"),
    [
        ("None", "auto", False),  # the GPU is there, but this torch computes on the CPU
        ("'13.0'", "auto", True),
        ("None", "cuda", True),  # asked for: an engine in another process may use it
        ("'13.0'", "cpu", False),
    ],
)
def test_a_gpu_is_named_only_where_the_run_is_on_it(
    cuda: str, device: str, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(
        f"__version__ = '9'\ncuda: Optional[str] = {cuda}\nhip = None\n"
    )
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(gpu, "find_spec", lambda name: spec)
    monkeypatch.setattr(gpu, "is_torch_for_gpus", gpu.is_torch_for_gpus.__wrapped__)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    facts = provenance({"runtime": {"device": device}}, "code")
    assert (facts["device"]["name"] == "Fake H200") == named
    assert (facts["driver"] == "580.1") == (facts["power_limit"] == 700) == named
    assert (environment(device)["device"] == "Fake H200") == named


def test_the_environment_names_the_threads_that_a_variable_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MINIVLLM_THREADS", raising=False)
    without = environment("cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # as launchers set it
    assert environment("cpu") == without
    monkeypatch.setenv("MINIVLLM_THREADS", "3")
    assert environment("cpu") == {**without, "threads": 3}


def test_uncommitted_changes_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "minivllm" / "bench" / "records"
    package.mkdir(parents=True)
    monkeypatch.setattr(module, "__file__", str(package / "provenance.py"))
    assert module.git.__wrapped__() == (None, None)
    (tmp_path / "file").write_text("one")
    user = ("-c", "user.name=x", "-c", "user.email=x@x")
    for command in (("init", "-q"), ("add", "file"), (*user, "commit", "-qm", "x")):
        subprocess.run(("git", *command), cwd=tmp_path, check=True)
    sha, dirty = module.git.__wrapped__()
    assert sha is not None and len(sha) == 40 and dirty is None
    hashes = set()
    for text in ("two", "three"):
        (tmp_path / "file").write_text(text)
        hashes.add(module.git.__wrapped__()[1])
    assert len(hashes) == 2 and None not in hashes
