"""Replicas that come and go while the server serves: started, drained, and started again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from minivllm.processes.handover import Routing
from minivllm.processes.link import EngineLink
from minivllm.serving.processes.fleet import Fleet
from minivllm.serving.processes.replicas import Replicas

EVENTS = ("lost", "added", "removed")  # counted, of replicas; lost: died or fell silent
POLL_S = 0.05  # between two looks whether a replica has answered all


class Resizing:
    """Takes care of replicas, each by itself.

    Args:
        replicas: the replicas.
        fleet: starts their processes.
        routing: gives them requests.
        release: has others take all that a replica has.
        is_idle: whether a replica has answered all that it had.

    Attributes:
        events: how often something happened to a replica.
        tasks: of replicas that are started or drained.
    """

    def __init__(
        self,
        replicas: Replicas,
        fleet: Fleet,
        routing: Routing,
        release: Callable[[EngineLink], None],
        is_idle: Callable[[EngineLink], bool],
    ) -> None:
        self.events = dict.fromkeys(EVENTS, 0)
        self.tasks: set[asyncio.Task[None]] = set()
        self._replicas, self._fleet, self._routing = replicas, fleet, routing
        self._release, self._is_idle = release, is_idle

    def settle(self, drain_s: float) -> None:
        """Begin to start and to drain the replicas of which nobody takes care yet.

        Args:
            drain_s: after which others take what a drained one still has.
        """
        for link in self._replicas.links:
            if link.is_alive:
                (self._routing.join if link.is_wanted else self._routing.leave)(link.number)
            if link in self._replicas.tended or link.is_alive == link.is_wanted:
                continue
            self._tend(link, self._add(link) if link.is_wanted else self._drain(link, drain_s))

    def revive(self, link: EngineLink) -> None:
        """Begin to start a replica again that has stopped."""
        self._tend(link, self._revive(link, len(self._replicas.serving)))

    def _tend(self, link: EngineLink, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        self._replicas.tended.add(link)

        def done(task: asyncio.Task[None]) -> None:
            self.tasks.discard(task)
            self._replicas.tended.discard(link)

        task.add_done_callback(done)

    async def _revive(self, link: EngineLink, left: int) -> None:
        if await self._fleet.revive(link, left):
            await self._begin(link)

    async def _add(self, link: EngineLink) -> None:
        """Start a replica that is new, or was taken away or given up."""
        if await self._fleet.add(link):
            self.events["added"] += 1
            await self._begin(link)

    async def _begin(self, link: EngineLink) -> None:
        """Give a replica requests that is built."""
        if not link.is_wanted:  # it was taken away in the meantime
            await link.stop()
            if link.is_wanted:  # and is wanted again
                await self._add(link)
        elif link.is_alive:
            self._routing.join(link.number)

    async def _drain(self, link: EngineLink, drain_s: float) -> None:
        """End a replica when it has answered what it has, unless it is wanted again by then."""
        deadline = time.monotonic() + drain_s
        while link.is_alive and not self._is_idle(link) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            if link.is_wanted:
                return
        link.cut()  # what it still sends would come beside what others send
        self._release(link)
        await link.stop()
        self.events["removed"] += 1
        if link.is_wanted:
            await self._add(link)
