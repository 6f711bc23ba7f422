"""A replica that has died is started again: later each time, and not for ever."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from minivllm.errors import BadInput, Crashed
from minivllm.processes.actors import POLL_S
from minivllm.processes.group import EngineGroup
from minivllm.processes.link import EngineLink, ProcessLink
from minivllm.serving.processes.fleet import DELAYS_S, STEADY_S, Fleet, Restarts
from tests.serving.running import RunningServer, engines, serving

FIELDS = {
    **{"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True},
    **{"temperature": 0.9, "seed": 7, "presence_penalty": 0.5, "logprobs": 2, "stream": True},
    "stream_options": {"include_usage": True},
}


class Link:
    """Stands in for an EngineLink, with a process that starts unless a failure is next."""

    number, is_wanted = 1, True
    start_first = ProcessLink.start_first

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.given: list[dict[str, Any]] = []

    async def exit_reason(self) -> str:
        return "its process ended with exit code -9"

    async def restart(self, started: Any, config: dict[str, Any]) -> None:
        self.given.append(config)
        if self.failures:
            raise self.failures.pop(0)


class Started(Fleet):
    """A fleet that starts nothing, on a clock of the test's own."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self.now_s = 0.0
        config = {"parallel": {"replicas": 2, "disaggregated": True}, "runtime": {"cores": None}}
        super().__init__(config, self.sleep, lambda: self.now_s)
        self._open = EngineGroup(config, "", lambda: (), lambda config: cast(Any, None))
        self._open.places = [{"cores": "0"}, {"cores": "1"}]

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds

    async def _started(self, number: int) -> Any:
        return object()


class Room:
    """Stands in for the actors of a cluster, which has room for replica 2 once replica 1 has been
    started again."""

    def __init__(self, first: Link) -> None:
        self._first, self._polls = first, 0

    def request(self, number: int) -> None:
        pass

    def poll(self, number: int) -> Any:
        self._polls += 1
        assert self._polls < 1000, "they wait for each other"
        if number == 2 and not self._first.given:
            return None
        return SimpleNamespace(connection=None, pid=number, host=None, ahead_s=0.0)


def revive(fleet: Fleet, link: Link) -> bool:
    return asyncio.run(fleet.revive(cast(EngineLink, link), 1))


@pytest.fixture
def fleet() -> Started:
    async def made() -> Started:
        return Started()

    return asyncio.run(made())


def test_it_is_started_with_what_it_had(fleet: Started, capsys: pytest.CaptureFixture[str]) -> None:
    link = Link()
    assert revive(fleet, link) and fleet.num_restarts == 1 and fleet.slept == [DELAYS_S[0]]
    (config,) = link.given
    assert config["runtime"] == {"cores": "1"} and config["parallel"]["replicas"] == 1
    assert capsys.readouterr().err.splitlines() == [
        "warning: replica 1 of 2 has stopped (its process ended with exit code -9); 1 left",
        "replica 1 of 2 serves again",
    ]


def test_one_that_does_not_start_at_first_is_named(fleet: Started) -> None:
    class Dead(Link):
        async def start(self, started: Any, config: dict[str, Any]) -> None:
            raise Crashed("the engine's process ended while it started")

    for count, who in ((2, "replica 1 of 2"), (1, "the engine")):
        fleet._config["parallel"] = {"replicas": count}
        with pytest.raises(Crashed, match=f"{who} does not start: its process ended with exit"):
            asyncio.run(fleet._first(cast(EngineLink, Dead()), cast(Any, None), {}))


def test_one_that_waits_for_room_holds_up_no_other(fleet: Started) -> None:
    async def both() -> list[bool]:
        added = asyncio.ensure_future(fleet.add(cast(EngineLink, late)))
        while not fleet.slept.count(POLL_S):
            await asyncio.sleep(0)
        return [await fleet.revive(cast(EngineLink, first), 1), await added]

    first, late = Link(), Link()
    late.number = 2
    fleet._group.places.append({"cores": "2"})
    fleet._group.name, fleet._group._actors = "ray", cast(Any, Room(first))
    assert asyncio.run(both()) == [True, True] and late.given and first.given


def test_each_try_comes_later_and_there_are_few(
    fleet: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    link = Link()
    assert revive(fleet, link)
    link.failures = [BadInput("no room"), RuntimeError("ended"), OSError("no files")] * 3
    assert not revive(fleet, link) and fleet.slept == list(DELAYS_S)
    told = capsys.readouterr().err
    assert "replica 1 of 2 does not start: no room" in told and "not started again" in told
    assert not revive(fleet, link) and fleet.num_restarts == 1


def test_after_long_service_deaths_are_counted_from_0(fleet: Started) -> None:
    link = Link()
    for _ in range(2 * len(DELAYS_S)):
        assert revive(fleet, link)
        fleet.now_s += STEADY_S + 1
    assert set(fleet.slept) == {DELAYS_S[0]}


def streamed(server: RunningServer, after: int, do: Callable[[], None]) -> list[dict[str, Any]]:
    """The events of a stream; `do` is called after so many."""
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(FIELDS).encode(),
        {"content-type": "application/json"},
    )
    events = []
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                events.append(json.loads(line[6:]))
                if len(events) == after:
                    do()
    return events


def told(events: list[dict[str, Any]]) -> Any:
    """What events say, however they are cut."""
    assert not [one for one in events if "error" in one], events[-1]
    choices = [choice for one in events for choice in one["choices"]]
    scores = [one["logprobs"] for one in choices if one.get("logprobs")]
    return (
        "".join(one["text"] for one in choices),
        [value for one in scores for value in one["token_logprobs"]],
        [value for one in scores for value in one["tokens"]],
        [one["finish_reason"] for one in choices if one["finish_reason"]],
        events[-1]["usage"],
    )


@pytest.mark.real
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_stream_goes_on_byte_for_byte_when_its_replica_is_gone(
    end: signal.Signals, tmp_path: Path
) -> None:
    knobs = ("parallel.replicas=2", "parallel.router=round_robin", "runtime.determinism=batch")
    with serving(*knobs, log=tmp_path / "log") as server:
        victim = engines(server)[1]
        known = told(streamed(server, 0, lambda: None))  # of replica 0
        assert told(streamed(server, 10, lambda: victim.send_signal(end))) == known
        assert known[-1]["completion_tokens"] == 200
        assert "replica 1 of 2 has stopped" in (tmp_path / "log").read_text()


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
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "warning: it does not start: no room"
    assert lines[-1] == "warning: it is not started again: it stops each time"
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
