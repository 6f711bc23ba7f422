"""Requests of an API server on their way to the engines of another process, without one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from minivllm.engine.options import SamplingParams
from minivllm.serving.api_servers.messages import CallEnded, Ended, Share, Submitted
from minivllm.serving.api_servers.relayed_engine import RelayedEngine
from minivllm.serving.errors import ApiError, overloaded
from minivllm.serving.http.calls import CALL, Call
from minivllm.serving.processes.messages import Abort, EngineState, Piece, Step
from minivllm.serving.processes.token_stream import Queued

PARAMS = SamplingParams(max_tokens=2)
STATE = EngineState(0, 0, 0, None)


def piece(request_id: str, token_id: int, reason: str | None = None) -> Piece:
    return Piece(request_id, 0, token_id, 1, "a", reason, None, None, 3, None, None)


def share(*pieces: Piece, begun: list[tuple[str, float]], queue: Queued) -> Share:
    return Share(Step(2.0, [*pieces], STATE, begun), *queue)


def test_tokens_come_back_with_their_times() -> None:
    async def run() -> None:
        sent: list[Any] = []
        engine, steps = RelayedEngine(7, 99, sent.append), []
        engine.listeners.append(steps.append)
        stream = engine.submit([1, 2, 3], PARAMS, "s", None)
        (asked,) = sent
        assert isinstance(asked, Submitted) and asked.request_id == stream.request_id == "a7r1"
        assert (asked.session, asked.arrived_s, asked.is_admitted) == ("s", stream.arrived_s, False)
        begun = [("a7r1", 1.5), ("another", 1.6)]
        engine.take(share(piece("a7r1", 5), begun=begun, queue=Queued(4, 40)))
        assert stream.begun_s == 1.5 and stream.first_token_s == 2.0 and len(steps) == 1
        assert engine.queue == Queued(4, 40)  # what others wait for counts, too
        engine.take(share(piece("a7r1", 6, "length"), begun=[], queue=Queued(0, 0)))
        got = [one.token_id async for pieces in stream.batches() for one in pieces]
        assert got == [5, 6] and not engine.streams and sent == [asked]
        assert engine.queue == Queued(0, 0)
        engine.submit([1, 2, 3], PARAMS)
        assert engine.queue == Queued(1, 3)

    asyncio.run(run())


def test_what_is_refused_there_is_an_error_here() -> None:
    async def run() -> None:
        sent: list[Any] = []
        engine = RelayedEngine(1, 99, sent.append)
        stream = engine.submit([1], PARAMS)
        engine.end(Ended(stream.request_id, overloaded("full", 3)))
        with pytest.raises(ApiError, match="full"):
            async for _ in stream.batches():
                pass
        assert not engine.streams and len(sent) == 1  # it is not ended again
        left = engine.submit([1], PARAMS)
        left.close()
        left.close()
        assert sent[2:] == [Abort("a1r2")]
        engine.end(Ended("a1r2", overloaded("full", 3)))  # too late

    asyncio.run(run())


def test_requests_of_one_call_have_its_number_until_it_ends() -> None:
    async def run() -> None:
        sent: list[Any] = []
        engine = RelayedEngine(1, 99, sent.append)
        calls = [Call("x", "host"), Call("y", "host")]
        for call in (calls[0], calls[0], calls[1]):
            CALL.set(call)
            engine.submit([1], PARAMS)
        first, same, other = sent
        assert first.call == same.call != other.call and first.came_s == calls[0].began_s
        calls[0].end()
        assert sent[3:] == [CallEnded(first.call)]

    asyncio.run(run())
