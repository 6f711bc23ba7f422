"""Replicas as actors of a Ray cluster: the code of a replica's process, over a connection.

Ray places an actor, starts it and ends it. What a replica and this process send each other goes
over a socket between the two, as between two processes of one machine, and what the replica prints
comes over a second one.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from minivllm.errors import BadInput, Crashed
from minivllm.platform.plug_ins import locate
from minivllm.platform.processes.channel import Channel, prepare_tcp
from minivllm.platform.processes.children import STOP_S, CopiedOutput, module_path
from minivllm.platform.threads import THREAD_VARIABLES, thread_count
from minivllm.processes.placement import placements, reservation
from minivllm.processes.ray_cluster import RayCluster

TOKEN = 32  # bytes by which an actor shows that it is ours, before anything of it is unpickled
GREETING = 512  # bytes of what an actor says of itself
PURPOSES = ("calls", "output")  # of an actor's two connections
POLL_S = 0.5  # between two looks at an actor that has not connected yet
START_S = 120.0  # for Ray to start an actor on a cluster that has room for it
EXIT_REASON_S = 5.0  # for Ray to say how an actor has died
CLOCK = struct.Struct("<d")


class RayHost:
    """What runs in an actor's process."""

    def run(self, target: str, address: tuple[str, int], token: bytes) -> int:
        """Connect, and serve until the connection ends.

        Args:
            target: dotted name of the function that serves a channel and returns an exit code.
            address: where this actor is waited for.
            token: to be sent first.
        """
        calls, out = (_connect(address, token, purpose) for purpose in PURPOSES)
        with calls, out:
            while calls.recv(1) == b"?":
                calls.sendall(CLOCK.pack(time.monotonic()))
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(out.fileno(), stream.fileno())
            code = int(locate(target)(Channel(calls)))
            sys.stdout.flush()
            sys.stderr.flush()
            return code


def _connect(address: tuple[str, int], token: bytes, purpose: str) -> socket.socket:
    connection = socket.create_connection(address)
    prepare_tcp(connection)
    greeting = {"purpose": purpose, "host": socket.gethostname(), "pid": os.getpid()}
    connection.sendall(token + json.dumps(greeting).encode().ljust(GREETING))
    return connection


class RayActor:
    """A started actor.

    Attributes:
        connection: to its replica.
        host: of its process, if that is another machine; None: this one.
        pid: of its process.
        ahead_s: what its monotonic clock has to be added to be this machine's; found to within half
            a round trip.

    Args:
        ray: the module.
        handle: of the actor.
        end: Ray's reference to the result of its call.
        calls, output: its connections.
        greeting: what it reports of itself.
    """

    def __init__(
        self,
        ray: Any,
        handle: Any,
        end: Any,
        calls: socket.socket,
        output: socket.socket,
        greeting: Mapping[str, Any],
    ) -> None:
        self._ray, self._handle, self._end = ray, handle, end
        host, self.pid = str(greeting["host"]), int(greeting["pid"])
        self.host = None if host == socket.gethostname() else host
        self.ahead_s = 0.0 if self.host is None else _offset(calls)
        calls.sendall(b".")
        self.connection = calls
        self._output = CopiedOutput()
        self._pump = threading.Thread(
            target=self._copy, args=(output,), name=f"actor {self.pid}", daemon=True
        )
        self._pump.start()

    def _copy(self, output: socket.socket) -> None:
        with output, output.makefile("rb") as lines, suppress(OSError):
            self._output.copy(lines)

    def exit_reason(self) -> str:
        """How it ended, if it has, and the last lines that it printed."""
        try:
            state = f"ended with exit code {self._ray.get(self._end, timeout=EXIT_REASON_S)}"
        except self._ray.exceptions.GetTimeoutError:
            state = "is still running"
        except self._ray.exceptions.RayError as error:
            state = f"has died: {_reason(error)}"
        self._pump.join(1)
        where = "" if self.host is None else f" on {self.host}"
        return (
            f"{state} (Ray actor of process {self.pid}{where}); it printed last: "
            f"{self._output.last or 'nothing'}"
        )

    def kill(self) -> None:
        """End it at once, as long as it has not ended. Ray asks a process to end, which one that is
        stopped does not hear."""
        if self.host is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._ray.kill(self._handle)

    def stop(self) -> None:
        """End it: it ends by itself once its connection is closed, and otherwise it is killed."""
        if self._ray.wait([self._end], timeout=STOP_S)[0]:
            self._ray.kill(self._handle)
        else:
            self.kill()
        self._pump.join(1)


