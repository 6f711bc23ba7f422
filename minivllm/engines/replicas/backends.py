"""What starts replicas: processes of this machine, or actors of a Ray cluster."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from minivllm.bench.hardware.gpu import replica_gpus
from minivllm.config.typed import Config
from minivllm.engines.peer_process import Child
from minivllm.platform.processes.channel import Channel
from minivllm.platform.threads import THREAD_VARIABLES, thread_count
from minivllm.processes.actors import RayActor, RayActors
from minivllm.processes.placement import placements

MODULE = "minivllm.engines.replicas.replica"
STOP_S = 5.0  # for a replica to end by itself

Places = Sequence[Mapping[str, Any]]


class Replica(Protocol):
    """A started replica, wherever it runs.

    Attributes:
        channel: to it.
        host: the machine that it runs on; None: this one.
        pid: of its process.
        ahead_s: what its monotonic clock has to be added to be this machine's.
    """

    channel: Channel
    host: str | None
    pid: int
    ahead_s: float

    def last_words(self) -> str:
        """How it ended, if it has, and what it printed last."""

    def stop(self) -> None:
        """Be done with it."""


class Backend(Protocol):
    """Starts the replicas of one engine.

    Attributes:
        name: as the knob has it.
        places: the group `runtime` of each.
    """

    name: str
    places: Places

    def start(self, config: Mapping[str, Any]) -> Replica:
        """Start the next replica.

        Args:
            config: of that replica.
        """

    def close(self) -> None:
        """Be done with it, when all replicas are stopped."""


class LocalReplica:
    """A replica in a process of this machine, whose output goes into this process's log.

    Args:
        config: of the replica.
    """

    host: str | None = None
    ahead_s = 0.0

    def __init__(self, config: Mapping[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        threads = str(thread_count(config["runtime"], config["parallel"]["tensor"]))
        with theirs:
            self._child = Child(
                [sys.executable, "-m", MODULE, str(theirs.fileno())],
                {**os.environ, **dict.fromkeys(THREAD_VARIABLES, threads)},
                pass_fds=[theirs.fileno()],
            )
        self.channel, self.pid = Channel(ours), self._child.process.pid

    def last_words(self) -> str:
        return self._child.last_words()

    def stop(self) -> None:
        self.channel.close()
        self._child.stop(STOP_S)


class Processes:
    """Replicas in processes of this machine.

    Args:
        config: the resolved configuration of the whole.
    """

    name = "processes"

    def __init__(self, config: dict[str, Any]) -> None:
        parallel = Config.of(config).parallel
        runtime, count = config["runtime"], parallel.replicas
        gpus, ranks = replica_gpus(config), parallel.tensor
        self.places: Places = placements(runtime, count, gpus, ranks)

    def start(self, config: Mapping[str, Any]) -> LocalReplica:
        return LocalReplica(config)

    def close(self) -> None:
        pass


class RayReplica:
    """A replica in an actor.

    Args:
        actor: that is started.
    """

    def __init__(self, actor: RayActor) -> None:
        self._actor = actor
        self.channel = Channel(actor.connection)
        self.host = actor.host if actor.is_elsewhere else None
        self.pid, self.ahead_s = actor.pid, actor.ahead_s

    def last_words(self) -> str:
        return self._actor.last_words()

    def stop(self) -> None:
        self.channel.close()
        self._actor.stop(STOP_S)


class Actors:
    """Replicas in actors of a Ray cluster.

    Args:
        config: the resolved configuration of the whole.

    Raises:
        BadInput: see RayActors.
    """

    name = "ray"

    def __init__(self, config: dict[str, Any]) -> None:
        self._actors = RayActors(
            f"{MODULE}.serve", config["parallel"], config["runtime"], partial(replica_gpus, config)
        )
        self.places: Places = self._actors.places
        self._started = 0

    def start(self, config: Mapping[str, Any]) -> RayReplica:
        self._started += 1
        return RayReplica(self._actors.start(self._started - 1))

    def close(self) -> None:
        self._actors.close()


def make_backend(config: dict[str, Any]) -> Backend:
    """What `parallel.backend` names.

    Args:
        config: the resolved configuration of the whole.

    Raises:
        BadInput: it cannot start these replicas here.
    """
    return Actors(config) if Config.of(config).parallel.backend == "ray" else Processes(config)
