"""What has died is started again, not at once and not for ever."""

from __future__ import annotations

import asyncio

import pytest

from minivllm.errors import Crashed
from minivllm.serving.processes.restarts import DELAYS_S, STEADY_S, Restarts


class Clock:
    """Time that passes where somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


def test_each_try_comes_later_until_it_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    restarts = Restarts(clock.sleep, lambda: clock.now_s)

    async def fail() -> None:
        raise Crashed("no room\nand more")

    assert not asyncio.run(restarts.until_it_serves(1, "it", fail))
    assert clock.slept == [*DELAYS_S]
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "warning: it does not start: no room"
    assert told[-1] == "warning: it is not started again: it stops each time"
    assert not asyncio.run(restarts.until_it_serves(1, "it", fail))
    assert clock.slept == [*DELAYS_S]  # not even once


def test_deaths_are_counted_from_0_after_long_service() -> None:
    clock, starts = Clock(), 0
    restarts = Restarts(clock.sleep, lambda: clock.now_s)

    async def start() -> None:
        nonlocal starts
        starts += 1

    async def run() -> None:
        for served_s in (1.0, STEADY_S + 1, 1.0):
            assert await restarts.until_it_serves(0, "it", start)
            clock.now_s += served_s
            restarts.note_death(0)

    asyncio.run(run())
    assert starts == 3 and clock.slept == [DELAYS_S[0], DELAYS_S[1], DELAYS_S[0]]


def test_one_that_is_no_longer_wanted_is_left() -> None:
    clock = Clock()

    async def start() -> None:
        raise AssertionError

    restarts = Restarts(clock.sleep, lambda: clock.now_s)
    assert not asyncio.run(restarts.until_it_serves(0, "it", start, DELAYS_S, lambda: False))
