"""What processes may leave: descendants, ports, shared memory and folders."""

from __future__ import annotations

import contextlib
import ctypes
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import psutil

GONE_S = 10.0  # for the last process to be gone
FOLDERS = ("minivllm-ranks-", "minivllm-handover-", "ray-")
LISTEN = "0A"  # a state of the kernel's table of sockets
PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Be the parent of descendants whose parent has ended, so that `family` has those, too."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def family(word: str = "") -> list[psutil.Process]:
    """Living descendants of this process with a word in their command line, by age."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and word in " ".join(process.cmdline()):
                found.append(process)
    return sorted(found, key=lambda one: (one.create_time(), one.pid))


def ports_of(processes: Iterable[psutil.Process]) -> set[int]:
    """The ports that processes listen on, which are in the network of this one."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            links = process.net_connections("tcp")
            found |= {one.laddr.port for one in links if one.status == psutil.CONN_LISTEN}
    return found


def listening(pid: int | str = "thread-self") -> set[int]:
    """The ports that anybody listens on in the network of a process, by default this one's."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, address, _, state = line.split()[:4]
            if state == LISTEN:
                found.add(int(address.rpartition(":")[2], 16))
    return found


def until(condition: Callable[[], object], within_s: float, what: str) -> float:
    """Wait for a condition; the seconds that it took. Raises AssertionError."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + within_s, what
        time.sleep(0.005)
    return time.monotonic() - begin


def until_none(left: Callable[[], Collection[object]], what: str) -> float:
    """Wait GONE_S at most for nothing to be left; the seconds that it took. Raises
    AssertionError."""
    begin = time.monotonic()
    while found := left():
        assert time.monotonic() < begin + GONE_S, f"{what} are left: {found}"
        time.sleep(0.005)
    return time.monotonic() - begin


def assert_nothing_is_left(before: set[psutil.Process], ports: set[int]) -> float:
    """Wait for the processes to be gone, and look for what they leave; returns the seconds.

    Args:
        before: processes that were there before, and stay.
        ports: that those which are to be gone have listened on.
    """
    seconds = until_none(lambda: set(family()) - before, "processes")
    until_none(lambda: ports & listening(), "ports")
    names = [one.name for one in Path(tempfile.gettempdir()).iterdir()]
    left = [name for name in names if name.startswith(FOLDERS)]
    assert not left, f"folders are left: {left}"
    return seconds


def shared_memory() -> set[str]:
    """Names of shared memory that no living process has open."""
    held = set[str]()
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            held |= set(re.findall(r"/dev/shm/(\S+)", path.read_text()))
    names = {path.name for path in Path("/dev/shm").rglob("*")}
    return {name for name in names - held if not name.startswith("sem.loky")}  # of no server
