"""Calls that processes share: in order, whatever becomes of a process, and none of them stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from minivllm.platform.processes import process_pool
from minivllm.platform.processes.process_pool import ProcessPool


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pool, "usable_cores", lambda: 2)


def square(number: int) -> int:
    print("not an answer")
    return number * number


def slow_pid(number: int) -> int:
    time.sleep(0.02)
    return os.getpid()


def checked(number: int) -> int:
    if number == 3:
        raise ValueError("three")
    return number


def die(pid: int) -> str:
    """Ends every process but the one that is named."""
    if os.getpid() != pid:
        os._exit(1)
    return "alive"


def called(item: Any) -> Any:
    return item()


def test_results_stand_in_the_order_of_the_items() -> None:
    with ProcessPool() as pool:
        pool.start()
        assert pool.map(square, range(50)) == [number * number for number in range(50)]
        assert pool.map(square, []) == []


def test_both_processes_make_calls() -> None:
    with ProcessPool() as pool:
        pool.start()
        begun = pool.begin(slow_pid, range(100))
        begun._futures[0].result()  # it has started
        pids = begun.results()
    assert os.getpid() in pids and len(set(pids)) == 2


def test_a_pool_that_was_not_started_makes_every_call_here_when_results_are_asked_for() -> None:
    calls: list[int] = []
    with ProcessPool() as pool:
        begun = pool.begin(calls.append, [1, 2])
        assert calls == []
        begun.results()
    assert calls == [1, 2]


def test_an_error_is_raised_here() -> None:
    with ProcessPool() as pool:
        pool.start()
        with pytest.raises(ValueError, match="three"):
            pool.map(checked, range(6))


def test_calls_of_a_process_that_dies_are_made_here() -> None:
    with ProcessPool() as pool:
        pool.start()
        assert pool.map(die, [os.getpid()] * 9) == ["alive"] * 9


def test_what_another_process_cannot_have_stays_here() -> None:
    with ProcessPool() as pool:
        pool.start()
        items: list[Any] = [lambda: 1, dict, lambda: 3]
        assert pool.map(called, items) == [1, {}, 3]


@pytest.mark.parametrize("cause", ["one core", "no process"])
def test_without_another_process_every_call_is_made_here(
    cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError("no more processes")

    if cause == "one core":
        monkeypatch.setattr(process_pool, "usable_cores", lambda: 1)
    else:
        monkeypatch.setattr(process_pool.subprocess, "Popen", fails)
    with ProcessPool() as pool:
        pool.start()
        assert set(pool.map(slow_pid, range(3))) == {os.getpid()}


@pytest.mark.parametrize("ending", [None, KeyboardInterrupt])
def test_no_process_stays(ending: type[BaseException] | None) -> None:
    pool = ProcessPool()
    try:
        with pool:
            pool.start()
            begun = pool.begin(slow_pid, range(200))
            processes = [*pool._processes]
            if ending:
                raise ending
            begun.results()
    except KeyboardInterrupt:
        pass
    assert processes and all(process.poll() is not None for process in processes)


PARENT = """
import os, sys, time
from minivllm.platform.processes import process_pool
process_pool.usable_cores = lambda: 2
try:
    with process_pool.ProcessPool() as pool:
        pool.start()
        begun = pool.begin(time.sleep, [0.05] * 1000)
        print(pool._processes[0].pid, flush=True)
        begun.results()
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_one_that_is_interrupted_or_killed(
    how: signal.Signals, tmp_path: Path
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    assert parent.stdout is not None
    other = int(parent.stdout.readline())
    time.sleep(0.3)
    os.killpg(parent.pid, how)  # as a terminal does: the whole group
    _, errors = parent.communicate(timeout=20)
    assert parent.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    assert how == signal.SIGKILL or errors == ""
    for _ in range(200):
        if not psutil.pid_exists(other):
            break
        time.sleep(0.05)
    assert not psutil.pid_exists(other)
