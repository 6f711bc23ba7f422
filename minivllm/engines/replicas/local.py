"""A replica in a process of this machine, whose output goes into this process's log."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from minivllm.bench.hardware.gpu import replica_gpus
from minivllm.engines.peer_process import Child
from minivllm.platform.threads import THREAD_VARIABLES, thread_count
from minivllm.processes.group import EngineGroup
from minivllm.processes.started import STOP_S

MODULE = "minivllm.engines.replicas.replica"


class LocalReplica:
    """See ConnectedProcess.

    Args:
        config: of the replica.
    """

    host: str | None = None
    ahead_s = 0.0

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.connection, theirs = socket.socketpair()
        threads = str(thread_count(config["runtime"], config["parallel"]["tensor"]))
        with theirs:
            self._child = Child(
                [sys.executable, "-m", MODULE, str(theirs.fileno())],
                {**os.environ, **dict.fromkeys(THREAD_VARIABLES, threads)},
                pass_fds=[theirs.fileno()],
            )
        self.pid = self._child.process.pid

    def last_words(self) -> str:
        return self._child.last_words()

    def kill(self) -> None:
        self._child.process.kill()

    def stop(self) -> None:
        self._child.stop(STOP_S)


def make_group(config: Mapping[str, Any]) -> EngineGroup:
    """What starts the replicas of a resolved configuration; see EngineGroup."""
    return EngineGroup(config, MODULE, partial(replica_gpus, dict(config)), LocalReplica)
