"""Server-sent events (WHATWG HTML, section 9.2), and the response that streams them."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.responses import StreamingResponse

from minivllm.serving.errors import ApiError, internal

logger = logging.getLogger("minivllm.serving")

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(data: Mapping[str, Any] | str, name: str | None = None) -> bytes:
    """One event; a mapping is written as JSON."""
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    return (f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n").encode()


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
