"""Python processes of tests that are forked instead of started: importing torch takes more than a
second of a processor, and a fork a hundredth.

`ForkedPopen` takes the place of `subprocess.Popen` where a test's fixture says so. A command of
MODULES is then a fork of a template, a process that has imported what they import and has done
nothing else. The fork is a child of the caller, with the descriptors, environment, folder, session
and arguments that were asked for. Every other command is started as always, and so is one with
another environment for what libraries read while they are imported.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = (
    *("minivllm.bench.worker", "minivllm.bench.quality_reference", "minivllm.config.plug_ins"),
    "minivllm.cluster.rank",
)
IMPORTED = ("minivllm.llm", "minivllm.bench.session", "minivllm.bench.targets.minivllm")
# Beginnings of the names of variables that libraries read while they are imported.
READ_AT_IMPORT = (
    *("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "LD_", "MALLOC_", "ARROW_"),
    *("TORCH", "PYTORCH", "TRITON", "HF_", "TRANSFORMERS_"),
)
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
OF_WORKERS = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
PR_SET_CHILD_SUBREAPER = 36
HIGH = 200  # above every descriptor that is asked for
_MODULE = [sys.executable, "-m"]
_STANDARD: Any = subprocess.Popen
MOST_BYTES = 1 << 20  # of a request
PATIENCE_S = 10.0  # for the process between template and fork to end


class Template:
    """The process that is forked, and the socket over which it is asked."""

    def __init__(self) -> None:
        self.environment = {**os.environ, **ONE_THREAD, **OF_WORKERS, "PYTHONPATH": str(ROOT)}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked", str(theirs.fileno())],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether a fork is what a process with this environment would be."""
        if environment.get("OMP_NUM_THREADS") != "1":
            return False
        asked = {**ONE_THREAD, **environment}
        names = [name for name in {*asked, *self.environment} if name.startswith(READ_AT_IMPORT)]
        return all(asked.get(name) == self.environment.get(name) for name in names)

    def fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """The process id of a new child of this process.

        Args:
            request: see `become`.
            descriptors: that the child has; the first three are its standard streams.
        """
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # the fork of a process that ends is a child of this one
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [*descriptors])
            return int(self._socket.recv(64))
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0)


_templates: dict[int, Template] = {}  # by the process that uses it


def template() -> Template:
    """The template of this process, made when it is first needed; it ends with this process."""
    if os.getpid() not in _templates:
        _templates.clear()
        _templates[os.getpid()] = Template()
    return _templates[os.getpid()]


def fork_known(patch: pytest.MonkeyPatch) -> None:
    """Let `ForkedPopen` take its place; not beside a real GPU, which forks cannot share."""
    if sys.platform == "linux" and not Path("/dev/nvidiactl").exists():
        patch.setattr(subprocess, "Popen", ForkedPopen)


class ForkedPopen(subprocess.Popen[Any]):
    """subprocess.Popen; see the module's docstring."""

    def _execute_child(self, args: Any, *others: Any) -> None:
        names = [*inspect.signature(_STANDARD._execute_child).parameters][2:]
        given = dict(zip(names, others, strict=True))
        environment = dict(os.environ if given["env"] is None else given["env"])
        words = [] if isinstance(args, str) else [*args]
        is_known = words[:2] == _MODULE and words[2] in MODULES
        if not is_known or not template().fits(environment):
            _STANDARD._execute_child(self, args, *others)
            return
        streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        request = {
            "module": words[2],
            "arguments": [*map(str, words[3:])],
            "environment": environment,
            "folder": str(given["cwd"] or os.getcwd()),
            "new_session": given["start_new_session"],
            "kept": [*given["pass_fds"]],
            "parent": os.getpid(),
        }
        inherited = [own if asked == -1 else asked for own, asked in enumerate(streams)]
        self.pid = template().fork(request, [*inherited, *request["kept"]])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        _STANDARD._close_pipe_fds(self, *(given[name] for name in pipes))


def serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for every request until the end of the connection; returns in a fork, with the request
    and its descriptors."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 16)
        if not message:
            os._exit(0)
        if (between := os.fork()) == 0:
            if os.fork():
                os._exit(0)  # and the fork is the child of who asked
            return json.loads(message), descriptors
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def become(request: Mapping[str, Any], descriptors: Sequence[int], path: Sequence[str]) -> None:
    """Be the process that was asked for, but for its module.

    Args:
        request: module, arguments, environment, folder, new_session, kept (the numbers of
            descriptors beside the standard streams), parent.
        descriptors: in the order of 0, 1, 2 and the kept ones.
        path: of modules, which PYTHONPATH precedes.
    """
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, HIGH) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(high, [0, 1, 2, *request["kept"]], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if request["new_session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    first = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:] = [request["folder"], *first, *path]
    sys.argv[:] = ["-m", *request["arguments"]]
    importlib.invalidate_caches()
    tempfile.tempdir = None
    warnings.filterwarnings("ignore", module="runpy")  # of a module that is imported already


def main(descriptor: int) -> None:
    """Be the template, and then what it is forked for."""
    path = [entry for entry in sys.path if entry != str(ROOT)]
    for name in IMPORTED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, (
        "a process with threads cannot be forked"
    )  # pyarrow has one
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=descriptor) as connection:
        request, descriptors = serve(connection)
        deadline = time.monotonic() + PATIENCE_S
        while os.getppid() != request["parent"]:
            if time.monotonic() > deadline:
                os._exit(1)
            time.sleep(0.0005)
        connection.send(str(os.getpid()).encode())
    become(request, descriptors, path)
    os._exit(run(request["module"]))  # freeing what was imported takes longer than many a test


def run(module: str) -> int:
    """Run a module as a program; its exit code once its threads and exit functions are done."""
    code: object = None
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return int(code or 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
