"""The processes of an engine's replicas are started together. One that has died is started again:
each try comes later than the one before, and there are few."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from minivllm.bench.hardware.gpu import replica_gpus
from minivllm.errors import BadInput, first_line
from minivllm.platform.threads import unpinned
from minivllm.processes.actors import POLL_S
from minivllm.processes.group import EngineGroup
from minivllm.processes.link import EngineLink
from minivllm.processes.messages import Ready
from minivllm.processes.started import ConnectedProcess, LocalProcess

DELAYS_S = (0.5, 2.0, 8.0, 30.0, 60.0)  # before each start of one that has died again
STEADY_S = 300.0  # of service, after which deaths are counted from 0
MODULE = "minivllm.serving.processes.engine_process"


class Restarts:
    """Starts processes again, and counts by their numbers how often.

    Args:
        sleep, now: of seconds; a monotonic clock.
    """

    def __init__(
        self,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sleep, self._now = sleep, now
        self._attempts: Counter[int] = Counter()
        self._served_since: dict[int, float] = {}

    def forget(self, number: int) -> None:
        """Count the deaths of one from 0."""
        self._attempts[number] = 0

    def note_death(self, number: int) -> None:
        """Note that one has died, which may have served for long."""
        now = self._now()
        if now - self._served_since.get(number, now) > STEADY_S:
            self.forget(number)

    async def until_it_serves(
        self,
        number: int,
        name: str,
        start: Callable[[], Awaitable[None]],
        delays_s: Sequence[float] = DELAYS_S,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Try to start a process until it serves, as long as it is wanted.

        Args:
            name: for warnings.
            start: starts it, and waits until it serves; raises BadInput, RuntimeError or OSError.
            delays_s: before each try, those of earlier deaths counted.

        Returns:
            False where it is not wanted, has died too often, or cannot be started.
        """
        while (attempt := self._attempts[number]) < len(delays_s):
            self._attempts[number] += 1
            await self._sleep(delays_s[attempt])
            if not is_wanted():
                return False
            try:
                await start()
            except (BadInput, RuntimeError, OSError) as error:
                why = first_line(error)
                print(f"warning: {name} does not start: {why}", file=sys.stderr)
                continue
            self._served_since[number] = self._now()
            return True
        print(f"warning: {name} is not started again: it stops each time", file=sys.stderr)
        return False


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
        self._open: EngineGroup | None = None  # from `start` on

    async def start(self, links: Sequence[EngineLink]) -> list[Ready]:
        """Start all replicas and wait until they are built; what each says of itself.

        Raises:
            BadInput: an engine cannot be built with this configuration.
            Crashed: a process failed; the message says which.
        """
        gpus = partial(replica_gpus, self._config)
        self._open = EngineGroup(self._config, MODULE, gpus, lambda _: LocalProcess(MODULE))
        starts = []
        for link in links:
            started = await self._started(link.number)
            config = self._group.config_of(link.number)
            starts.append(asyncio.ensure_future(self._first(link, started, config)))
        return await asyncio.gather(*starts)

    @property
    def _group(self) -> EngineGroup:
        assert self._open is not None, "nothing is started yet"
        return self._open

    async def _first(
        self, link: EngineLink, started: ConnectedProcess, config: Mapping[str, Any]
    ) -> Ready:
        """The start of a replica that has not been started before; see `start`."""
        await link.start_first(self._name_of(link), started, config)
        assert link.ready is not None
        return link.ready

    def _name_of(self, link: EngineLink) -> str:
        several = self._config["parallel"]["replicas"] > 1
        return f"replica {link.number} of {len(self._group.places)}" if several else "the engine"

    async def _started(self, number: int) -> ConnectedProcess:
        """The process of a replica that has not been started before."""
        if self._group.name == "ray":
            return await asyncio.to_thread(self._group.start, number)
        with unpinned():
            return self._group.start(number)

    async def revive(self, link: EngineLink, left: int) -> bool:
        """Say that a replica has stopped, start it again, and wait until it serves. Each try comes
        later than the one before.

        Args:
            left: replicas that serve.

        Returns:
            False where it has died too often, or cannot be started.
        """
        which = self._name_of(link)
        reason = await link.exit_reason()
        print(f"warning: {which} has stopped ({reason}); {left} left", file=sys.stderr)
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
            print(f"{self._name_of(link)} serves", file=sys.stderr)
        return serves

    async def _try(self, link: EngineLink, delays_s: Sequence[float]) -> bool:
        """Start a replica until it serves, as long as it is wanted."""

        async def start() -> None:
            started = await self._again(link.number)
            await link.restart(started, self._group.config_of(link.number))

        return await self._restarts.until_it_serves(
            link.number, self._name_of(link), start, delays_s, lambda: link.is_wanted
        )

    async def _again(self, number: int) -> ConnectedProcess:
        if self._group.name != "ray":
            return await self._started(number)
        self._group.request(number)
        # In no thread: many may wait for room on the cluster.
        while (actor := await asyncio.to_thread(self._group.poll, number)) is None:
            await self._sleep(POLL_S)
        return actor

    def require_room(self, count: int) -> None:
        self._group.require_room(count)

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
