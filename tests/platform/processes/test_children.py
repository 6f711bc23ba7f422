"""A process that is started here finds the modules that this one finds; its output reaches this
one's log, without secrets, and its end is kept."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from minivllm import redaction
from minivllm.platform.processes.children import (
    TAIL_LINES,
    ChildProcess,
    CopiedOutput,
    module_path,
)


def test_each_place_is_named_once_and_the_present_folder_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/a", str(tmp_path), "/a"])
    assert module_path().split(os.pathsep) == [str(tmp_path), "/a"]


def test_lines_are_copied_and_the_last_ones_are_kept(capfd: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    output = CopiedOutput("rank 1: ", lines.append)
    assert output.last == ""
    output.copy([b"one\n", b"two\x1b[31m\n", b"\n", b"\xff three\n", b"end"])
    assert output.last == "two | \ufffd three | end"
    assert lines == ["one", "two", "", "\ufffd three", "end"]
    assert capfd.readouterr().err.splitlines()[0] == "rank 1: one"
    output.copy([b"\n"] * TAIL_LINES)
    assert output.last == ""


def test_a_secret_is_not_copied(capfd: pytest.CaptureFixture[str]) -> None:
    redaction.learn({"engine": {"api_key": "sk-a-secret-of-tests"}})
    output = CopiedOutput()
    output.copy([b"key sk-a-secret-of-tests\n"])
    assert "a-secret" not in capfd.readouterr().err + output.last


@pytest.mark.parametrize(("by_itself_s", "code"), [(60.0, 3), (0.0, -signal.SIGTERM)])
def test_a_process_may_end_by_itself_before_it_is_ended(by_itself_s: float, code: int) -> None:
    """It reads until its input is closed, which a process that is to end by itself knows."""
    child = ChildProcess(
        [
            sys.executable,
            "-c",
            "import sys; print('up', flush=True); sys.stdin.read(); sys.exit(3)",
        ],
        stdin=subprocess.PIPE,
    )
    while "printed last: up" not in child.exit_reason():
        pass
    assert child.process.stdin is not None
    child.by_itself_s = by_itself_s
    if by_itself_s:
        child.process.stdin.close()
    child.stop()
    assert child.process.returncode in ((code,) if by_itself_s else (code, 3))


def test_a_process_that_nobody_holds_is_not_kept() -> None:
    """The thread that copies its output does not hold it, whose connection would end with it."""
    child = ChildProcess([sys.executable, "-c", "import time; time.sleep(600)"])
    held, process, reader = weakref.ref(child), child.process, child.reader
    del child
    gc.collect()
    assert held() is None
    assert reader.is_alive()
    process.kill()
    process.wait()


@pytest.mark.parametrize(("killed_s", "waited"), [(None, None), (2.5, 2.5)])
def test_a_killed_process_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, killed_s: float | None, waited: float | None
) -> None:
    child = ChildProcess([sys.executable, "-c", "import time; time.sleep(600)"])
    limits: list[float | None] = []
    wait = child.exit_code
    monkeypatch.setattr(child, "exit_code", lambda s: (limits.append(s), wait(s))[1])
    child.killed_s = killed_s
    child.stop()
    assert limits[-1] == waited
    assert child.process.returncode is not None
