"""Calls that only the server's own process can answer, such as /metrics and the live view: messages
of ASGI, relayed between it and an API server, one at a time in each direction."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minivllm.serving.api_servers.messages import (
    AnswerComplete,
    CallCancelled,
    FromClient,
    MessageDelivered,
    MessageWanted,
    RelayedCall,
    ToClient,
)
from minivllm.serving.http.calls import CALL, Call

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("minivllm.serving")

# Of a scope, what the application at the other end may read.
RELAYED = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server", "subprotocols"),
)


@dataclass
class _OpenCall:
    """A call that is answered elsewhere."""

    answers: asyncio.Queue[Message | None] = field(default_factory=asyncio.Queue)  # None: no more
    wanted: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))


class OpenCalls:
    """The relayed calls of an API server that are not over."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._calls: dict[int, _OpenCall] = {}

    def open(self) -> tuple[int, _OpenCall]:
        """A new call and its number."""
        number = next(self._numbers)
        self._calls[number] = _OpenCall()
        return number, self._calls[number]

    def close(self, number: int) -> None:
        """Forget a call."""
        self._calls.pop(number, None)

    def take(self, message: ToClient | AnswerComplete | MessageWanted) -> None:
        """Hand a message of the other process to its call, unless that is over."""
        if (call := self._calls.get(message.call)) is None:
            return
        match message:
            case ToClient():
                call.answers.put_nowait(message.message)
            case AnswerComplete():
                call.answers.put_nowait(None)
            case MessageWanted():
                call.wanted.release()


class Relay:
    """Middleware of an API server: has the other process answer calls of some paths.

    Args:
        app: answers the others.
        paths: of calls that are relayed.
        post: sends the other process a message.
        calls: get the messages that come back.
    """

    def __init__(
        self, app: ASGIApp, paths: Collection[str], post: Callable[[Any], None], calls: OpenCalls
    ) -> None:
        self.app, self._paths, self._post, self._calls = app, paths, post, calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a call."""
        if scope["path"] not in self._paths:
            await self.app(scope, receive, send)
            return
        number, open_call = self._calls.open()
        call = CALL.get()
        relayed = {name: scope[name] for name in RELAYED if name in scope}
        relayed["state"] = {"has_key": scope.get("state", {}).get("has_key", True)}
        self._post(RelayedCall(number, "" if call is None else call.request_id, relayed))
        forwarding = asyncio.create_task(self._forward(number, open_call, receive))
        is_begun = is_over = False
        try:
            while not is_over and (message := await open_call.answers.get()) is not None:
                await send(message)
                self._post(MessageDelivered(number))
                is_begun, is_over = True, _is_last(message)
            if not is_begun:
                raise RuntimeError("the server's own process has not answered: see its log")
        finally:
            forwarding.cancel()
            self._calls.close(number)
            if not is_over:
                self._post(CallCancelled(number))

    async def _forward(self, number: int, call: _OpenCall, receive: Receive) -> None:
        """Send what the client sends, a message for each that is wanted."""
        while True:
            await call.wanted.acquire()
            self._post(FromClient(number, await receive()))


def _is_last(message: Message) -> bool:
    """Whether this ends an answer over HTTP: the client may leave then."""
    return message["type"] == "http.response.body" and not message.get("more_body", False)


class _Answering:
    """A relayed call that is being answered.

    Args:
        number: of the call.
        post: sends the API server a message.
    """

    def __init__(self, number: int, post: Callable[[Any], None]) -> None:
        self.number, self.post = number, post
        self.heard: asyncio.Queue[Message] = asyncio.Queue()  # of the client, one at most
        self.delivered = asyncio.Event()
        self.is_waiting = False  # for a message of the client

    async def receive(self) -> Message:
        """The next message of the client, as ASGI has it."""
        if not self.is_waiting and self.heard.empty():
            self.is_waiting = True
            self.post(MessageWanted(self.number))
        return await self.heard.get()

    def take(self, message: Message) -> None:
        """Take a message of the client."""
        self.is_waiting = False
        self.heard.put_nowait(message)

    async def send(self, message: Message) -> None:
        """Send the client a message, and wait until it has it."""
        self.delivered.clear()
        self.post(ToClient(self.number, message))
        await self.delivered.wait()


class RelayedCalls:
    """The calls that one process of an API server has relayed, answered by the application of this
    one.

    Args:
        app: the application.
        post: sends the API server a message.
    """

    def __init__(self, app: ASGIApp, post: Callable[[Any], None]) -> None:
        self._app, self._send_on, self._has_ended = app, post, False
        self._calls: dict[int, _Answering] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, message: RelayedCall | FromClient | MessageDelivered | CallCancelled) -> None:
        """Take a message of the API server."""
        if isinstance(message, RelayedCall):
            self._begin(message)
        elif (call := self._calls.get(message.call)) is not None:
            match message:
                case FromClient():
                    call.take(message.message)
                case MessageDelivered():
                    call.delivered.set()
                case CallCancelled():
                    self._tasks[message.call].cancel()

    def _begin(self, relayed: RelayedCall) -> None:
        number = relayed.call
        self._calls[number] = call = _Answering(number, self._post)
        self._tasks[number] = task = asyncio.create_task(self._answer(call, relayed))

        def done(_: asyncio.Task[None]) -> None:
            del self._calls[number], self._tasks[number]
            self._post(AnswerComplete(number))

        task.add_done_callback(done)

    async def _answer(self, call: _Answering, relayed: RelayedCall) -> None:
        CALL.set(Call(relayed.request_id, (relayed.scope.get("client") or ("", 0))[0]))
        try:
            await self._app(relayed.scope, call.receive, call.send)
        except Exception as error:
            logger.error("a request failed: %s", relayed.request_id, exc_info=error)

    def _post(self, message: Any) -> None:
        if not self._has_ended:
            self._send_on(message)

    def end(self) -> None:
        """End all calls: the process that has relayed them is gone."""
        self._has_ended = True
        for task in self._tasks.values():
            task.cancel()