def _offset(calls: socket.socket) -> float:
    """What a monotonic clock at the other end has to be added; of the fastest of some questions."""
    found = []
    for _ in range(8):
        begin = time.monotonic()
        calls.sendall(b"?")
        (theirs,) = CLOCK.unpack(_exactly(calls, CLOCK.size))
        end = time.monotonic()
        found.append((end - begin, (begin + end) / 2 - theirs))
    return min(found)[1]


def _exactly(connection: socket.socket, size: int, most_s: float | None = None) -> bytes:
    """So many bytes, within `most_s` seconds. Raises OSError where they do not come, or the other
    end is gone."""
    data = b""
    deadline = None if most_s is None else time.monotonic() + most_s
    while len(data) < size:
        if deadline is not None:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        if not (part := connection.recv(size - len(data))):
            raise ConnectionError("the other end is gone")
        data += part
    return data


def _reason(error: Exception) -> str:
    """Why an actor has died, in a line."""
    words = " ".join(str(error).split())
    detail = words.partition("Worker exit detail: ")[2].partition(" Some common causes")[0]
    return detail or words[:400]


@dataclass
class _ExpectedActor:
    """An actor that the cluster is to start."""

    token: bytes
    handle: Any
    end: Any  # Ray's reference to the result of its call
    since_s: float = 0.0  # of the first look at it
    # its connections, and what it says of itself
    found: dict[str, tuple[socket.socket, dict[str, Any]]] = field(default_factory=dict)


