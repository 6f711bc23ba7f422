"""Calls that only the server's own process can answer, such as /metrics and the live view: messages
of ASGI, relayed between it and an API server."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from minivllm.serving.api_servers.messages import Answered, Called, Heard, Left, Sent, Taken
from minivllm.serving.http.calls import CALL, Call

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("minivllm.serving")

# Of a scope, what the application at the other end may read.
RELAYED = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server", "subprotocols"),
)


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
        number, answers = self._calls.open()
        call = CALL.get()
        relayed = {name: scope[name] for name in RELAYED if name in scope}
        relayed["state"] = {"has_key": scope.get("state", {}).get("has_key", True)}
        self._post(Called(number, "" if call is None else call.request_id, relayed))
        hearing = asyncio.create_task(self._hear(number, receive))
        message: Message | None = None
        try:
            while not _is_last(message) and (following := await answers.get()) is not None:
                message = following
                await send(message)
                self._post(Taken(number))
            if message is None:
                raise RuntimeError("the server's own process has not answered: see its log")
        finally:
            hearing.cancel()
            self._calls.close(number)
            if not _is_last(message):
                self._post(Left(number))

    async def _hear(self, number: int, receive: Receive) -> None:
        while True:
            message = await receive()
            self._post(Heard(number, message))
            if message["type"].endswith(".disconnect"):
                return


def _is_last(message: Message | None) -> bool:
    """Whether this ends an answer: the client may leave then."""
    if message is None or message["type"] != "http.response.body":
        return False
    return not message.get("more_body", False)


class OpenCalls:
    """The relayed calls of an API server that wait for messages of their answers."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Queue[Message | None]] = {}

    def open(self) -> tuple[int, asyncio.Queue[Message | None]]:
        """A new call; its number, and its messages, of which None is the last."""
        number = next(self._numbers)
        self._answers[number] = asyncio.Queue()
        return number, self._answers[number]

    def close(self, number: int) -> None:
        """Forget a call."""
        self._answers.pop(number, None)

    def take(self, message: Sent | Answered) -> None:
        """Hand a message to its call, unless that is over."""
        if (answers := self._answers.get(message.call)) is not None:
            answers.put_nowait(message.message if isinstance(message, Sent) else None)


class RelayedCalls:
    """The calls that an API server has relayed, answered by the application of this process.

    Args:
        app: the application.
        post: sends the API server a message.
    """

    def __init__(self, app: ASGIApp, post: Callable[[Any], None]) -> None:
        self._app, self._post = app, post
        self._heard: dict[int, asyncio.Queue[Message]] = {}
        self._taken: dict[int, asyncio.Event] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, message: Called | Heard | Taken | Left) -> None:
        """Take a message of the API server."""
        match message:
            case Called(number):
                self._heard[number], self._taken[number] = asyncio.Queue(), asyncio.Event()
                self._tasks[number] = asyncio.create_task(self._answer(message))
            case Heard(number, part):
                if (heard := self._heard.get(number)) is not None:
                    heard.put_nowait(part)
            case Taken(number):
                if (taken := self._taken.get(number)) is not None:
                    taken.set()
            case Left(number):
                if (task := self._tasks.get(number)) is not None:
                    task.cancel()

    async def _answer(self, called: Called) -> None:
        number, scope = called.call, called.scope
        CALL.set(Call(called.request_id, (scope.get("client") or ("", 0))[0]))

        async def send(message: Message) -> None:
            self._taken[number].clear()
            self._post(Sent(number, message))
            await self._taken[number].wait()

        try:
            await self._app(scope, self._heard[number].get, send)
        except Exception as error:
            logger.error("a request failed: %s", called.request_id, exc_info=error)
        finally:
            del self._heard[number], self._taken[number], self._tasks[number]
            self._post(Answered(number))

    def end(self) -> None:
        """End all calls: the API server is gone."""
        for task in self._tasks.values():
            task.cancel()
