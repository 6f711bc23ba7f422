"""A child process may die of a question, or take too long, and the next question gets another."""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
from pathlib import Path

import pytest

from minivllm.platform.processes.mortal import Died, MortalProcess, TookTooLong, stop_all

CHILD = """
import os, sys, time
from minivllm.platform.processes.mortal import limit_memory

limit_memory(1 << 30)
first = None
for line in sys.stdin.buffer:
    first = first or line.decode().strip()
    if line == b"die\\n":
        os.abort()
    if line == b"eat\\n":
        os.write(1, b"x" * (2 << 30))
    if line == b"wait\\n":
        time.sleep(3600)
    os.write(1, f"{first} {os.getpid()} {line!r}\\n".encode())
"""
SECONDS = 60.0
BUSY_CHILD = """
from minivllm.platform.processes.mortal import answer_lines

def begin(settings):
    return lambda asked: {"sum": settings + asked} if asked else busy()

def busy():
    while True:
        pass

if __name__ == "__main__":
    answer_lines(begin, 0.2)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MortalProcess:
    (tmp_path / "my_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    return MortalProcess("my_child", lambda: b"hello")


def test_an_end_is_an_error_of_one_question(child: MortalProcess) -> None:
    first = child.ask(b"a", SECONDS).split()
    assert first[0] == b"hello" and first[2:] == [rb"b'a\n'"]
    assert child.ask(b"b", SECONDS).split()[1] == first[1]
    for question in (b"die", b"eat"):
        with pytest.raises(Died):
            child.ask(question, SECONDS)
    other = child.ask(b"c", SECONDS).split()
    assert other[0] == b"hello" and other[1] != first[1]
    with pytest.raises(TookTooLong):
        child.ask(b"wait", 0.01)
    pid = int(child.ask(b"d", SECONDS).split()[1])
    stop_all()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_child_that_does_not_read_takes_too_long(child: MortalProcess) -> None:
    pid = int(child.ask(b"a", SECONDS).split()[1])
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(TookTooLong):
        child.ask(b"x" * (1 << 20), 0.1)  # more than a pipe holds
    assert int(child.ask(b"b" * (1 << 20), SECONDS).split()[1]) != pid


def test_an_answer_has_so_much_of_a_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def line(value: int) -> bytes:
        return base64.b64encode(pickle.dumps(value))

    (tmp_path / "busy_child.py").write_text(BUSY_CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    child = MortalProcess("busy_child", lambda: line(40))
    assert json.loads(child.ask(line(2), SECONDS)) == {"sum": 42}
    with pytest.raises(Died):
        child.ask(line(0), SECONDS)
    assert json.loads(child.ask(line(3), SECONDS)) == {"sum": 43}
    child.stop()
