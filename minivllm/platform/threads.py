"""The cores of a process, the number of threads of the CPU kernels, and calls that need a large
stack. Torch-free."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import psutil

from minivllm.errors import BadInput

CORES = r"\d+(-\d+)?(,\d+(-\d+)?)*"  # the syntax of taskset
# That libraries take their number of threads from.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
TOPOLOGY = Path("/sys/devices/system/cpu")
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

Result = TypeVar("Result")
_before: set[int] = set()  # the cores that were allowed before pinning


def allowed_cores() -> set[int]:
    """The logical cores that this process may run on, or might before it was pinned."""
    if _before:
        return set(_before)
    return (
        os.sched_getaffinity(0)
        if hasattr(os, "sched_getaffinity")
        else set(range(os.cpu_count() or 1))
    )


def usable_cores() -> int:
    """The number of logical cores that this process may run on."""
    return len(allowed_cores())


def wanted_cores(options: dict[str, Any], group: str = "runtime") -> set[int]:
    """The cores of the knob `cores` in the options of a group, or all allowed ones. Raises BadInput
    where it names none."""
    setting = options.get("cores")
    if setting is None:
        return allowed_cores()
    cores: set[int] = set()
    if re.fullmatch(CORES, str(setting)):
        for part in str(setting).split(","):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    if not cores:
        raise BadInput(f"{group}.cores={setting} must be numbers and ranges of cores, like 0-3,8")
    return cores


def validate_cores(options: dict[str, Any], group: str = "runtime") -> None:
    """Raise BadInput where this process may not run on one of the cores of a group's options, or
    where the system cannot pin processes."""
    setting = options.get("cores")
    if setting is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise BadInput(f"{group}.cores={setting}: this system cannot pin processes; leave it out")
    if missing := wanted_cores(options, group) - allowed_cores():
        raise BadInput(
            f"{group}.cores={setting}: this process may not run on {min(missing)}, "
            f"only on {','.join(map(str, sorted(allowed_cores())))}"
        )


def pin(options: dict[str, Any], group: str = "runtime") -> None:
    """Pin this process to the cores of a group's options, with all its present and future threads;
    null undoes an earlier pinning.

    Raises:
        BadInput: see `validate_cores`.
    """
    validate_cores(options, group)
    if options.get("cores") is None and not _before:
        return
    cores = wanted_cores(options, group)
    _before.update(allowed_cores())
    os.sched_setaffinity(0, cores)  # threads and processes started later inherit it
    seen: set[int] = set()
    while fresh := {thread.id for thread in psutil.Process().threads()} - seen:
        for thread in fresh:
            with suppress(ProcessLookupError):  # the thread has ended
                os.sched_setaffinity(thread, cores)
        seen |= fresh


@contextmanager
def unpinned() -> Iterator[None]:
    """While it is open, this thread and what it starts may use all cores that this process had
    before it was pinned."""
    if not _before:
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def physical_cores(cores: Iterable[int]) -> int:
    """The number of physical cores of these logical cores; at least 1."""
    cores = list(cores)
    try:
        return len(
            {(TOPOLOGY / f"cpu{core}/topology/thread_siblings_list").read_text() for core in cores}
        )
    except OSError:
        return max(1, min(psutil.cpu_count(logical=False) or 1, len(cores)))


def core_quota() -> float | None:
    """The cores that a container's limit gives its processes at a time (`docker run --cpus`, a
    limit of Kubernetes), from version 2 or 1 of Linux's control groups; None without a limit."""
    found = []
    try:
        entries = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return None
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = CGROUPS / ("cpu" if controllers else "") / path.strip("/")
        for folder in (group, *group.parents):  # a limit holds for all groups below
            if not folder.is_relative_to(CGROUPS):
                break
            found += _quota_of(folder, bool(controllers))
    return min(found, default=None)


def _quota_of(folder: Path, first_version: bool) -> list[float]:
    """The limit of one control group, if it has one."""
    try:
        if first_version:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = ((folder / name).read_text() for name in names)
        else:
            quota, period = (folder / "cpu.max").read_text().split()
        return [int(quota) / int(period)] if int(quota) > 0 else []
    except (OSError, ValueError, ZeroDivisionError):  # "max" is no number
        return []


def thread_count(runtime: dict[str, Any], ranks: int = 1) -> int:
    """The number of threads: `runtime.threads`, or $MINIVLLM_THREADS, or one for each physical core
    of `runtime.cores`, but no more than a container's limit lets run at a time: its processes are
    stopped together for the rest of a period when they have used it up. `ranks` processes of one
    engine share them.

    $OMP_NUM_THREADS is ignored, because joblib and Ray set it for their jobs, and the same cell
    would differ between launchers.
    """
    if count := runtime.get("threads") or usual_threads():
        return int(count)
    cores, quota = physical_cores(wanted_cores(runtime)), core_quota()
    if quota is not None:
        cores = min(cores, max(1, int(quota)))
    return max(1, cores // ranks)


def shares(cores: Iterable[int], parts: int) -> list[list[int]]:
    """The cores in equal shares, those of one physical core next to each other; every part has all
    of them where there are fewer cores than parts."""
    cores = sorted(cores, key=lambda core: (_first_sibling(core), core))
    if len(cores) < parts:
        return [cores] * parts
    bounds = [len(cores) * part // parts for part in range(parts + 1)]
    return [cores[start:end] for start, end in pairwise(bounds)]


def _first_sibling(core: int) -> int:
    """The first logical core of this one's physical core; the core itself where nothing tells."""
    try:
        text = (TOPOLOGY / f"cpu{core}/topology/thread_siblings_list").read_text()
        return int(re.split("[-,]", text.strip())[0])
    except (OSError, ValueError):
        return core


def crowded(runtime: dict[str, Any], processes: int = 1) -> list[str]:
    """Notes on a measurement with more threads, those of all its processes (ranks of replicas),
    than logical cores, than physical ones, or than a container's limit."""
    threads, wanted = processes * thread_count(runtime, processes), wanted_cores(runtime)
    cores, physical, quota = len(wanted), physical_cores(wanted), core_quota()
    notes = []
    if threads > cores:
        notes.append(
            f"{threads} threads share {cores} core{'s' * (cores > 1)}: they wait for one another's "
            "turns"
        )
    elif threads > physical:
        notes.append(
            f"{threads} threads run on {physical} physical core{'s' * (physical > 1)}: two threads "
            "of one core share its arithmetic"
        )
    if quota is not None and threads > max(1, quota):
        notes.append(
            f"{threads} threads run under a limit of {quota:.3g} cores (control group): they are "
            "stopped together when it is used up"
        )
    return notes


def usual_threads() -> int | None:
    """The number in $MINIVLLM_THREADS, or None. Raises BadInput where it is no number."""
    count = os.environ.get("MINIVLLM_THREADS")
    if not count:
        return None
    if not count.isdecimal() or not int(count):
        raise BadInput(
            f"MINIVLLM_THREADS={count!r} must be a number of at least 1; or set runtime.threads"
        )
    return int(count)


def with_stack(size: int, call: Callable[[], Result]) -> Result:
    """The result of a call in a thread with a stack of its own, for libraries that recurse.

    Args:
        size: bytes of the stack, of which a process has those that it touches.
        call: whatever it raises is raised here.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    usual = threading.stack_size(size)
    try:
        thread = threading.Thread(target=run)
        thread.start()
    finally:
        threading.stack_size(usual)
    try:
        return future.result()
    finally:
        thread.join()
