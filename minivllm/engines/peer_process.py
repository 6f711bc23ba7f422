"""A process that a peer engine needs beside it: its words go to the log, and it never outlives the
worker."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol
from urllib.parse import urlsplit

import psutil

from minivllm.errors import BadInput
from minivllm.platform.processes.children import ChildProcess

# Runs a command so that the kernel ends it with the process that started it: PR_SET_PDEATHSIG,
# SIGTERM.
LEASH = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Polled(Protocol):
    """A process whose end can be polled."""

    def poll(self) -> int | None:
        """None while it runs."""


class StartedProcess(Protocol):
    """A server's process, whoever runs it."""

    @property
    def process(self) -> Polled:
        """The process itself."""

    def exit_reason(self) -> str:
        """How it ended, if it has, and the last lines that it printed."""

    def stop(self, grace_s: float) -> None:
        """Be done with it."""


def listeners(url: str) -> tuple[int, ...] | None:
    """Ids of the processes on this machine that listen at an address.

    Returns:
        None where the address is another machine's; empty where its processes cannot be found, as
        those of a container or of another user.
    """
    parts = urlsplit(url)
    port = parts.port or {"https": 443}.get(parts.scheme, 80)
    own = {one.address for each in psutil.net_if_addrs().values() for one in each}
    try:
        infos = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    if not any(str(info[4][0]) in own for info in infos):
        return None
    with suppress(psutil.Error, OSError):
        open_here = [one for one in psutil.net_connections("tcp") if one.laddr.port == port]
        listening = [one.pid for one in open_here if one.status == psutil.CONN_LISTEN]
        return tuple(sorted({pid for pid in listening if pid is not None}))
    return ()


def peer_environment(further: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Variables of a peer's process: this one's without PYTHONPATH, which leads to this project's
    packages, which the peer's must not meet; and further ones."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {str(name): str(value) for name, value in (further or {}).items()}


class Child(ChildProcess):
    """A process that a peer engine needs. It stays in this process's group, so that a signal to the
    group ends it as well.

    Args:
        command: program and arguments.
        environment: of the process; None for this one's.
        pass_fds: descriptors that it inherits.
        knob: names the command in messages.
        listen: gets each line that it prints, in a thread of its own.

    Raises:
        BadInput: there is no such program.
    """

    killed_s = None  # the next measurement needs the memory and the device that it holds

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        knob: str = "engine.command",
        listen: Callable[[str], None] | None = None,
    ) -> None:
        program = os.path.expanduser(command[0])
        if shutil.which(program) is None:
            raise BadInput(f"{knob}: there is no program {command[0]}; give its path")
        leash = (sys.executable, "-I", "-S", "-c", LEASH, str(os.getpid()))
        super().__init__(
            (*leash, program, *command[1:]),
            listen=listen,
            stdin=subprocess.PIPE,
            pass_fds=pass_fds,
            env=environment,
        )

    def say(self, line: bytes) -> None:
        """Write to its standard input. That it has ended shows elsewhere."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(line)
            self.process.stdin.flush()


def merged(made: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments that are made of knobs, with those of the user's own, which win; "_" in a name is
    "-", as servers write it."""
    own = {str(name).lstrip("-").replace("_", "-"): value for name, value in (given or {}).items()}
    return {**made, **own}


def words(arguments: Mapping[str, Any], negated: bool) -> list[str]:
    """The words of a command line.

    Args:
        arguments: by name, without dashes in front. True is the name alone; False is `--no-NAME`,
            or nothing; None is nothing; a list is the name with several words; a dictionary is
            JSON; anything else is one word.
        negated: whether the program knows `--no-NAME`.
    """
    line: list[str] = []
    for name, value in arguments.items():
        if value is None or (value is False and not negated):
            continue
        if isinstance(value, bool):
            line.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list | tuple):
            line += [f"--{name}", *map(str, value)]
        elif isinstance(value, Mapping):
            line += [f"--{name}", json.dumps(dict(value))]
        else:
            line += [f"--{name}", str(value)]
    return line
