"""The part of Ray that `minivllm.processes.actors` calls; an actor is a process of this machine."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from minivllm.platform.processes.channel import Channel

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import pickle, sys
sys.path.insert(0, {root!r})
sys.modules["torch"] = None
from minivllm.processes.actors import RayHost
sys.exit(RayHost().run(*pickle.loads({arguments!r})))
"""


def echo(channel: Channel) -> int:
    """What an actor of the tests serves: it prints what it is sent, and sends it back."""
    while not channel.closed:
        for message in channel.receive(None):
            print(message, flush=True)
            channel.send(message)
    return 3


class RayError(Exception):
    """An actor has failed."""


class GetTimeoutError(RayError):
    """There is no result yet."""


class Handle:
    """An actor with one method."""

    def __init__(self) -> None:
        self.run = SimpleNamespace(remote=self._run)
        self.process: subprocess.Popen[bytes] | None = None

    def _run(self, *arguments: Any) -> Handle:
        """Start it; the reference to the result is the handle itself."""
        code = RUN.format(root=str(ROOT), arguments=pickle.dumps(arguments))
        self.process = subprocess.Popen([sys.executable, "-c", code])
        return self


class PretendedRay:
    """The module `ray`.

    Attributes:
        inits: the arguments of each call of `init`.
        reserved: what each actor has asked for.
    """

    def __init__(self, cpus: float = 8.0, gpus: float = 0.0) -> None:
        self.exceptions = SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError)
        self.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
        self.inits: list[dict[str, Any]] = []
        self.reserved: list[dict[str, Any]] = []
        self.refuses = False  # to connect
        self.starts = True  # what it is asked for
        self._up, self._resources = False, {"CPU": cpus, "GPU": gpus}

    def is_initialized(self) -> bool:
        return self._up

    def init(self, **options: Any) -> None:
        if self.refuses:
            raise ConnectionError("nobody listens")
        self.inits.append(options)
        self._up = True

    def shutdown(self) -> None:
        self._up = False

    def cluster_resources(self) -> dict[str, float]:
        return self._resources

    available_resources = cluster_resources

    def remote(self, kind: type) -> Any:
        def options(**reserved: Any) -> Any:
            self.reserved.append(reserved)
            return SimpleNamespace(remote=self._handle)

        return SimpleNamespace(options=options)

    def _handle(self) -> Handle:
        handle = Handle()
        if not self.starts:
            handle.run = SimpleNamespace(remote=lambda *arguments: handle)
        return handle

    def wait(self, ends: list[Handle], timeout: float) -> tuple[list[Handle], list[Handle]]:
        (process,) = [end.process for end in ends]
        try:
            over = process is not None and process.wait(timeout or 0.001) is not None
        except subprocess.TimeoutExpired:
            over = False
        return (ends, []) if over else ([], ends)

    def get(self, end: Handle, timeout: float | None = None) -> int:
        if not self.wait([end], timeout or 60.0)[0]:
            raise GetTimeoutError
        assert end.process is not None
        if end.process.returncode < 0:
            raise RayError("It\ndied. Worker exit detail: it was killed. Some common causes are")
        return end.process.returncode

    def kill(self, handle: Handle) -> None:
        if handle.process is not None:
            handle.process.kill()
            handle.process.wait()
