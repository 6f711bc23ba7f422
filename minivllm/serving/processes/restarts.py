"""Processes of the server that have died are started again: each try comes later than the one
before, and there are few."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from minivllm.errors import BadInput, first_line

DELAYS_S = (0.5, 2.0, 8.0, 30.0, 60.0)  # before each start of one that has died again
STEADY_S = 300.0  # of service, after which deaths are counted from 0


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
        named: str,
        start: Callable[[], Awaitable[None]],
        delays_s: Sequence[float] = DELAYS_S,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Try to start a process until it serves, as long as it is wanted.

        Args:
            named: for warnings.
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
                print(f"warning: {named} does not start: {why}", file=sys.stderr)
                continue
            self._served_since[number] = self._now()
            return True
        print(f"warning: {named} is not started again: it stops each time", file=sys.stderr)
        return False
