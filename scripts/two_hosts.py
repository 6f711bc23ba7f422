"""Two hosts on one machine: network and host-name namespaces of Linux, and a link that can be cut.

A host is held by a process that ends with this one, however that ends; the namespaces and the link
go with it. Needs the rights of root, and `ip`, `nsenter` and `unshare`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ADDRESSES = ("10.213.0.1", "10.213.0.2")
NAMES = ("first-host", "second-host")
LINK = "link0"
NOBODY = "02:00:00:00:00:ff"  # the address of no network card
KINDS = {"net": 0x40000000, "uts": 0x04000000}  # of namespaces, with their flags of setns(2)
HOLD = 'hostname "$0" && ip link set lo up && echo held && exec cat'
MOST_S = 20.0


class NotPermitted(Exception):
    """There can be no namespaces here; the message says why."""


class TwoHosts:
    """Two hosts, whose addresses are ADDRESSES.

    Raises:
        NotPermitted: see there.
    """

    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[str]] = []
        try:
            for name in NAMES:
                self._holders.append(_hold(name))
            second = self._holders[1].pid
            peer = ("peer", "name", LINK, "netns", str(second))
            self._run(0, "ip", "link", "add", LINK, "type", "veth", *peer)
            for number, address in enumerate(ADDRESSES):
                self._run(number, "ip", "address", "add", f"{address}/24", "dev", LINK)
                self._run(number, "ip", "link", "set", LINK, "up")
        except BaseException:
            self.close()
            raise

    def command(self, number: int, *words: str) -> list[str]:
        """A command that runs on a host."""
        at = (f"--{kind}=/proc/{self._holders[number].pid}/ns/{kind}" for kind in KINDS)
        return ["nsenter", *at, "--", *words]

    def pid(self, number: int) -> int:
        """The process that holds a host."""
        return self._holders[number].pid

    def _run(self, number: int, *words: str) -> None:
        command = self.command(number, *words)
        done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_S, check=False)
        if done.returncode:
            raise NotPermitted(f"{' '.join(words)}: {done.stderr.strip()}")

    @contextmanager
    def inside(self, number: int) -> Iterator[None]:
        """While it is open this thread, and what it starts, is on a host."""
        before = {kind: os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY) for kind in KINDS}
        try:
            for kind in KINDS:
                there = os.open(f"/proc/{self._holders[number].pid}/ns/{kind}", os.O_RDONLY)
                _enter(there, kind)
                os.close(there)
            yield
        finally:
            for kind, descriptor in before.items():
                _enter(descriptor, kind)
                os.close(descriptor)

    def cut(self) -> None:
        """Cut the link: from now on what one host sends reaches no other, and nobody is told."""
        for number, address in enumerate(ADDRESSES):
            wrong = ("lladdr", NOBODY, "dev", LINK, "nud", "permanent")
            self._run(1 - number, "ip", "neighbour", "replace", address, *wrong)

    def processes(self, number: int) -> list[int]:
        """The ids of the processes that are on a host, without the one that holds it."""
        holder = self._holders[number].pid
        there, found = os.stat(f"/proc/{holder}/ns/net").st_ino, []
        for path in Path("/proc").glob("[0-9]*/ns/net"):
            with suppress(OSError):
                if path.stat().st_ino == there:
                    found.append(int(path.parts[2]))
        return [pid for pid in found if pid not in (holder, os.getpid())]

    def close(self) -> None:
        """End what runs on the hosts, and take them away."""
        for number, holder in enumerate(self._holders):
            for pid in self.processes(number) if holder.poll() is None else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for holder in self._holders:
            holder.communicate()


def _hold(name: str) -> subprocess.Popen[str]:
    """A process that holds new namespaces. Raises NotPermitted."""
    words = ("unshare", *(f"--{kind}" for kind in KINDS), "sh", "-c", HOLD, name)
    pipe = subprocess.PIPE
    try:
        holder = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    except OSError as error:
        raise NotPermitted(str(error)) from None
    assert holder.stdout is not None
    if holder.stdout.readline() != "held\n":
        raise NotPermitted(holder.communicate()[1].strip())
    return holder


def _enter(descriptor: int, kind: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, KINDS[kind]):
        raise OSError(ctypes.get_errno(), f"setns of {kind}")
