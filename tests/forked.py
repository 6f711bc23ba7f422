"""Python processes of tests that are forked instead of started: importing torch takes more than a
second of a processor, and a fork a hundredth.

`ForkedPopen` takes the place of `subprocess.Popen` where a test's fixture says so. A command of
MODULES, and run.py, is then a fork of a template, a process that has imported what they import, has
composed the default configuration, and has done nothing else: it has no threads, which a fork would
lack. The fork is a child of the caller, with the descriptors, environment, folder, session, process
group, cores and arguments that were asked for. A fork of run.py has a template of its own, a child
of it, for what it starts, and so has a process that runs tests beside others, whose template has
imported what tests do, too. Every other command is started as always, and so is one with another
environment for what libraries read while they are imported.
"""

from __future__ import annotations

import atexit
import contextlib
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
import termios
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tests.alone import hear_nobody
from tests.unsynced import sync_nothing

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[1]
RUN = str(ROOT / "run.py")
ENGINE_PROCESS = "minivllm.serving.processes.engine_process"
MODULES = (
    *("minivllm.bench.worker", "minivllm.bench.quality_reference", "minivllm.config.plug_ins"),
    *("minivllm.processes.rank", ENGINE_PROCESS, "minivllm.models.load.unpickle"),
)
IMPORTED = (
    *("minivllm.llm", "minivllm.bench.session", "minivllm.engines.minivllm.engine"),
    *("minivllm.cli", "minivllm.tasks.bench", "minivllm.experiments.plain", ENGINE_PROCESS),
    "tests.pictures",
)
SERVER = "minivllm.serving.server"  # imports what an extra brings in
OF_TESTS = (
    *("pytest", "hypothesis", "scipy.stats", "triton.language", "PIL.Image", "aiohttp"),
    *("transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3"),
    *("transformers.models.llama.modeling_llama", "prompt_toolkit", "execnet.gateway_base"),
)
# Beginnings of the names of variables that libraries read while they are imported.
READ_AT_IMPORT = (
    *("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "LD_", "MALLOC_", "ARROW_"),
    *("TORCH", "PYTORCH", "TRITON", "HF_", "TRANSFORMERS_"),
)
# Of these what scikit-learn, lm-eval and torch's compiler set in whatever process they are used in,
# which says nothing of what a process is to be: how OpenMP of Intel forks, caches, downloads.
SET_BY_LIBRARIES = {
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    *("HF_XET_HIGH_PERFORMANCE", "HF_HUB_ENABLE_HF_TRANSFER"),
}
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
OF_WORKERS = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
PR_SET_CHILD_SUBREAPER = 36
HIGH = 200  # above every descriptor that is asked for
_MODULE = [sys.executable, "-m"]
# As pytest-xdist starts a process that runs tests: what it is to do comes from standard input.
TEST_PROCESS = [sys.executable, "-u", "-c", "import sys;exec(eval(sys.stdin.readline()))"]
_STANDARD: Any = subprocess.Popen
MOST_BYTES = 1 << 20  # of a request
PATIENCE_S = 60.0  # for the process between template and fork to end
LONGEST_S = 200.0  # for a fork to tell its process id, and for a template to import
_asking = threading.Lock()  # a process is given the orphans of all its forks, or of none


class Template:
    """The process that is forked, and the socket over which it is asked.

    Args:
        connection: to that process.
        environment: in which it imported.
        pid: its process id.
        process: where this one has started it.
    """

    def __init__(
        self,
        connection: socket.socket,
        environment: Mapping[str, str],
        pid: int,
        process: subprocess.Popen[Any] | None = None,
    ) -> None:
        self.environment, self.pid, self._socket = environment, pid, connection
        self._process = process
        connection.settimeout(LONGEST_S)

    @classmethod
    def started(cls, *further: str) -> Template:
        """One that imports in the environment of this process, and ends with it.

        Args:
            further: modules that it imports if they are installed.
        """
        environment = {**os.environ, **ONE_THREAD, **OF_WORKERS, "PYTHONPATH": str(ROOT)}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = _STANDARD(
                [sys.executable, "-m", "tests.forked", str(theirs.fileno()), *further],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )
        return cls(ours, environment, process.pid, process)

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether a fork is what a process with this environment would be."""
        if environment.get("OMP_NUM_THREADS") != "1":
            return False
        asked = {**ONE_THREAD, **environment}
        names = [
            name
            for name in {*asked, *self.environment} - SET_BY_LIBRARIES
            if name.startswith(READ_AT_IMPORT)
        ]
        return all(asked.get(name) == self.environment.get(name) for name in names)

    def fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """The process id of a new child of this process.

        Args:
            request: see `become`.
            descriptors: that the child has; the first three are its standard streams.

        Raises:
            TimeoutError: it died before it was one.
        """
        prctl = ctypes.CDLL(None).prctl
        with _asking:
            prctl(PR_SET_CHILD_SUBREAPER, 1)  # the fork of a process that ends is a child of this
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], [*descriptors])
                return int(self._socket.recv(64))
            except TimeoutError:
                _templates.clear()  # what it still says is no answer to the next request
                raise
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, 0)


_templates: dict[int, Template] = {}  # by the process that uses it


def template() -> Template:
    """The template of this process, made when it is first needed; it ends with this process."""
    if os.getpid() not in _templates:
        _templates.clear()
        _templates[os.getpid()] = Template.started()
    return _templates[os.getpid()]


def probe_briefly(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Read as little memory as the probe of the hardware may, and let each try take no longer than
    it must, and find a machine that nobody else uses: no test looks at what it finds."""
    from minivllm.bench.hardware import limits, telemetry

    put(telemetry, "busy_seconds", lambda cores=(): 0.0)
    put(limits, "PROBE_BYTES", limits.MIN_PROBE_BYTES)
    put(limits, "PROBE_SECONDS", 0.02)


def popen() -> type[subprocess.Popen[Any]]:
    """What starts a process: by a fork, but not beside a real GPU, which forks cannot share."""
    can_fork = sys.platform == "linux" and not Path("/dev/nvidiactl").exists()
    return ForkedPopen if can_fork else _STANDARD


def fork_known(patch: pytest.MonkeyPatch) -> None:
    """Let `popen` take the place of subprocess.Popen."""
    patch.setattr(subprocess, "Popen", popen())


def fork_test_processes(patch: pytest.MonkeyPatch) -> None:
    """Let the processes that run this process's tests be forks of one that has imported what they
    would."""
    fork_known(patch)
    if subprocess.Popen is ForkedPopen:
        _templates[os.getpid()] = Template.started(*OF_TESTS)


def take_terminal() -> None:
    """Let Ctrl-C on the terminal at standard input reach this process, the first of its session;
    for `preexec_fn`."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class ForkedPopen(subprocess.Popen[Any]):
    """subprocess.Popen; see the module's docstring."""

    is_forked = False

    def _execute_child(self, args: Any, *others: Any) -> None:
        names = [*inspect.signature(_STANDARD._execute_child).parameters][2:]
        given = dict(zip(names, others, strict=True))
        environment = dict(os.environ if given["env"] is None else given["env"])
        folder = str(given["cwd"] or os.getcwd())
        words = [] if isinstance(args, str) else [*map(str, args)]
        is_module = words[:2] == _MODULE and words[2] in MODULES
        is_run = words[:1] == _MODULE[:1] and os.path.join(folder, *words[1:2]) == RUN
        is_known = is_module or is_run or words == TEST_PROCESS
        known = is_known and given["preexec_fn"] in (None, take_terminal)
        if not known or not template().fits(environment):
            _STANDARD._execute_child(self, args, *others)
            return
        streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        request = {
            "command": words,
            "environment": environment,
            "folder": folder,
            "cores": [*os.sched_getaffinity(0)],
            "group": None if given["start_new_session"] else os.getpgrp(),
            "kept": [*given["pass_fds"]],
            "takes_terminal": given["preexec_fn"] is take_terminal,
            "parent": os.getpid(),
        }
        inherited = [own if asked == -1 else asked for own, asked in enumerate(streams)]
        self.pid = template().fork(request, [*inherited, *request["kept"]])
        self._child_created = self.is_forked = True
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
    """Be the process that was asked for, but for its program.

    Args:
        request: command, environment, folder, cores, group (of processes; None: a session of its
            own), kept (the numbers of descriptors beside the standard streams), takes_terminal,
            parent.
        descriptors: in the order of 0, 1, 2 and the kept ones.
        path: of modules, which PYTHONPATH precedes.
    """
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, HIGH) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(high, [0, 1, 2, *request["kept"]], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if request["takes_terminal"]:
        take_terminal()
    os.sched_setaffinity(0, request["cores"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    first = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    words = request["command"]
    is_module = words[:2] == _MODULE
    sys.orig_argv[:] = words
    started = words[1:2] + words[3:] if is_module else words[1:]
    sys.argv[:] = ["-c"] if words == TEST_PROCESS else started
    sys.path[:] = [request["folder"] if is_module else str(ROOT), *first, *path]
    importlib.invalidate_caches()
    tempfile.tempdir = None
    warnings.filterwarnings("ignore", module="runpy")  # of a module that is imported already


def main(descriptor: int, *further: str) -> None:
    """Be the template, and then what it is forked for."""
    path = [entry for entry in sys.path if entry != str(ROOT)]
    environment = dict(os.environ)
    for name in IMPORTED:
        importlib.import_module(name)
    for name in (SERVER, *further):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _compose_ahead()
    if hypothesis := sys.modules.get("hypothesis"):  # whose tables of characters take a second
        hypothesis.strategies.text().validate()
    assert len(os.listdir("/proc/self/task")) == 1, (
        "a process with threads cannot be forked"
    )  # pyarrow has one
    gc.collect()
    gc.freeze()
    connection = socket.socket(fileno=descriptor)
    while True:
        with connection:
            request, descriptors = serve(connection)
            deadline = time.monotonic() + PATIENCE_S
            while os.getppid() != request["parent"]:
                if time.monotonic() > deadline:
                    os._exit(1)
                time.sleep(0.0005)
            if request["group"] is None:
                os.setsid()
            else:
                os.setpgid(0, request["group"])
            connection.send(str(os.getpid()).encode())
        become(request, descriptors, path)
        words = request["command"]
        if words[:2] == _MODULE:
            break
        ours, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if child := os.fork():
            connection.close()
            _templates[os.getpid()] = Template(ours, environment, child)
            if words != TEST_PROCESS:
                subprocess.Popen = ForkedPopen  # type: ignore[misc]
                paint_less()
            break
        ours.close()
        _stand_apart(request["kept"])
    if words != TEST_PROCESS:  # in which fixtures do so, and take it back
        probe_briefly()
        sync_nothing()
        hear_nobody()
    os._exit(run(words))  # freeing what was imported takes longer than many a test


def _compose_ahead() -> None:
    """Read and merge the option files, for all forks."""
    from minivllm.config.compose import compose
    from tests.parsed_once import parse_once

    parse_once()
    compose()


def paint_less() -> None:
    """Leave out the pictures that every report has, as the fixture `cli` does."""
    from minivllm.report import page
    from tests.pictures import painted_if_own

    page.finish = painted_if_own  # type: ignore[attr-defined]


def _stand_apart(kept: Sequence[int]) -> None:
    """No signal to the group of a fork, and no reader of what it writes, is its template's."""
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    for descriptor in (nothing, *kept):
        os.close(descriptor)


def run(command: Sequence[str]) -> int:
    """Run a module or a file as a program; its exit code once its threads and exit functions are
    done."""
    code: object = None
    try:
        if command[1] == "-m":
            runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        elif command == TEST_PROCESS:
            sys.modules["__main__"] = ModuleType("__main__")
            exec(command[-1], vars(sys.modules["__main__"]))
        else:
            runpy.run_path(command[1], run_name="__main__")
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
    from tests import forked  # which a fork that runs tests finds with its template

    forked.main(int(sys.argv[1]), *sys.argv[2:])
