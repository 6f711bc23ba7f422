"""Answers over HTTP: JSON that can hold whatever a client has sent, and streams of server-sent
events (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any, TypeVar

from starlette.responses import JSONResponse, StreamingResponse

from minivllm.serving.errors import ApiError, internal

logger = logging.getLogger("minivllm.serving")

T = TypeVar("T")
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class JsonAnswer(JSONResponse):
    """JSON in ASCII: half a surrogate pair, which a client may write as an escape and an answer
    repeat, cannot be encoded in UTF-8. NaN, which Python reads, is written as it was read."""

    def render(self, content: Any) -> bytes:
        """The bytes of the body."""
        return json.dumps(content, separators=(",", ":")).encode()


def event(data: Mapping[str, Any] | str, name: str | None = None) -> bytes:
    """One event; a mapping is written as JSON."""
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
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
