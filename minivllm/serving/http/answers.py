"""Answers over HTTP, in one piece or as server-sent events (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Self, TypeVar

from starlette.responses import JSONResponse, Response, StreamingResponse

from minivllm.engine.options import SamplingParams
from minivllm.models.vision.inputs import RequestInputs
from minivllm.processes.messages import Piece
from minivllm.serving.errors import ApiError, internal
from minivllm.serving.processes.token_stream import TokenStream
from minivllm.serving.service import Service, merged

logger = logging.getLogger("minivllm.serving")

T = TypeVar("T")
JsonEvent = dict[str, Any]
_encode = json.JSONEncoder(separators=(",", ":")).encode  # dumps() would make one for each call
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class JsonAnswer(JSONResponse):
    """JSON in ASCII: half a surrogate pair, which a client may write as an escape and an answer
    repeat, cannot be encoded in UTF-8. NaN, which Python reads, is written as it was read."""

    def render(self, content: Any) -> bytes:
        """The bytes of the body."""
        return _encode(content).encode()


def event(data: Mapping[str, Any] | str, name: str | None = None) -> bytes:
    """One event; a mapping is written as JSON."""
    text = data if isinstance(data, str) else _encode(data)
    return (f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n").encode()


# What an operation whose answer may be a stream says of it.
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}}
}


async def event_stream(
    chunks: AsyncIterator[bytes], error_event: Callable[[ApiError], bytes]
) -> StreamingResponse:
    """A response of events; it begins once there is the first one, so that a request which fails
    before has an error with a status.

    Args:
        chunks: one event or several at a time.
        error_event: an error after the headers, as an event.

    Raises:
        ApiError: there is no first event.
    """
    first = await anext(chunks)

    async def body() -> AsyncIterator[bytes]:
        try:
            yield first
            async for chunk in chunks:
                yield chunk
        except ApiError as error:
            yield error_event(error)
        except Exception as error:
            logger.error("an answer failed", exc_info=error)
            yield error_event(internal("the server made a mistake; see its log"))
        finally:
            await chunks.aclose()  # type: ignore[attr-defined]

    return StreamingResponse(body(), media_type="text/event-stream", headers=HEADERS)


async def with_silences(
    items: AsyncGenerator[T, None], silence_s: float
) -> AsyncGenerator[T | None, None]:
    """The items as they come, and None after each time of silence, for an event that keeps the
    connection open.

    Args:
        items: closed at the end.
        silence_s: seconds without an item.
    """
    task: asyncio.Future[T] | None = None
    try:
        while True:
            task = task or asyncio.ensure_future(anext(items))
            await asyncio.wait({task}, timeout=silence_s)
            if not task.done():
                yield None
                continue
            try:
                item = task.result()
            except StopAsyncIteration:
                return
            task = None
            yield item
    finally:
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task})
        await items.aclose()


class ApiAnswer(ABC):
    """A call while it is answered: its requests to the engine, and what came of them, in one piece
    or as a stream of events. An API says how both are written.

    Args:
        service: computes it.

    Attributes:
        streams: of its requests, from `start` on.
        TAIL: behind the last event of a stream.
        SILENCE_S: seconds without a piece, after which a stream has the events of no pieces; None:
            it has none.
    """

    TAIL: ClassVar[bytes] = b""
    SILENCE_S: ClassVar[float | None] = None

    def __init__(self, service: Service) -> None:
        self.service = service
        self.streams: list[TokenStream] = []

    def start(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        inputs: RequestInputs | None = None,
    ) -> Self:
        """Send the requests to the engine; see `Service.start`."""
        self.streams = self.service.start(prompts, params, inputs)
        return self

    @abstractmethod
    def usage(self) -> dict[str, Any]:
        """How many tokens the call has taken so far."""

    @abstractmethod
    def events(self, number: int, pieces: list[Piece]) -> Sequence[JsonEvent]:
        """The events of a stream for the next pieces of a request."""

    @abstractmethod
    def rendered(self) -> dict[str, Any]:
        """The answer, once all pieces are collected."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """An error after the headers of a stream, as its last events."""

    def collect(self, number: int, pieces: list[Piece]) -> None:
        """Take the next pieces of a request, for `rendered`."""
        self.events(number, pieces)

    def closing(self) -> Sequence[JsonEvent]:
        """The events behind the last piece."""
        return ()

    def written(self, events: Sequence[JsonEvent]) -> bytes:
        """Events as bytes."""
        return b"".join(map(event, events))

    def batches(self) -> AsyncGenerator[tuple[int, list[Piece]], None]:
        """The pieces as they come, each batch with the number of its request; the next one is made
        when the one before has been taken. Raises ApiError where a request failed."""
        return merged(self.streams)

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        async with aclosing(self.batches()) as batches:
            async for number, pieces in batches:
                self.collect(number, pieces)
        return self.rendered()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The answer as events, those of one batch at a time."""
        each, silence_s = self.batches(), self.SILENCE_S
        async with aclosing(each if silence_s is None else with_silences(each, silence_s)) as found:
            async for batch in found:
                if events := self.events(*(batch or (0, []))):
                    yield self.written(events)
        yield self.written(self.closing()) + self.TAIL

    async def response(self, is_streamed: bool | None) -> Response:
        """The answer over HTTP.

        Raises:
            ApiError: a request failed, of a stream before its first event.
        """
        if is_streamed:
            return await event_stream(self.chunks(), self.failed)
        return JsonAnswer(await self.whole())