class RayActors:
    """The actors of some replicas, which are started together.

    Args:
        target: see `RayHost.run`.
        parallel: knobs of the group.
        runtime: knobs of the group, for all replicas.
        gpus: gives the numbers of the GPUs that `runtime.device` names, where the cluster is
            this machine's.

    Attributes:
        places: the group `runtime` of each replica, in a list that may be extended.
        can_grow: whether the cluster may have room for further replicas: it was not started for
            these.

    Raises:
        NotInstalled: Ray is not installed.
        BadInput: there is no such cluster, or it has too few CPUs or GPUs.
    """

    def __init__(
        self,
        target: str,
        parallel: Mapping[str, Any],
        runtime: Mapping[str, Any],
        gpus: Callable[[], Sequence[int]],
    ) -> None:
        count, ranks = parallel["replicas"], parallel["tensor"]
        address = os.environ.get("RAY_ADDRESS")
        own = not address
        self.can_grow = not own
        self.places = (
            placements(runtime, count, gpus(), ranks) if own else [reservation(runtime)] * count
        )
        cpus = sum(ranks * thread_count(place, ranks) for place in self.places)
        on_gpus = str(self.places[0]["device"]).startswith("cuda")
        needed = {"CPU": float(cpus), "GPU": float(ranks * count * (on_gpus and not own))}
        self._cluster = RayCluster(address, needed)
        self._ray = ray = self._cluster.ray
        if not own and runtime["device"] == "auto" and ray.cluster_resources().get("GPU"):
            self._cluster.close()
            raise BadInput(
                "runtime.device=auto: the cluster of RAY_ADDRESS has GPUs; use "
                "runtime.device=cuda, or runtime.device=cpu"
            )
        self._target, self._ranks, self._num_gpus = target, ranks, needed["GPU"] / count
        self._expected: dict[int, _ExpectedActor] = {}  # by the number of a replica
        self._lock = threading.Lock()  # of all that polls change
        self._is_closed = False
        try:
            host = "127.0.0.1" if own else ray.util.get_node_ip_address()
            self._listener = socket.create_server((host, 0))
            self._listener.setblocking(False)
            for number in range(count):
                self.request(number)
        except BaseException:
            self.close()
            raise

    def request(self, number: int) -> None:
        """Ask the cluster for the actor of a replica, which `start` or `poll` gives."""
        ranks = self._ranks
        threads = thread_count(self.places[number], ranks)
        variables = dict.fromkeys(THREAD_VARIABLES, str(threads))
        handle = (
            self._ray.remote(RayHost)
            .options(
                num_cpus=ranks * threads,
                num_gpus=self._num_gpus,
                runtime_env={"env_vars": {"PYTHONPATH": module_path(), **variables}},
            )
            .remote()
        )
        token = secrets.token_bytes(TOKEN)
        end = handle.run.remote(self._target, self._listener.getsockname()[:2], token)
        if (before := self._expected.pop(number, None)) is not None:  # nobody waits for that one
            self._ray.kill(before.handle)
        self._expected[number] = _ExpectedActor(token, handle, end)

    def start(self, number: int) -> RayActor:
        """The actor of a replica, once it has connected; see `poll`."""
        while (actor := self.poll(number)) is None:
            poll = select.poll()
            with suppress(ValueError):  # it is closed, which the next look tells
                poll.register(self._listener, select.POLLIN)
            poll.poll(1e3 * POLL_S)
        return actor

    def poll(self, number: int) -> RayActor | None:
        """The actor of a replica, if it has connected. Others may be waited for at the same time,
        in other threads, too.

        Raises:
            Crashed: it has ended before that.
            BadInput: the cluster does not start it.
        """
        with self._lock:
            if self._is_closed or (expected := self._expected.get(number)) is None:
                raise Crashed("the cluster is not used any more")  # a call would start another
            self._accept()
            try:
                if len(expected.found) < len(PURPOSES):
                    self._require_hope(expected)
                    return None
            except BaseException:
                del self._expected[number]
                self._ray.kill(expected.handle)  # one that is started later would wait for ever
                raise
            del self._expected[number]
        (calls, greeting), (output, _) = (expected.found[purpose] for purpose in PURPOSES)
        return RayActor(self._ray, expected.handle, expected.end, calls, output, greeting)

    def _require_hope(self, expected: _ExpectedActor) -> None:
        if self._ray.wait([expected.end], timeout=0)[0]:
            self._raise_ended(expected.end)
        expected.since_s = expected.since_s or time.monotonic()
        if time.monotonic() > expected.since_s + START_S:
            raise BadInput(
                f"parallel.backend=ray: the cluster has not started a replica within "
                f"{START_S:.0f} s; of {self._cluster.has()} these are free: "
                f"{self._cluster.free()}"
            )

    def _raise_ended(self, end: Any) -> None:
        try:
            self._ray.get(end)
        except self._ray.exceptions.RayError as error:
            raise Crashed(f"a replica cannot start in its Ray actor: {_reason(error)}") from None
        raise Crashed("a replica has ended in its Ray actor before it connected")

    def _accept(self) -> None:
        """Take the connections of actors that have come, which have a token, and refuse a stranger:
        one, since each may take a while, and others wait."""
        with suppress(OSError):  # there is none
            while True:
                connection, _ = self._listener.accept()
                if not self._is_ours(connection):
                    connection.close()
                    return

    def _is_ours(self, connection: socket.socket) -> bool:
        """Whether a connection is that of an actor, which has it from now on."""
        try:
            data = _exactly(connection, TOKEN + GREETING, POLL_S)
        except OSError:
            return False
        for expected in [*self._expected.values()]:
            if hmac.compare_digest(data[:TOKEN], expected.token):
                connection.settimeout(None)
                prepare_tcp(connection)
                greeting = json.loads(data[TOKEN:])
                expected.found[greeting["purpose"]] = connection, greeting
                return True
        return False

    def close(self) -> None:
        """End the actors that nobody has taken, and the cluster, if it was started for them."""
        with self._lock:  # nobody uses it from then on
            self._is_closed = True
        if hasattr(self, "_listener"):
            self._listener.close()
        for expected in self._expected.values():
            self._ray.kill(expected.handle)
        self._expected.clear()
        self._cluster.close()
