"""Answers over HTTP: server-sent events, silences between them, and JSON that repeats what clients
send, also where other libraries do not write it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest

from minivllm.serving.http.answers import JsonAnswer, event, with_silences


def test_an_event_is_lines_of_text() -> None:
    assert event({"a": "x\ny"}) == b'data: {"a":"x\\ny"}\n\n'
    assert event("[DONE]", "end") == b"event: end\ndata: [DONE]\n\n"


def test_silences_are_told_and_lose_nothing() -> None:
    async def run() -> list[int | None]:
        closed: list[bool] = []
        gates = [asyncio.Event() for _ in range(2)]

        async def items() -> AsyncGenerator[int, None]:
            try:
                yield 1
                await gates[0].wait()
                yield 2
                await gates[1].wait()
                yield 3
            finally:
                closed.append(True)

        found: list[int | None] = []
        stream = with_silences(items(), 0.01)
        async for item in stream:
            found.append(item)
            if found.count(None) == 2:
                gates[0].set()
            if found.count(None) == 5:
                break
        await stream.aclose()
        assert closed == [True]
        return found

    found = asyncio.run(run())
    assert [item for item in found if item] == [1, 2] and found[:3] == [1, None, None]


def test_items_without_silence_come_as_they_are() -> None:
    async def run() -> list[int | None]:
        async def items() -> AsyncGenerator[int, None]:
            for number in range(3):
                yield number

        return [item async for item in with_silences(items(), 60.0)]

    assert asyncio.run(run()) == [0, 1, 2]


@pytest.mark.parametrize("value", ['"\\ud800"', "NaN", '"é値"', "1e999"])
def test_what_python_reads_is_written(value: str) -> None:
    content = json.loads(value)
    body = bytes(JsonAnswer({"value": content}).body)
    assert repr(json.loads(body)["value"]) == repr(content) and body.isascii()
