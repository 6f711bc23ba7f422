"""Replicas are added and taken away while requests run, without an engine and on a real server."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from pathlib import Path
from typing import Any, cast

import pytest

from minivllm.engine.options import SamplingParams
from minivllm.processes.link import EngineLink
from minivllm.serving.errors import ApiError
from minivllm.serving.processes import resizing
from tests.engines.servers.waiting import wait_until
from tests.serving.plain import call_json
from tests.serving.processes.test_engine_client import READY, Replicas, Transport
from tests.serving.processes.test_fleet import FIELDS, told
from tests.serving.running import engines, serving

DRAIN_S = 60.0


class Adding:
    """Stands in for a Fleet with room for three, whose processes are there at once."""

    num_restarts = 0

    def __init__(self, replicas: Replicas) -> None:
        self._sent = replicas.sent

    def require_room(self, count: int) -> None:
        pass

    async def add(self, link: EngineLink) -> bool:
        await asyncio.sleep(0)
        transport = Transport()
        transport.lost = link.lose  # type: ignore[method-assign]
        link._transport, link._ended = cast(Any, transport), False
        link._built = asyncio.get_running_loop().create_future()
        link.receive(READY)
        self._sent[link.number : link.number + 1] = [transport.sent]
        return True

    def close(self) -> None:
        pass


def made(count: int, **parallel: Any) -> Replicas:
    replicas = Replicas(count, **parallel)
    client = replicas.client
    client._fleet = client._resizing._fleet = cast(Any, Adding(replicas))
    return replicas


async def until_settled(replicas: Replicas) -> None:
    while replicas.client._resizing.tasks:
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resizing, "POLL_S", 0.0)


def states(replicas: Replicas) -> tuple[int, ...]:
    return tuple(replicas.client.replicas.states().values())


def test_one_that_is_added_gets_requests() -> None:
    async def run() -> None:
        replicas = made(2)
        client = replicas.client
        client.resize(3, DRAIN_S)
        assert states(replicas) == (3, 2, 1, 0, 0)  # wanted, serving, starting, draining, stopped
        await until_settled(replicas)
        assert states(replicas) == (3, 3, 0, 0, 0)
        for _ in range(3):
            client.submit([1], SamplingParams())
        assert [len(sent) for sent in replicas.sent] == [1, 1, 1]
        assert client.replicas.info.num_blocks == 3 * READY.num_blocks
        assert client.replica_events["added"] == 1

    asyncio.run(run())


def test_one_that_is_wanted_again_while_it_stops_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        replicas = made(2)
        client = replicas.client
        client.resize(3, DRAIN_S)
        client.resize(2, DRAIN_S)  # before it is built
        link = client.replicas.links[2]
        stop = link.stop

        async def stopped() -> None:
            client.resize(3, DRAIN_S)
            await stop()

        monkeypatch.setattr(link, "stop", stopped)
        await until_settled(replicas)
        assert states(replicas) == (3, 3, 0, 0, 0)

    asyncio.run(run())


def test_one_that_is_taken_away_answers_what_it_has() -> None:
    async def run() -> None:
        replicas = made(2)
        client = replicas.client
        streams = [client.submit([1], SamplingParams()) for _ in range(2)]
        client.resize(1, DRAIN_S)
        client.submit([1], SamplingParams())
        assert states(replicas) == (1, 1, 0, 1, 0) and client.is_alive
        assert [len(sent) for sent in replicas.sent] == [2, 1]
        replicas.answer(1, "r2", "length")
        await until_settled(replicas)
        assert streams[1].is_over and streams[1].error is None
        assert states(replicas) == (1, 1, 0, 0, 0) and client.replica_events["removed"] == 1
        assert client.replica_events["lost"] == 0 and client.routing.router.alive == {0}
        client.resize(2, DRAIN_S)  # the same number again, with an empty cache
        await until_settled(replicas)
        assert states(replicas) == (2, 2, 0, 0, 0) and len(client.replicas.links) == 2

    asyncio.run(run())


def test_what_takes_too_long_goes_on_elsewhere() -> None:
    async def run() -> None:
        replicas = made(2)
        client = replicas.client
        plain = client.submit([1], SamplingParams(max_tokens=9))
        moved = client.submit([1], SamplingParams(max_tokens=9))
        replicas.answer(1, moved.request_id)
        client.resize(1, 0.0)
        await until_settled(replicas)
        rest = replicas.sent[0][-1]
        assert rest.request_id == moved.request_id and rest.output_token_ids == [5]
        assert not plain.is_over and not moved.is_over
        assert client._unfinished["r2"].link is client.replicas.links[0]

    asyncio.run(run())


def test_one_that_drains_can_stay() -> None:
    async def run() -> None:
        replicas = made(2)
        client = replicas.client
        for _ in range(2):
            client.submit([1], SamplingParams())
        client.resize(1, DRAIN_S)
        await asyncio.sleep(0)
        client.resize(2, DRAIN_S)
        await until_settled(replicas)
        assert states(replicas) == (2, 2, 0, 0, 0) and client.routing.router.alive == {0, 1}
        client.resize(1, DRAIN_S)
        replicas.die(0)  # the one that drains takes its place
        await until_settled(replicas)
        assert states(replicas) == (1, 1, 0, 0, 0) and client.routing.router.alive == {1}
        assert client.is_alive and not client.ended.is_set()
        assert [one.request_id for one in replicas.sent[1]] == ["r2", "r1"]

    asyncio.run(run())


def test_of_replicas_that_compute_apart_one_of_each_kind_stays() -> None:
    async def run() -> None:
        replicas = made(3, disaggregated=True, prefill_replicas=1)
        client = replicas.client
        client.resize(2, DRAIN_S)
        await until_settled(replicas)
        handovers = client.routing.handovers
        assert handovers is not None and handovers.decoders.alive == {0}
        with pytest.raises(ApiError, match="2 is the least here"):
            client.resize(1, DRAIN_S)
        client.resize(4, DRAIN_S)
        await until_settled(replicas)
        assert handovers.decoders.alive == {0, 1, 2} and client.routing.router.alive == {0}

    asyncio.run(run())


@pytest.mark.real
def test_replicas_come_and_go_below_streams(tmp_path: Path) -> None:
    knobs = ("parallel.replicas=2", "parallel.router=round_robin", "runtime.determinism=batch")
    with serving(*knobs, "task.drain_s=0", log=tmp_path / "log") as server:

        def stream() -> Any:
            body = json.dumps(FIELDS).encode()
            head = {"content-type": "application/json"}
            request = urllib.request.Request(f"{server.url}/v1/completions", body, head)
            with urllib.request.urlopen(request, timeout=120) as answer:
                return told([json.loads(line[6:]) for line in answer if line[:7] == b"data: {"])

        def resize(count: int) -> Any:
            status, body = call_json(f"{server.url}/replicas", {"replicas": count})
            assert status == 202, body
            return body

        def settled(count: int) -> bool:
            body = call_json(f"{server.url}/replicas")[1]
            return body["serving"] == count and not body["draining"] and not body["starting"]

        known = stream()
        found: list[Any] = []
        threads = [threading.Thread(target=lambda: found.append(stream())) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert resize(3)["starting"] == 1
        assert wait_until(lambda: settled(3)) and len(engines(server)) == 3
        assert resize(1)["replicas"] == 1
        for thread in threads:
            thread.join(120)
        assert found == [known] * 4
        assert wait_until(lambda: settled(1)) and wait_until(lambda: len(engines(server)) == 1)
        ready = call_json(f"{server.url}/ready")[1]
        assert ready == {"status": "ready", "replicas": 1, "alive": 1}
        for body in ({"replicas": 0}, {"replicas": 2000}, {}, {"replicas": 2, "more": 1}):
            assert call_json(f"{server.url}/replicas", body)[0] == 400
    assert "replica 2 of 3 serves" in (tmp_path / "log").read_text()
