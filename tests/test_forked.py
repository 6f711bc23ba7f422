"""A forked process is what a started one would be."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
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
    "command": sys.orig_argv, "cores": [*os.sched_getaffinity(0)],
    "group": None if os.getpgrp() == os.getpid() else os.getpgrp(), "session": os.getsid(0),
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
    if new_session:
        assert started.pop("session") != found.pop("session")
    assert found == started
    assert (found["code"], found["stderr"], found["kept"]) == (7, "to stderr", "kept")
    assert found["leads"] == new_session and found["parent"] == os.getpid()


def test_it_is_killed_and_waited_for_as_others_are(own: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "my_telling"]
    with ForkedPopen(command, stdin=subprocess.PIPE, **own) as process:
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert Path(f"/proc/{forked.template().pid}").exists()


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "TRITON_INTERPRET", "HF_HUB_OFFLINE"])
def test_an_environment_that_libraries_have_read_already_is_none_of_a_fork(
    own: dict[str, Any], name: str
) -> None:
    assert forked.template().fits(own["env"])
    own["env"][name] = "2"
    assert not forked.template().fits(own["env"])
    assert not told(ForkedPopen, True, **own)["imported"]


def test_what_a_library_sets_in_this_process_makes_no_fork_impossible(own: dict[str, Any]) -> None:
    """scikit-learn and torch's compiler set such variables in whatever process imports them."""
    own["env"] |= {"KMP_INIT_AT_FORK": "FALSE", "TRITON_CACHE_DIR": "/nowhere"}
    assert told(ForkedPopen, True, **own)["imported"]


def test_other_commands_are_started(own: dict[str, Any]) -> None:
    code = "import sys; print('torch' in sys.modules)"
    with ForkedPopen([sys.executable, "-c", code], stdout=subprocess.PIPE, **own) as process:
        assert process.communicate()[0] == b"False\n"


def test_run_py_is_forked_and_so_is_what_it_starts(
    own: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "run.py"
    program.write_text(
        "import json, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-m', 'minivllm.bench.worker', '1', '999999'])\n"
        "print(json.dumps([sys.argv, 'torch' in sys.modules, child.is_forked, child.wait()]))\n"
        "sys.exit(3)\n"
    )
    monkeypatch.setattr(forked, "RUN", str(program))
    own["cwd"] = tmp_path
    for words in (["run.py", "a b"], [str(program), "a b"]):
        with ForkedPopen([sys.executable, *words], stdout=subprocess.PIPE, **own) as process:
            out, _ = process.communicate()
        assert process.is_forked and process.returncode == 3
        assert json.loads(out) == [words, True, True, 1]


def test_what_run_py_starts_is_of_its_group_and_ends_with_it(
    own: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template that it is forked from is not, and ends by itself."""
    program = tmp_path / "run.py"
    program.write_text(
        "import os, subprocess, sys\n"
        "subprocess.Popen._execute_child.__globals__['MODULES'] = ('my_telling',)\n"
        "child = subprocess.Popen([sys.executable, '-m', 'my_telling'], stdin=subprocess.PIPE)\n"
        "print(child.pid, os.getpgid(child.pid), flush=True)\n"
        "child.wait()\n"
    )
    monkeypatch.setattr(forked, "RUN", str(program))
    given = {"stdout": subprocess.PIPE, "start_new_session": True, "text": True}
    with ForkedPopen([sys.executable, str(program)], **given, **own) as process:
        assert process.stdout is not None
        child, group = map(int, process.stdout.readline().split())
        assert group == process.pid
        children = psutil.Process(process.pid).children()
        assert len(children) == 2 and child in {one.pid for one in children}
        os.killpg(process.pid, signal.SIGKILL)
        assert process.stdout.read() == ""  # nobody has its other end
    assert not psutil.wait_procs(children, timeout=60)[1]


TESTING = """
import json, os, subprocess, sys
from tests import forked
forked.MODULES = ("my_telling",)
command = [sys.executable, "-m", "my_telling"]
with forked.ForkedPopen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
    out, _ = process.communicate(b"in")
print(json.dumps({
    "globals": __name__ == "__main__" and "__file__" not in globals() and "main" not in globals(),
    "main": vars(sys.modules["__main__"]) is globals(), "arguments": sys.argv,
    "torch": "torch" in sys.modules, "standard": subprocess.Popen is not forked.ForkedPopen,
    "forks": process.is_forked, "imports": json.loads(out)["imported"],
    "owns": [*forked._templates] == [os.getpid()],
}))
"""


def test_a_process_that_runs_tests_is_a_fork_with_a_template_of_its_own(
    own: dict[str, Any],
) -> None:
    own["env"]["PYTHONPATH"] += f"{os.pathsep}{forked.ROOT}"
    with ForkedPopen(
        forked.TEST_PROCESS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **own
    ) as process:
        out, _ = process.communicate(f"{TESTING!r}\n")
    found = json.loads(out)
    assert found.pop("arguments") == ["-c"]
    assert all(found.values()), found


def test_what_runs_tests_is_started_as_pytest_xdist_does() -> None:
    from execnet.gateway_io import popen_args
    from execnet.xspec import XSpec

    assert popen_args(XSpec("popen")) == forked.TEST_PROCESS


def test_the_template_of_what_runs_tests_imports_what_tests_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(forked, "_templates", {})
    monkeypatch.setattr(forked, "popen", lambda: ForkedPopen)
    with socket.socket() as idle:
        made = forked.Template(idle, {}, os.getpid())
        monkeypatch.setattr(forked.Template, "started", lambda *names: asked.append(names) or made)
        forked.fork_test_processes(monkeypatch)
    assert subprocess.Popen is ForkedPopen
    assert asked == [forked.OF_TESTS] and forked.template() is made


def test_a_fork_that_does_not_come_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "LONGEST_S", 0.01)
    monkeypatch.setattr(forked, "_templates", {})
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        silent = forked.Template(ours, {}, os.getpid())
        forked._templates[os.getpid()] = silent
        with pytest.raises(TimeoutError):
            silent.fork({}, [0, 1, 2])
    assert not forked._templates
