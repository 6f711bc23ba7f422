"""What all tests share: no network, a GPU only where asked for, a command line that runs in this
process, a fuzz."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.alone import hear_nobody
from tests.announcing import announcement
from tests.compiled_ahead import compile_ahead
from tests.forked import fork_known, fork_test_processes, probe_briefly
from tests.fuzzing import Fuzz
from tests.parsed_once import parse_once
from tests.triton_interpreter import prepare_once
from tests.unsynced import sync_nothing

if TYPE_CHECKING:
    from minivllm.kernels.cpu.library import Kernels

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run in numpy where there is no GPU
# models here are too small for threads to help
for name in ("OMP_NUM_THREADS", "MINIVLLM_THREADS"):
    os.environ.setdefault(name, "1")

# torch's compiler starts no processes, each of which would import it, and does not try first
# whether the C++ compiler knows the processor's instructions: what it did not know would fail.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Test processes side by side: the lock of a device lies in the folder for temporary files, and none
# waits for another's. What torch's compiler has made is for all of them.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/minivllm-inductor")
    own_folder = tempfile.TemporaryDirectory(prefix=f"{worker}-", ignore_cleanup_errors=True)
    os.environ["TMPDIR"] = tempfile.tempdir = own_folder.name

# Garbage is looked for when all tests are found, and then after so many new objects.
gc.disable()
OBJECTS = 20_000

# A shell starts background jobs with Ctrl-C ignored, nohup starts its command without hang-ups, and
# processes inherit both: the tests of signals need them back.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# A machine that is busy with something else is no failure.
settings.register_profile("calm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
inputs = int(os.environ.get("FUZZ_INPUTS", "2000"))  # of each test
settings.register_profile("fuzz", settings.get_profile("calm"), max_examples=inputs)
settings.load_profile("calm")


def pytest_configure(config: pytest.Config) -> None:
    """Compile and import ahead of processes that are started; bound and count the inputs of the
    tests marked `fuzz` under --hypothesis-profile=fuzz."""
    if config.getoption("tx", None) and not hasattr(config, "workerinput"):
        compile_ahead(config)
        patch = pytest.MonkeyPatch()
        fork_test_processes(patch)
        config.add_cleanup(patch.undo)
    if config.getoption("--hypothesis-profile") == "fuzz":
        config.pluginmanager.register(Fuzz())


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests in a browser as `real`, and skip GPU tests where there is no GPU; torch is only
    imported to find out if there are any."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real)
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_finish() -> None:
    """Leave modules and tests, which stay, out of every later collection of garbage."""
    gc.freeze()
    gc.set_threshold(OBJECTS)
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Say what is tested with, and how much; once, though every process finds all tests."""
    reporter = node.config.pluginmanager.get_plugin("terminalreporter")
    if node.gateway.id == "gw0" and reporter is not None:
        for line in announcement(len(ids), len(node.config.getoption("tx"))):
            reporter.write_line(line)


@pytest.fixture(scope="session", autouse=True)
def _done_once() -> Iterator[None]:
    """What libraries would do again and again, what the hardware is asked at every start, what the
    disk is waited for, and what other processes do."""
    with pytest.MonkeyPatch.context() as patch:
        parse_once(patch.setattr)
        prepare_once(patch)
        probe_briefly(patch.setattr)
        sync_nothing(patch.setattr)
        hear_nobody(patch.setattr)
        yield


@pytest.fixture(scope="session")
def _empty_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """New empty folders. `mktemp` reads the names of all that it has made, at every call."""
    folder = tmp_path_factory.mktemp("elsewhere")

    def make() -> Iterator[Path]:
        for number in itertools.count():
            (new := folder / str(number)).mkdir()
            yield new

    return make()


@pytest.fixture(autouse=True)
def elsewhere(_empty_folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test in an empty folder, so that none sees the runs and reports of the checkout."""
    monkeypatch.chdir(next(_empty_folders))


@pytest.fixture(autouse=True)
def no_secrets() -> Iterator[None]:
    """No test hides what another has learned to be secret."""
    from minivllm import redaction

    yield
    redaction.forget()


@dataclass
class Result:
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Callable[..., Result]]:
    """Run a command in this process, in an empty folder of its own; of its report only the pictures
    that no other has are painted, and its workers are forks of a process with torch."""
    from minivllm.cli import main

    fork_known(monkeypatch)
    if "report" not in request.path.parts:
        from tests.pictures import painted_if_own

        monkeypatch.setattr("minivllm.report.page.finish", painted_if_own)
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run(*argv: str) -> Result:
        capsys.readouterr()
        code = main(list(argv))
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield run
    # Hydra's --info leaves a handler on a captured stream
    root.handlers[:], root.level = handlers, level


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """The C++ kernels of this machine."""
    from minivllm.kernels.cpu import library

    try:
        return library.load()
    except (RuntimeError, OSError) as error:
        pytest.skip(f"the C++ kernels cannot be had here: {str(error).splitlines()[0]}")


@pytest.fixture(scope="session")
def panels(kernels: Kernels) -> Kernels:
    """The kernels of linear layers."""
    if not kernels.has_linear:
        pytest.skip("this processor has no AVX2")
    return kernels


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's compiler, whose headers are precompiled for all test processes, not for each folder
    for temporary files."""
    from torch._inductor import codecache

    headers = Path(codecache.cache_dir(), "precompiled_headers")
    for name, folder in (("_HEADER_DIR", headers), ("_HEADER_LOCK_DIR", headers / "locks")):
        monkeypatch.setattr(codecache, name, str(folder), raising=False)


@pytest.fixture
def user_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's own package on the path, with option files beside it: <user_dir>/conf is for
    --config-dir."""
    (tmp_path / "user" / "conf").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "user"))
    for name in [n for n in sys.modules if n.startswith("my_")]:  # another test's, of the same name
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "user"


@pytest.fixture
def plug_in(user_dir: Path) -> Callable[[str, str, str], None]:
    """Write one option file of the user's."""

    def write(group: str, name: str, text: str) -> None:
        path = user_dir / "conf" / group / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    return write


@pytest.fixture(scope="module", autouse=True)
def _no_mortal_process_is_left() -> Iterator[None]:
    """Tests of processes ask whether any is left: those that render chat templates and compile
    grammars end with their file."""
    yield
    if (module := sys.modules.get("minivllm.platform.processes.mortal")) is not None:
        module.stop_all()
