"""A process that an engine started never outlives it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from minivllm import BadInput
from minivllm.engines.peer_process import Child, listeners

SLEEPER = "import time; print('here', flush=True); time.sleep(600)"
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("started", child.pid, flush=True)
time.sleep(600)
"""


def test_the_processes_that_listen_at_an_address_are_found() -> None:
    with socket.socket() as heard, socket.socket() as silent:
        heard.bind(("127.0.0.1", 0))
        heard.listen()
        silent.bind(("127.0.0.1", 0))
        assert listeners(f"http://127.0.0.1:{heard.getsockname()[1]}/v1") == (os.getpid(),)
        assert listeners(f"http://localhost:{silent.getsockname()[1]}") == ()
    assert listeners("http://192.0.2.1:8000/v1") is None  # an address of documentation
    assert listeners("http://no.such.host.invalid") is None


def gone(pid: int, within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked to see to it")
def test_it_ends_with_a_parent_that_is_killed() -> None:
    script = (
        "import sys, time\nfrom minivllm.engines.peer_process import Child\n"
        f"child = Child([sys.executable, '-c', {SLEEPER!r}])\n"
        "while 'printed last: here' not in child.exit_reason(): time.sleep(0.05)\n"
        "print(child.process.pid, flush=True)\ntime.sleep(600)"
    )
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert gone(pid)


def test_one_that_will_not_end_is_ended_with_what_it_started() -> None:
    child = Child([sys.executable, "-c", STUBBORN])
    while "printed last: started" not in (words := child.exit_reason()):
        time.sleep(0.05)
    inner = int(words.rpartition("started ")[2])
    child.stop(grace_s=0.5)
    assert child.process.returncode == -signal.SIGKILL and gone(inner)


def test_its_end_is_told_with_its_last_words(capfd: pytest.CaptureFixture[str]) -> None:
    child = Child([sys.executable, "-c", "print('one'); print('two'); raise SystemExit(3)"])
    child.process.wait()
    assert child.exit_reason() == "ended with exit code 3; it printed last: one | two"
    child.say(b"anybody there?\n")
    child.stop(1)
    assert "two" in capfd.readouterr().err


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(BadInput, match=r"engine\.command: there is no program nonesuch"):
        Child(["nonesuch"])
