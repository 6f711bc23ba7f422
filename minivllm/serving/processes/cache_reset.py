"""Emptying the prefix caches of all replicas, for which each of them answers."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from minivllm.serving.processes.engine_link import EngineLink
from minivllm.serving.processes.messages import ResetPrefixCache


class CacheReset:
    """Asks replicas to empty their prefix caches, and waits for all of them. Those who ask while
    answers are awaited share the result."""

    def __init__(self) -> None:
        self._result: asyncio.Future[bool] | None = None
        self._awaited: set[EngineLink] = set()  # who has not answered yet
        self._all_done = True

    async def run(self, links: Collection[EngineLink]) -> bool:
        """Whether all of these have emptied theirs; one with running requests has not.

        Args:
            links: the replicas that live, at least one.
        """
        if self._result is None or self._result.done():
            self._result = asyncio.get_running_loop().create_future()
            self._all_done, self._awaited = True, set(links)
            for link in links:
                link.send(ResetPrefixCache())
        return await asyncio.shield(self._result)

    def note(self, link: EngineLink, done: bool) -> None:
        """Note what a replica has answered; of one that is gone nobody knows."""
        if link not in self._awaited:
            return
        self._awaited.discard(link)
        self._all_done &= done
        if not self._awaited and self._result is not None and not self._result.done():
            self._result.set_result(self._all_done)
