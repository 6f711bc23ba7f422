"""Calls: one request of HTTP each, with its id, its client and its line in the log."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from starlette.datastructures import Headers, MutableHeaders

from minivllm.redaction import hide
from minivllm.serving.errors import ApiError, internal
from minivllm.serving.http.access import Access, RouteAccess

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from minivllm.serving.processes.token_stream import TokenStream

    Respond = Callable[[Scope, ApiError], Response]

logger = logging.getLogger("minivllm.serving")

CLIENT_LEFT = 499  # nginx's status for a client that closed its connection
MOST_LOGGED = 100_000  # characters of a body that `task.log_prompts` writes
MOST_IGNORED, LONGEST_IGNORED = 64, 100  # parts of a body in a line, and characters of each
REQUEST_ID = ("x-request-id", "request-id")  # headers, as OpenAI and as Anthropic name them
_PLAIN = re.compile(r"[\x21-\x7e]{1,128}")


class Connection(Protocol):
    """The connection of a call, as far as the call needs it."""

    on_lost: set[Callable[[], None]]

    def cut_off(self) -> None:
        """Close it at once, with what waits to be written."""


@dataclass(eq=False)
class Call:
    """One request of HTTP, or one of a WebSocket.

    Args:
        request_id: the client's own, or a new one.
        client: its host.
        connection: None where the server is not ours, as in a test without sockets.
        streams: what the engine makes for it.
        has_left: the client has closed its connection.
        session: what the client calls its conversation, in the header x-session-id.
        key: a digest of the key that it has called with.
        on_end: called once its answer is written.
    """

    request_id: str
    client: str
    connection: Connection | None = None
    streams: list[TokenStream] = field(default_factory=list)
    has_left: bool = False
    began_s: float = field(default_factory=time.perf_counter)
    session: str | None = None
    key: str | None = None
    on_end: list[Callable[[], None]] = field(default_factory=list)
    is_over: bool = False
    ignored: list[str] = field(default_factory=list)  # parts of the body that changed no answer

    @property
    def account(self) -> str:
        """Who waits for a turn: those with one key, or those of one host."""
        return self.key or self.client

    def end(self) -> None:
        """Note that its answer is written, or will never be."""
        self.is_over = True
        for listener in self.on_end:
            listener()

    def leave(self) -> None:
        """Note that the client has left: its requests end in the engine, too."""
        self.has_left = True
        for stream in self.streams:
            stream.close()

    def cut_off(self) -> None:
        """Close the connection of a client that does not read."""
        if self.connection is not None:
            self.connection.cut_off()

    def summary(self) -> dict[str, Any]:
        """What it took, for the log; times in milliseconds."""
        begin, streams = self.began_s, self.streams
        found: dict[str, Any] = {"ms": _ms(time.perf_counter() - begin)}
        if streams:
            found |= {
                "prompt_tokens": sum(stream.num_prompt_tokens for stream in streams),
                "cached_tokens": sum(stream.num_cached_tokens for stream in streams),
                "output_tokens": sum(stream.num_output_tokens for stream in streams),
                "finish_reason": streams[-1].finish_reason,
            }
            firsts = [s.first_token_s for s in streams if s.first_token_s is not None]
            begun = [stream.begun_s for stream in streams if stream.begun_s is not None]
            found |= {"queue_ms": _ms(min(begun) - begin)} if begun else {}
            found |= {"ttft_ms": _ms(min(firsts) - begin)} if firsts else {}
        return found | ({"ignored": self.ignored} if self.ignored else {})


def _ms(seconds: float) -> float:
    return round(1e3 * max(seconds, 0.0), 2)


# The call that the running code serves; tasks that it starts inherit it.
CALL: ContextVar[Call | None] = ContextVar("call", default=None)


def ignore(what: str) -> None:
    """Note in the call's line that a part of its body is ignored: it changes no answer here, or a
    server may leave it out."""
    call = CALL.get()
    if call is not None and len(call.ignored) < MOST_IGNORED:
        call.ignored.append(what[:LONGEST_IGNORED])


def account() -> str:
    """Whose turn it is in the running code; see `Call.account`."""
    call = CALL.get()
    return "" if call is None else call.account


def request_id_of(given: str | None) -> str:
    """A client's id where it is short and plain, else a new one."""
    return given if given and _PLAIN.fullmatch(given) else uuid.uuid4().hex


class Calls:
    """Middleware: gives every call its id, ends it when its client leaves, and logs it.

    Args:
        app: serves the calls.
        respond: an answer with an error, in the form of the API that was called.
        routes: which calls are not logged.
        count: counts what clients did, by name.
        statuses: counts answers.
        log_prompts: write bodies and answers, too.
    """

    def __init__(
        self,
        app: ASGIApp,
        respond: Respond,
        routes: RouteAccess,
        count: Callable[[str], None],
        statuses: Counter[int],
        log_prompts: bool,
    ) -> None:
        self.app, self._respond, self._routes, self._count = app, respond, routes, count
        self._statuses, self._log_prompts = statuses, log_prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a call."""
        call = Call(
            request_id_of(Headers(scope=scope).get("x-request-id")),
            (scope.get("client") or ("", 0))[0],
            scope.get("state", {}).get("connection"),
            session=Headers(scope=scope).get("x-session-id"),
        )
        token = CALL.set(call)
        try:
            if scope["type"] == "http":
                await self._serve(call, scope, receive, send)
            else:
                await self.app(scope, receive, send)
        finally:
            CALL.reset(token)

    async def _serve(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0
        texts: dict[str, str] = {}

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name in REQUEST_ID:
                    headers[name] = call.request_id
                if call.streams:  # as the live view names it
                    headers["x-engine-request-id"] = call.streams[0].request_id
            elif self._log_prompts:
                _append(texts, "answer", message)
            await send(message)

        async def heard() -> Message:
            message = await receive()
            if self._log_prompts:
                _append(texts, "body", message)
            return message

        connection = call.connection
        if connection is not None:
            connection.on_lost.add(call.leave)
        try:
            await self.app(scope, heard, noted)
        except Exception as error:
            logger.error("a request failed: %s", call.request_id, exc_info=error)
            if status:
                call.cut_off()  # an answer that has begun has no other way to say that it is wrong
            else:
                answer = self._respond(scope, internal("the server made a mistake; see its log"))
                await answer(scope, receive, noted)
        finally:
            call.end()
            if connection is not None:
                connection.on_lost.discard(call.leave)
            if call.has_left:
                status = CLIENT_LEFT
                self._count("clients_left")
            self._statuses[status] += 1
            if Access.QUIET not in self._routes.of(scope):
                path = scope["path"][:200]
                path = path if self._routes.has(path) else hide(path)  # a client's own words
                words = {"method": scope["method"], "path": path}
                log_call(call, {**words, "status": status, **call.summary(), **texts})


def log_call(call: Call, fields: dict[str, Any]) -> None:
    """Write the line of a call."""
    known = {"request_id": call.request_id, "client": call.client}
    logger.info("request", extra={"fields": {**known, **fields}})


def _append(texts: dict[str, str], name: str, message: MutableMapping[str, Any]) -> None:
    room = MOST_LOGGED - len(texts.get(name, ""))
    if room > 0 and (data := message.get("body")):
        texts[name] = texts.get(name, "") + data[:room].decode("utf-8", "replace")
