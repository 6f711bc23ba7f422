"""The processes of an engine's replicas: where each runs, and what starts it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minivllm.config.groups import Config
from minivllm.errors import BadInput
from minivllm.processes.actors import RayActors
from minivllm.processes.placement import ALONE, placements
from minivllm.processes.started import ConnectedProcess


class EngineGroup:
    """Starts the replicas of one engine as `parallel.backend` says: here, or as actors of Ray.

    Args:
        config: the resolved configuration of the whole.
        module: the program of a replica, whose function `serve` serves a channel.
        gpus: gives the numbers of the GPUs that `runtime.device` names; none: CPUs compute.
        start_here: starts a replica on this machine, of its configuration.

    Attributes:
        name: of the backend, as the knob has it.
        places: the group `runtime` of each replica.

    Raises:
        NotInstalled: Ray is not installed.
        BadInput: there is no such cluster, or no room for so many replicas.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        module: str,
        gpus: Callable[[], Sequence[int]],
        start_here: Callable[[Mapping[str, Any]], ConnectedProcess],
    ) -> None:
        parallel = Config.of(config).parallel
        self._config, self._at_first = config, parallel.replicas
        self._gpus, self._start_here = gpus, start_here
        self._actors: RayActors | None = None
        self.name, runtime = parallel.backend, config["runtime"]
        if self._at_first == 1:
            self.places: list[dict[str, Any]] = [runtime]
        elif self.name == "ray":
            target = f"{module}.serve"
            self._actors = RayActors(target, config["parallel"], runtime, gpus)
            self.places = self._actors.places
        else:
            self.places = placements(runtime, self._at_first, gpus(), parallel.tensor)

    def config_of(self, number: int) -> Mapping[str, Any]:
        """The configuration of a replica."""
        if self._at_first == 1:
            return self._config
        alone = {**self._config["parallel"], **ALONE}
        return {**self._config, "runtime": self.places[number], "parallel": alone}

    def start(self, number: int) -> ConnectedProcess:
        """Start a replica for the first time; an actor has connected then.

        Raises:
            Crashed: it has ended before that.
            BadInput: the cluster does not start it.
        """
        if self._actors is not None:
            return self._actors.start(number)
        return self._start_here(self.config_of(number))

    def request(self, number: int) -> None:
        """Ask for a further process of a replica, which `poll` gives."""
        if self._actors is not None:
            self._actors.request(number)

    def poll(self, number: int) -> ConnectedProcess | None:
        """The process that was requested, if it is there; see `start`."""
        return self.start(number) if self._actors is None else self._actors.poll(number)

    def require_room(self, count: int) -> None:
        """Find places for so many replicas. On CPUs those beyond `parallel.replicas` share the
        cores of others.

        Raises:
            BadInput: there is no room for them, or only one was started.
        """
        if self._at_first == 1:
            raise BadInput(
                "one engine has all of this server's cores or GPUs, and no router: start it with "
                "parallel.replicas=2 or more"
            )
        if count <= (known := len(self.places)):
            return
        if self._actors is not None:
            if not self._actors.can_grow:
                raise BadInput(
                    f"the cluster that was started for this server has room for {self._at_first} "
                    "replicas: start one with `ray start --head`, and name it in RAY_ADDRESS"
                )
            self.places += [self.places[0]] * (count - known)
        elif gpus := self._gpus():
            ranks = self._config["parallel"]["tensor"]
            self.places = placements(self._config["runtime"], count, gpus, ranks)
        else:
            self.places += [self.places[n % self._at_first] for n in range(known, count)]

    def close(self) -> None:
        """End what the processes were started in, when all of them are stopped."""
        if self._actors is not None:
            self._actors.close()
