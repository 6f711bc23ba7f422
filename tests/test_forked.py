"""A forked process is what a started one would be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.forked import ForkedPopen

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux does")
TELLING = """
import json, os, sys
words = {
    "name": __name__, "folder": os.getcwd(), "arguments": sys.argv[1:], "path": sys.path[:2],
    "variable": os.environ.get("MINE"), "heard": sys.stdin.read(), "parent": os.getppid(),
    "leads": os.getsid(0) == os.getpid(), "imported": "torch" in sys.modules,
}
print("to stderr", file=sys.stderr)
if len(sys.argv) > 2:
    os.write(int(sys.argv[2]), b"kept")
print(json.dumps(words))
sys.exit(7)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """How a process of a module of a user's own is started."""
    (tmp_path / "my_telling.py").write_text(TELLING)
    monkeypatch.setattr(forked, "MODULES", ("my_telling",))
    folder = tmp_path / "folder"
    folder.mkdir()
    threads = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment = {**os.environ, **threads, "PYTHONPATH": str(tmp_path), "MINE": "a"}
    return {"cwd": folder, "env": environment}


def told(kind: type[subprocess.Popen[Any]], new_session: bool, **own: Any) -> dict[str, Any]:
    """What a process says of itself."""
    reads, writes = os.pipe()
    with kind(
        [sys.executable, "-m", "my_telling", "a b", str(writes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        pass_fds=(writes,),
        start_new_session=new_session,
        **own,
    ) as process:
        out, _ = process.communicate("in")
    os.close(writes)
    with os.fdopen(reads) as kept:
        first, second = out.splitlines()
        return {
            **json.loads(second),
            "code": process.returncode,
            "stderr": first,
            "kept": kept.read(),
        }


@pytest.mark.parametrize("new_session", [True, False])
def test_it_has_what_was_asked_for(own: dict[str, Any], new_session: bool) -> None:
    started = told(subprocess.Popen, new_session, **own)
    found = told(ForkedPopen, new_session, **own)
    assert not started.pop("imported") and found.pop("imported")
    assert found == started
    assert (found["code"], found["stderr"], found["kept"]) == (7, "to stderr", "kept")
    assert found["leads"] == new_session and found["parent"] == os.getpid()


def test_it_is_killed_and_waited_for_as_others_are(own: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "my_telling"]
    with ForkedPopen(command, stdin=subprocess.PIPE, **own) as process:
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert Path(f"/proc/{forked.template().process.pid}").exists()


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "TRITON_INTERPRET", "HF_HUB_OFFLINE"])
def test_an_environment_that_libraries_have_read_already_is_none_of_a_fork(
    own: dict[str, Any], name: str
) -> None:
    assert forked.template().fits(own["env"])
    own["env"][name] = "2"
    assert not forked.template().fits(own["env"])
    assert not told(ForkedPopen, True, **own)["imported"]


def test_other_commands_are_started(own: dict[str, Any]) -> None:
    code = "import sys; print('torch' in sys.modules)"
    with ForkedPopen([sys.executable, "-c", code], stdout=subprocess.PIPE, **own) as process:
        assert process.communicate()[0] == b"False\n"
