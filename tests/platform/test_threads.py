"""How many threads: a knob, a variable, the cores; and that torch has them before an engine is
built."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import assembly
from minivllm.bench.records.measurement import Measurement
from minivllm.bench.session import Session
from minivllm.config.compose import compose
from minivllm.errors import BadInput
from minivllm.platform import threads
from minivllm.platform.threads import crowded, pin, shares, thread_count, usable_cores


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_threads_default_to_physical_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MINIVLLM_THREADS", raising=False)
    assert 1 <= thread_count({"threads": None}) <= usable_cores()
    for core in range(8):  # four cores of two threads each
        (tmp_path / f"cpu{core}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{core}/topology/thread_siblings_list").write_text(
            f"{core % 4},{core % 4 + 4}"
        )
    monkeypatch.setattr(threads, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(threads, "allowed_cores", lambda: {0, 1, 4, 5, 6})
    assert thread_count({}) == 3
    assert thread_count({"threads": 6}) == 6
    assert thread_count({"cores": "0,4"}) == 1 and thread_count({"cores": "0-2,4"}) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # as launchers set it
    assert thread_count({}) == 3
    monkeypatch.setattr(threads, "TOPOLOGY", tmp_path / "nowhere")
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: 16 if logical else 8)
    assert thread_count({}) == 5
    monkeypatch.setenv("MINIVLLM_THREADS", "3")
    assert thread_count({"threads": None}) == 3 and thread_count({"threads": 6}) == 6
    for wrong in ("0", "all"):
        monkeypatch.setenv("MINIVLLM_THREADS", wrong)
        with pytest.raises(BadInput, match=f"MINIVLLM_THREADS='{wrong}' must be a number"):
            thread_count({})


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a\n", {"a/cpu.max": "max 100000\n"}, None),
        (
            "9:memory:/m\n4:cpu,cpuacct:/c\n0::/\n",
            {"cpu/c/cpu.cfs_quota_us": "50000\n", "cpu/c/cpu.cfs_period_us": "100000\n"},
            0.5,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("1:cpu:/gone\n", {}, None),
        (None, {}, None),
    ],
    ids=["v2", "v2 of a parent", "v2 without", "v1", "v1 without", "gone", "no cgroups"],
)
def test_a_limit_of_a_container_limits_threads(
    own: str | None,
    files: dict[str, str],
    quota: float | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("MINIVLLM_THREADS", raising=False)
    monkeypatch.setattr(threads, "TOPOLOGY", tmp_path / "nowhere")
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: 16 if logical else 8)
    monkeypatch.setattr(threads, "allowed_cores", lambda: set(range(16)))
    monkeypatch.setattr(threads, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(threads, "OWN_CGROUPS", tmp_path / "own")
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if own is not None:
        (tmp_path / "own").write_text(own)
    assert threads.core_quota() == quota
    expected = 8 if quota is None else max(1, int(quota))
    assert thread_count({}) == expected and crowded({}) == []
    assert thread_count({"threads": 12}) == 12
    shared, *limits = crowded({"threads": 12})
    assert shared == (
        "12 threads run on 8 physical cores: two threads of one core share its arithmetic"
    )
    assert [f"a limit of {quota:.3g} cores" in note for note in limits] == (
        [] if quota is None else [True]
    )


@pytest.mark.parametrize("wrong", ["", "a", "3-1", "1,", "-1", "0-"])
def test_cores_are_numbers_and_ranges(wrong: str) -> None:
    for knob, others in (("runtime.cores", []), ("task.cores", ["preset=serve"])):
        with pytest.raises(BadInput, match=rf"{knob}=.* must be numbers and ranges"):
            compose([*others, f"{knob}='{wrong}'"])


KEPT = """
import os, threading
from minivllm.platform.threads import allowed_cores, pin
go, seen, everywhere = threading.Event(), [], os.sched_getaffinity(0)
see = lambda: seen.append(os.sched_getaffinity(0))
old = threading.Thread(target=lambda: (go.wait(), see()))
old.start()
pin({"cores": str(min(everywhere))})
go.set()
old.join()
new = threading.Thread(target=see)
new.start()
new.join()
assert seen == [{min(everywhere)}] * 2 and allowed_cores() == everywhere, seen
pin({"cores": max(everywhere)})
see()
pin({"cores": None})
see()
assert seen[2:] == [{max(everywhere)}, everywhere], seen
"""


def test_a_process_is_kept_to_its_cores_until_they_are_others(cli: Callable[..., Any]) -> None:
    # on its own: it stays so for all that follows
    subprocess.run([sys.executable, "-c", KEPT], check=True)
    with pytest.raises(BadInput, match="this process may not run on 4095, only on"):
        pin({"cores": 4095})
    for knob, command in (
        ("runtime.cores", ["workload.num_requests=1"]),
        ("task.cores", ["preset=serve", "task.port=0"]),
    ):
        done = cli(f"{knob}='0,4095'", *command)
        assert done.code == 2 and len(done.err.splitlines()) == 1
        assert f"{knob}=0,4095: this process may not run on 4095" in done.err


def test_more_threads_than_cores_are_noted_in_the_record(
    torch_threads: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("MINIVLLM_THREADS", raising=False)
    monkeypatch.setattr(threads, "allowed_cores", lambda: {0, 1, 4, 5})
    monkeypatch.setattr(threads, "TOPOLOGY", tmp_path / "nowhere")
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: 4)
    note = "{} threads share {}: they wait for one another's turns"
    assert crowded({}) == crowded({"threads": 4}) == crowded({"threads": 1, "cores": "0"}) == []
    assert crowded({"threads": 5}) == [note.format(5, "4 cores")]
    monkeypatch.setenv("MINIVLLM_THREADS", "2")
    assert crowded({"cores": "0"}) == [note.format(2, "1 core")]
    monkeypatch.setattr(threads, "allowed_cores", lambda: {0})
    small = ["workload.num_requests=1", "workload.output_len=2", "measure.roofline=false"]
    for engine, message in (
        (["engine=minivllm", "runtime.threads=2"], [note.format(2, "1 core")]),
        # no thread computes
        (["engine=simulated", "engine.bandwidth_gb_s=20", "engine.tflops=1"], []),
    ):
        config = compose([*engine, *small])
        measurement = Measurement("r", "c", "sweep", "a", 0, str(tmp_path / engine[0]), config)
        record = Session(config, lambda event, **details: None).measure(measurement).record
        assert [message for message in record.validity.notes if "threads" in message] == message


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize(("overrides", "expected"), [([], 3), (["runtime.threads=2"], 2)])
def test_an_engine_is_built_with_the_threads_that_it_runs_with(
    overrides: list[str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are packed and layers compiled for so many."""
    monkeypatch.setenv("MINIVLLM_THREADS", "3")
    torch.set_num_threads(1)
    seen: list[int] = []
    build = assembly.build

    def spy(node: dict[str, Any], *args: Any, **given: Any) -> Any:
        seen.append(torch.get_num_threads())
        return build(node, *args, **given)

    monkeypatch.setattr(assembly, "build", spy)
    assembly.build_engine(compose(["runtime.device=cpu", *overrides]))
    assert seen and set(seen) == {expected} and torch.get_num_threads() == expected


def test_shares_keep_the_threads_of_a_core_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for core in range(4):  # two cores of two threads each
        (tmp_path / f"cpu{core}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{core}/topology/thread_siblings_list").write_text(
            f"{core % 2},{core % 2 + 2}"
        )
    monkeypatch.setattr(threads, "TOPOLOGY", tmp_path)
    assert shares(range(4), 2) == [[0, 2], [1, 3]]
    assert shares({7, 9}, 2) == [[7], [9]]  # no topology is told
    assert shares({1}, 2) == [[1], [1]]
