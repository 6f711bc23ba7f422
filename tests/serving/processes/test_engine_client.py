"""What a client of the engine makes of its pieces, without an engine."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from minivllm.engine.options import SamplingParams
from minivllm.platform.channel import Frames
from minivllm.serving.errors import ApiError
from minivllm.serving.processes.engine_client import EngineClient, TokenStream
from minivllm.serving.processes.messages import Abort, EngineState, Piece, Ready, Step


class Transport:
    """Keeps what is sent to the engine."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def write(self, data: bytes) -> None:
        self.sent += Frames().push(data)


def piece(completion: int, token_id: int | None, reason: str | None, error: str | None) -> Piece:
    return Piece("r1", completion, token_id, 1, "a", reason, None, None, 0, None, error)


@pytest.mark.parametrize(
    ("last", "status"),
    [
        (piece(1, None, "error", "no finite logits"), 500),
        (piece(1, None, "error", "the grammar cannot go on")._replace(bad_input=True), 400),
        (piece(1, None, "shed", None), 408),
    ],
)
def test_a_completion_that_fails_ends_its_request_in_the_engine(last: Piece, status: int) -> None:
    async def run() -> tuple[TokenStream, list[Any], list[Piece], ApiError]:
        client, transport = EngineClient({}, 9), Transport()
        client._transport = cast(Any, transport)
        ready = Ready(9, 9, (), 9, 9, 9, SamplingParams(), [])
        client._receive(ready)
        stream = client.submit([1], SamplingParams(n=2))
        state = EngineState(0, 0, 0, None)
        client._receive(Step(1.0, [piece(0, 5, None, None), last], state, []))
        client._receive(Step(2.0, [piece(0, 6, "length", None)], state, []))
        assert not client.streams
        got: list[Piece] = []
        with pytest.raises(ApiError) as error:
            async for pieces in stream.batches():
                got += pieces
        return stream, transport.sent, got, error.value

    stream, sent, got, error = asyncio.run(run())
    assert sent[1:] == [Abort("r1")]
    assert [one.token_id for one in got] == [5]  # those before stay
    assert error.status == status and stream.finish_reason == last.finish_reason
