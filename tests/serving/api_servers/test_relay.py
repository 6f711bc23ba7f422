"""Calls that one process relays to the application of another one, in one process."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from fastapi import FastAPI, Request, WebSocket

from minivllm.serving.api_servers.messages import (
    AnswerComplete,
    CallCancelled,
    MessageWanted,
    RelayedCall,
    ToClient,
)
from minivllm.serving.api_servers.relay import OpenCalls, Relay, RelayedCalls
from minivllm.serving.http.calls import CALL, Call

HEADERS = [(b"host", b"localhost"), (b"x-more", b"1")]


class Pair:
    """A relay and what answers at its other end; messages are pickled, as between processes."""

    def __init__(self, app: Any) -> None:
        self.calls, self.others = OpenCalls(), 0
        self.answering = RelayedCalls(app, self.back)
        self.relay = Relay(
            self.other, {"/here", "/socket", "/never", "/broken"}, self.there, self.calls
        )

    async def other(self, scope: Any, receive: Any, send: Any) -> None:
        self.others += 1

    def there(self, message: Any) -> None:
        self.answering.take(pickle.loads(pickle.dumps(message)))

    def back(self, message: Any) -> None:
        assert isinstance(message, ToClient | AnswerComplete | MessageWanted)
        self.calls.take(pickle.loads(pickle.dumps(message)))


def scope_of(path: str, kind: str = "http") -> dict[str, Any]:
    scope: dict[str, Any] = {
        "type": kind,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"a=2",
        "headers": HEADERS,
        "client": ("10.0.0.9", 5),
        "server": ("127.0.0.1", 80),
        "root_path": "",
        "state": {"connection": object(), "has_key": False},
    }
    return scope | (
        {"method": "POST", "http_version": "1.1", "scheme": "http"} if kind == "http" else {}
    )


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()

    @app.post("/here")
    async def here(request: Request) -> dict[str, Any]:
        call = CALL.get()
        assert call is not None and call.request_id == "an-id"
        return {
            "body": (await request.body()).decode(),
            "host": request.client and request.client.host,
            "more": request.headers["x-more"],
            "query": request.query_params["a"],
        }

    @app.post("/broken")
    async def broken() -> None:
        raise ZeroDivisionError

    @app.post("/never")
    async def never() -> None:
        await asyncio.sleep(3600)

    @app.websocket("/socket")
    async def socket(socket: WebSocket) -> None:
        assert socket.scope["state"] == {"has_key": False}
        await socket.accept()
        await socket.send_text("first " + await socket.receive_text())
        await socket.close(1008, "enough")

    return app


def given(*messages: dict[str, Any]) -> Any:
    left = [*messages]

    async def receive() -> dict[str, Any]:
        if left:
            return left.pop(0)
        await asyncio.sleep(3600)
        raise AssertionError

    return receive


def test_an_answer_is_that_of_the_other_process(app: FastAPI) -> None:
    async def run() -> None:
        pair, sent = Pair(app), []

        async def send(message: Any) -> None:
            sent.append(message)

        CALL.set(Call("an-id", "10.0.0.9"))
        body = {"type": "http.request", "body": b'"x"', "more_body": False}
        await pair.relay(scope_of("/here"), given(body), send)
        head, *rest = sent
        assert head["status"] == 200
        assert b"".join(one.get("body", b"") for one in rest) == (
            b'{"body":"\\"x\\"","host":"10.0.0.9","more":"1","query":"2"}'
        )
        for _ in range(3):
            await asyncio.sleep(0)
        assert not pair.answering._tasks and not pair.calls._calls
        await pair.relay(scope_of("/elsewhere"), given(), send)
        assert pair.others == 1

    asyncio.run(run())


def test_a_call_is_over_with_the_last_part_of_its_answer() -> None:
    """A client that leaves then has had its answer."""

    async def run() -> None:
        done = asyncio.Event()

        async def slow_to_end(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x"})
            await done.wait()
            done.clear()

        async def send(message: Any) -> None:
            pass

        pair = Pair(slow_to_end)
        await pair.relay(scope_of("/here"), given(), send)
        assert pair.answering._tasks  # it may go on at the other end
        done.set()
        await asyncio.gather(*pair.answering._tasks.values())
        assert not done.is_set() and not pair.answering._tasks

    asyncio.run(run())


def test_a_websocket_goes_both_ways(app: FastAPI) -> None:
    async def run() -> None:
        pair, sent = Pair(app), []

        async def send(message: Any) -> None:
            sent.append(message)

        messages = ({"type": "websocket.connect"}, {"type": "websocket.receive", "text": "a"})
        await pair.relay(scope_of("/socket", "websocket"), given(*messages), send)
        assert [one["type"].split(".")[1] for one in sent] == ["accept", "send", "close"]
        assert sent[1]["text"] == "first a" and sent[2]["code"] == 1008

    asyncio.run(run())


def test_a_client_that_takes_nothing_is_sent_no_more(app: FastAPI) -> None:
    """What waits for a client waits in the process that makes it, which counts it."""

    async def run() -> None:
        ticks = 0

        async def endless(scope: Any, receive: Any, send: Any) -> None:
            nonlocal ticks
            while True:
                await send({"type": "websocket.send", "text": "x"})
                ticks += 1

        pair, stuck = Pair(endless), asyncio.Event()

        async def send(message: Any) -> None:
            await stuck.wait()

        relaying = asyncio.create_task(pair.relay(scope_of("/socket", "websocket"), given(), send))
        for _ in range(50):
            await asyncio.sleep(0)
        assert ticks == 0
        relaying.cancel()
        await asyncio.gather(relaying, return_exceptions=True)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not pair.answering._tasks  # a client that has left ends its call there

    asyncio.run(run())


def test_a_client_is_read_no_faster_than_the_application_reads() -> None:
    async def run() -> None:
        go_on, num_read = asyncio.Event(), 0

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await go_on.wait()
            await receive()
            await send({"type": "websocket.close"})

        async def receive() -> dict[str, Any]:
            nonlocal num_read
            num_read += 1
            return {"type": "websocket.receive", "text": "x"}

        async def send(message: Any) -> None:
            pass

        pair = Pair(slow)
        relaying = asyncio.create_task(pair.relay(scope_of("/socket", "websocket"), receive, send))
        for _ in range(20):
            await asyncio.sleep(0)
        assert num_read == 1
        go_on.set()
        await relaying
        assert num_read == 2

    asyncio.run(run())


def test_a_client_that_cannot_be_written_to_ends_its_call_at_the_other_end() -> None:
    async def run() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x"})

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                raise OSError("gone")

        pair = Pair(app)
        with pytest.raises(OSError, match="gone"):
            await pair.relay(scope_of("/here"), given(), send)
        await asyncio.gather(*pair.answering._tasks.values(), return_exceptions=True)
        await asyncio.sleep(0)
        assert not pair.answering._tasks and not pair.answering._calls

    asyncio.run(run())


def test_a_call_that_ends_before_it_has_begun_leaves_nothing(app: FastAPI) -> None:
    async def run() -> None:
        pair = Pair(app)
        pair.there(RelayedCall(1, "x", scope_of("/never") | {"state": {}}))
        pair.there(CallCancelled(1))
        await asyncio.gather(*pair.answering._tasks.values(), return_exceptions=True)
        await asyncio.sleep(0)
        assert not pair.answering._tasks and not pair.answering._calls

    asyncio.run(run())


def test_a_call_without_an_answer_is_an_error_here() -> None:
    async def run() -> None:
        async def broken(scope: Any, receive: Any, send: Any) -> None:
            raise ZeroDivisionError

        async def send(message: Any) -> None:
            raise AssertionError

        with pytest.raises(RuntimeError, match="has not answered"):
            await Pair(broken).relay(scope_of("/broken"), given(), send)

    asyncio.run(run())


def test_calls_end_with_the_process_that_has_relayed_them() -> None:
    """The next process counts its calls from 1 again, and hears nothing of those before."""

    async def run() -> None:
        sent: list[Any] = []
        is_left, has_ended = asyncio.Event(), asyncio.Event()

        async def slow_to_end(scope: Any, receive: Any, send: Any) -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                await is_left.wait()
                has_ended.set()

        answering = RelayedCalls(slow_to_end, sent.append)
        answering.take(RelayedCall(1, "x", scope_of("/never")))
        await asyncio.sleep(0)
        answering.end()
        await asyncio.sleep(0)
        is_left.set()
        await has_ended.wait()
        await asyncio.gather(*answering._tasks.values(), return_exceptions=True)
        await asyncio.sleep(0)
        assert sent == [] and not answering._tasks

    asyncio.run(run())
