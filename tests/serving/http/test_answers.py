"""Answers over HTTP: server-sent events, silences between them, and JSON that repeats what clients
send, also where other libraries do not write it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
from starlette.responses import StreamingResponse

from minivllm.engine.options import SamplingParams
from minivllm.processes.messages import Piece
from minivllm.serving.errors import ApiError
from minivllm.serving.http.answers import ApiAnswer, JsonAnswer, event, with_silences
from minivllm.serving.processes.token_stream import TokenStream


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


class Texts(ApiAnswer):
    """An answer whose events are the numbers of requests and their texts."""

    TAIL = b"end"

    def __init__(self, service: Any) -> None:
        super().__init__(service)
        self.found: list[tuple[int, str]] = []

    def usage(self) -> dict[str, Any]:
        return {"tokens": sum(stream.num_output_tokens for stream in self.streams)}

    def events(self, number: int, pieces: list[Piece]) -> list[dict[str, Any]]:
        self.found += [(number, piece.text) for piece in pieces]
        return [{"of": number, "text": "".join(piece.text for piece in pieces)}]

    def rendered(self) -> dict[str, Any]:
        return {"found": sorted(self.found), **self.usage()}

    def closing(self) -> list[dict[str, Any]]:
        return [self.usage()]

    def failed(self, error: ApiError) -> bytes:
        return error.message.encode()


class Scripted:
    """Answers each prompt with a text, one token a character; the error of one comes at its end."""

    def __init__(self, *texts: str, error: ApiError | None = None) -> None:
        self.texts, self.error = texts, error
        self.aborted: list[str] = []

    def start(self, prompts: list[list[int]], *_: Any) -> list[TokenStream]:
        streams = []
        for name, text in zip("abc", self.texts, strict=False):
            stream = TokenStream(name, 1, 1, 99, lambda one: self.aborted.append(one.request_id))
            for at, letter in enumerate(text):
                reason = "stop" if at == len(text) - 1 and self.error is None else None
                piece = Piece(name, 0, at, at + 1, letter, reason, None, None, 0, None, None)
                stream.push(piece, 0.0)
            streams.append(stream)
        if self.error is not None:
            streams[0].fail(self.error)
        return streams


def answer_of(service: Scripted) -> Texts:
    prompts = [[1] for _ in service.texts]
    return Texts(cast(Any, service)).start(prompts, SamplingParams())


async def streamed(answer: Texts) -> bytes:
    response = cast(StreamingResponse, await answer.response(True))
    return b"".join([cast(bytes, chunk) async for chunk in response.body_iterator])


def test_an_answer_is_whole_or_a_stream_of_the_same() -> None:
    async def run() -> None:
        whole = await answer_of(Scripted("ab", "c")).response(False)
        found = [[0, "a"], [0, "b"], [1, "c"]]
        assert json.loads(bytes(whole.body)) == {"found": found, "tokens": 3}
        data = await streamed(answer_of(Scripted("abc")))
        assert data == event({"of": 0, "text": "abc"}) + event({"tokens": 3}) + b"end"

    asyncio.run(run())


def test_a_request_that_fails_ends_the_answer_and_its_others() -> None:
    async def run() -> None:
        service = Scripted("a", "b", error=ApiError(500, "it broke"))
        assert (await streamed(answer_of(service))).endswith(b"it broke")
        assert "b" in service.aborted
        with pytest.raises(ApiError, match="it broke"):
            await answer_of(Scripted("", error=ApiError(500, "it broke"))).response(True)

    asyncio.run(run())
