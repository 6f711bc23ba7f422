"""Requests of an API server on their way to the engines of another process, without one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from minivllm.engine.options import SamplingParams
from minivllm.processes.messages import Abort, EngineState, Piece, Step
from minivllm.serving.api_servers.messages import (
    CallEnded,
    NewRequests,
    RequestFailed,
)
from minivllm.serving.api_servers.relayed_engine import RelayedEngine
from minivllm.serving.errors import ApiError, overloaded
from minivllm.serving.http.calls import CALL, Call
from minivllm.serving.processes.token_stream import Queued, Submission

PARAMS = SamplingParams(max_tokens=2)
STATE = EngineState(0, 0, 0, None)


def piece(request_id: str, token_id: int, reason: str | None = None) -> Piece:
    return Piece(request_id, 0, token_id, 1, "a", reason, None, None, 3, None, None)


def step(*pieces: Piece, begun: list[tuple[str, float]]) -> Step:
    return Step(2.0, [*pieces], STATE, begun)


def test_tokens_come_back_with_their_times() -> None:
    async def run() -> None:
        sent: list[Any] = []
        engine, steps = RelayedEngine(7, 99, sent.append), []
        engine.listeners.append(steps.append)
        (stream,) = engine.submit_all(Submission([[1, 2, 3]], PARAMS, "s", None))
        (new,) = sent
        assert isinstance(new, NewRequests) and new.prompts == {"a7r1": [1, 2, 3]}
        assert stream.request_id == "a7r1"
        assert (new.session, new.arrived_s, new.is_admitted) == ("s", stream.arrived_s, False)
        begun = [("a7r1", 1.5), ("another", 1.6)]
        engine.take(step(piece("a7r1", 5), begun=begun))
        assert stream.begun_s == 1.5 and stream.first_token_s == 2.0 and len(steps) == 1
        engine.take(step(piece("a7r1", 6, "length"), begun=[]))
        got = [one.token_id async for pieces in stream.batches() for one in pieces]
        assert got == [5, 6] and not engine.streams and sent == [new]

    asyncio.run(run())


def test_the_queue_is_that_of_the_whole_server() -> None:
    async def run() -> None:
        engine = RelayedEngine(7, 99, lambda message: None)
        engine.take(Queued(4, 40))
        assert engine.queue == Queued(4, 40)  # what others wait for counts, too
        engine.submit_all(Submission([[1, 2, 3]] * 5, PARAMS))
        assert engine.queue == Queued(5, 40)
        engine.take(Queued(0, 0))
        assert engine.queue == Queued(5, 15)

    asyncio.run(run())


def test_requests_of_a_call_go_together() -> None:
    async def run() -> None:
        sent: list[Any] = []
        engine = RelayedEngine(1, 99, sent.append)
        first, second = engine.submit_all(Submission([[1], [2, 3]], PARAMS))
        (new,) = sent
        assert [*new.prompts.values()] == [[1], [2, 3]]
        assert [*new.prompts] == [first.request_id, second.request_id]

    asyncio.run(run())


def test_what_is_refused_there_is_an_error_here() -> None:
    async def run() -> None:
        sent: list[Any] = []
        engine = RelayedEngine(1, 99, sent.append)
        (stream,) = engine.submit_all(Submission([[1]], PARAMS))
        engine.take(RequestFailed(stream.request_id, overloaded("full", 3)))
        with pytest.raises(ApiError, match="full"):
            async for _ in stream.batches():
                pass
        assert not engine.streams and len(sent) == 1  # it is not ended again
        (left,) = engine.submit_all(Submission([[1]], PARAMS))
        left.close()
        left.close()
        assert sent[2:] == [Abort("a1r2")]
        engine.take(RequestFailed("a1r2", overloaded("full", 3)))  # too late

    asyncio.run(run())


def test_requests_of_one_call_have_its_number_until_it_ends() -> None:
    async def run() -> None:
        sent: list[Any] = []
        engine = RelayedEngine(1, 99, sent.append)
        calls = [Call("x", "host"), Call("y", "host")]
        for call in (calls[0], calls[0], calls[1]):
            CALL.set(call)
            engine.submit_all(Submission([[1]], PARAMS))
        first, same, other = sent
        assert first.call == same.call != other.call and first.came_s == calls[0].began_s
        calls[0].end()
        assert sent[3:] == [CallEnded(first.call)]

    asyncio.run(run())
