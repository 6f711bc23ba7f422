"""Both ends of a process of this machine: where it prints, how it ends, and what it reports."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack
from typing import Any

import psutil
import pytest

from minivllm.errors import BadInput
from minivllm.platform.processes.channel import Channel
from minivllm.platform.processes.heartbeat import Beat, Progress
from minivllm.processes.messages import Failed
from minivllm.processes.started import LocalProcess, serve_engine
from tests.processes.child import STARTS

CHILD = "tests.processes.child"


def spoken_to(threads: int | None) -> tuple[LocalProcess, Channel]:
    """A child that has answered."""
    child = LocalProcess(CHILD, threads=threads)
    channel = Channel(child.connection)
    channel.send("hello")
    assert channel.receive(None) == ["hello"]
    return child, channel


def test_a_part_of_this_process_prints_into_its_log(capfd: pytest.CaptureFixture[str]) -> None:
    child, channel = spoken_to(threads=1)
    assert os.getpgid(child.pid) == os.getpgid(0)
    channel.close()
    assert child.exit_reason() == "ended with exit code 3; it printed last: hello"
    child.stop()
    assert "hello" in capfd.readouterr().err


def test_a_process_beside_this_one_has_a_session_of_its_own() -> None:
    child, channel = spoken_to(threads=None)
    assert os.getsid(child.pid) == child.pid
    child.kill()
    assert child.exit_reason() == "ended with exit code -9"
    channel.close()
    child.stop()


def test_a_part_that_is_silent_is_still_running() -> None:
    child, channel = spoken_to(threads=1)
    os.kill(child.pid, signal.SIGSTOP)
    assert child.exit_reason() == "is still running; it printed last: hello"
    child.stop()
    assert not psutil.pid_exists(child.pid)
    channel.close()


def test_what_a_part_has_started_is_stopped_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STARTS, "sleep 60")
    child, channel = spoken_to(threads=1)
    (started,) = psutil.Process(child.pid).children()
    child.stop()
    psutil.wait_procs([started], timeout=60)
    assert not started.is_running() or started.status() == psutil.STATUS_ZOMBIE
    channel.close()


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (BadInput("too long"), 2, "invalid"),
        (MemoryError("no room"), 1, "oom"),
        (ZeroDivisionError("of nothing"), 1, "error"),
        (None, 0, None),
    ],
    ids=str,
)
def test_an_engine_that_fails_is_reported_to_its_parent(
    error: Exception | None, code: int, status: str | None
) -> None:
    ours, theirs = map(Channel, socket.socketpair())
    ours.send({"of": "an engine"})
    begun: list[Any] = []

    sent: list[Any] = []

    def close() -> None:
        """Close the engine, which may take a while: the parent knows of a failure already."""
        sent.extend(one for one in ours.receive(0.0) if not isinstance(one, Beat))

    def run(config: dict[str, Any], channel: Channel, progress: Progress, exits: ExitStack) -> None:
        begun.append(config)
        exits.callback(close)
        if error is not None:
            raise error

    assert serve_engine(theirs, run) == code
    assert begun == [{"of": "an engine"}]
    assert sent == ([] if error is None else [Failed(str(error), str(status))])
