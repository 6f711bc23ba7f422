"""The processes of an engine's replicas: they are started together, and one that has died again."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from minivllm.bench.hardware.gpu import replica_gpus
from minivllm.config.typed import Config
from minivllm.errors import BadInput
from minivllm.platform.threads import unpinned
from minivllm.processes.actors import POLL_S, RayActors
from minivllm.processes.placement import ALONE, placements
from minivllm.serving.processes.engine_link import EngineLink
from minivllm.serving.processes.messages import Ready
from minivllm.serving.processes.process_link import end_silent
from minivllm.serving.processes.restarts import DELAYS_S, Restarts
from minivllm.serving.processes.started import ActorEngine, LocalServerProcess, ServerProcess

MODULE = "minivllm.serving.processes.engine_process"


class Fleet:
    """Starts the processes of replicas.

    Args:
        config: the resolved configuration of the whole.
        sleep, now: of seconds; a monotonic clock.

    Attributes:
        num_restarts: replicas that were started again and serve.
    """

    def __init__(
        self,
        config: dict[str, Any],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_restarts = 0
        self._config, self._sleep = config, sleep
        self._restarts = Restarts(sleep, now)
        self._places: list[dict[str, Any]] = []  # by the number of a replica
        self._actors: RayActors | None = None

    async def start(self, links: Sequence[EngineLink]) -> list[Ready]:
        """Start all replicas and wait until they are built; what each says of itself.

        Raises:
            BadInput: an engine cannot be built with this configuration.
            Crashed: a process failed; the message says which.
        """
        if len(links) == 1:
            return [await self._first(links[0], LocalServerProcess(MODULE), self._config)]
        parallel, runtime = self._config["parallel"], self._config["runtime"]
        if Config.of(self._config).parallel.backend == "ray":
            gpus = partial(replica_gpus, self._config)
            self._actors = RayActors(f"{MODULE}.serve", parallel, runtime, gpus)
            self._places = self._actors.places
        else:
            numbers = replica_gpus(self._config)
            self._places = placements(runtime, len(links), numbers, parallel["tensor"])
        starts = []
        for link in links:
            started = await self._started(link.number)
            starts.append(asyncio.ensure_future(self._first(link, started, self._config_of(link))))
        return await asyncio.gather(*starts)

    async def _first(
        self, link: EngineLink, started: ServerProcess, config: dict[str, Any]
    ) -> Ready:
        """The start of a replica that has not been started before; see `start`."""
        await link.start_first(self._named(link), started, config)
        assert link.ready is not None
        return link.ready

    def _named(self, link: EngineLink) -> str:
        several = self._config["parallel"]["replicas"] > 1
        return f"replica {link.number} of {len(self._places)}" if several else "the engine"

    async def _started(self, number: int) -> ServerProcess:
        """The process of a replica that has not been started before."""
        if self._actors is None:
            with unpinned():
                return LocalServerProcess(MODULE)
        return ActorEngine(await asyncio.to_thread(self._actors.start, number))

    def _config_of(self, link: EngineLink) -> dict[str, Any]:
        alone = {**self._config["parallel"], **ALONE}
        return {**self._config, "runtime": self._places[link.number], "parallel": alone}

    async def watch(self, links: Sequence[EngineLink]) -> None:
        """End replicas that are silent for too long, until this is cancelled."""
        await end_silent(links, self._sleep)

    async def revive(self, link: EngineLink, left: int) -> bool:
        """Say that a replica has stopped, start it again, and wait until it serves. Each try comes
        later than the one before.

        Args:
            left: replicas that serve.

        Returns:
            False where it has died too often, or cannot be started.
        """
        which = self._named(link)
        words = await link.last_words()
        print(f"warning: {which} has stopped ({words}); {left} left", file=sys.stderr)
        self._restarts.note_death(link.number)
        serves = await self._try(link, DELAYS_S)
        self.num_restarts += serves
        if serves:
            print(f"{which} serves again", file=sys.stderr)
        return serves

    async def add(self, link: EngineLink) -> bool:
        """Start a replica that is new, or was taken away or given up; see `revive`."""
        self._restarts.forget(link.number)
        serves = await self._try(link, (0.0, *DELAYS_S[1:]))
        if serves:
            print(f"{self._named(link)} serves", file=sys.stderr)
        return serves

    async def _try(self, link: EngineLink, delays_s: Sequence[float]) -> bool:
        """Start a replica until it serves, as long as it is wanted."""

        async def start() -> None:
            await link.restart(await self._again(link.number), self._config_of(link))

        return await self._restarts.until_it_serves(
            link.number, self._named(link), start, delays_s, lambda: link.is_wanted
        )

    async def _again(self, number: int) -> ServerProcess:
        if self._actors is None:
            return await self._started(number)
        self._actors.request(number)
        # In no thread: many may wait for room on the cluster.
        while (actor := await asyncio.to_thread(self._actors.poll, number)) is None:
            await self._sleep(POLL_S)
        return ActorEngine(actor)

    def require_room(self, count: int) -> None:
        """Find places for so many replicas. On CPUs those beyond `parallel.replicas` share the
        cores of others.

        Raises:
            BadInput: there is no room for them, or only one was started.
        """
        at_first = self._config["parallel"]["replicas"]
        if at_first == 1:
            raise BadInput(
                "one engine has all of this server's cores or GPUs, and no router: start it with "
                "parallel.replicas=2 or more"
            )
        if count <= len(self._places):
            return
        if self._actors is not None:
            if not self._actors.can_grow:
                raise BadInput(
                    f"the cluster that was started for this server has room for {at_first} "
                    "replicas: start one with `ray start --head`, and name it in RAY_ADDRESS"
                )
            self._places += [self._places[0]] * (count - len(self._places))
            return
        gpus = replica_gpus(self._config)
        if gpus:
            runtime, ranks = self._config["runtime"], self._config["parallel"]["tensor"]
            self._places = placements(runtime, count, gpus, ranks)
        else:
            self._places += [self._places[n % at_first] for n in range(len(self._places), count)]

    def close(self) -> None:
        """End what the processes were started in, when all of them are stopped."""
        if self._actors is not None:
            self._actors.close()
