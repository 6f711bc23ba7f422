"""What is checked before an API sees a request: its site, its key, its size and its form."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np
from starlette.datastructures import Headers

from minivllm.serving.errors import ApiError, overloaded
from minivllm.serving.http.access import (
    Access,
    ApiKeys,
    OwnNames,
    RouteAccess,
    digest,
    unauthorized,
)
from minivllm.serving.http.calls import CALL, CLIENT_LEFT
from minivllm.serving.options import ServeOptions

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from minivllm.serving.http.calls import Respond

MOST_HEADERS_BYTES = 65_536
MOST_BODIES = 16  # bodies of the largest size that may be on their way at a time
LARGE_BODY = 1 << 20  # bytes, of which Python's values take many times as many
LINGER_S = 2.0  # for a client to read an answer that came before its body had been sent
BYTES_PER_MB = 1e6
# Of the bytes of JSON outside of strings, those that open and close a level.
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_OTHERS = bytes(set(range(256)) - set(b'"[]{}:'))
MOST_PARTS = 100_000  # lists, objects and their members of a body


def outline(body: bytes) -> bytes:
    """The brackets and colons of a text of JSON that lie outside of its strings.

    Only texts that are JSON have a right answer; others are bounded, too.
    """
    # Escaped quotes go first; then each second part between quotes is a string.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHERS)
    return b"".join(plain.split(b'"')[::2])


def depth(parts: bytes) -> int:
    """The most levels of brackets of an outline."""
    levels = _STEPS[np.frombuffer(parts, np.uint8)].cumsum(dtype=np.int32)
    return int(levels.max(initial=0))


def require_form(body: bytes, most_levels: int) -> None:
    """Raise ApiError for JSON with more levels or parts than a parser should see, in a time linear
    in its length."""
    if sum(map(body.count, (b"[", b"{", b":"))) <= most_levels:
        return
    parts = outline(body)
    if depth(parts) > most_levels:
        words = f"the body has more than task.max_depth={most_levels} levels of brackets"
        raise ApiError(400, words)
    if sum(map(parts.count, (b"[", b"{", b":"))) > MOST_PARTS:
        raise ApiError(400, f"the body has more than {MOST_PARTS:,} lists, objects and members")


def _site(origin: str) -> str:
    """The name and the port of an origin; empty where it is no URL."""
    with contextlib.suppress(ValueError):
        return urlsplit(origin).netloc
    return ""


def _name(url: str) -> str:
    """The name of a URL's host; empty where it has none."""
    with contextlib.suppress(ValueError):
        return urlsplit(url).hostname or ""
    return ""


class Limits:
    """Middleware: refuses a request before an API sees it, and hands over its whole body.

    Args:
        app: the APIs.
        options: the limits.
        routes: what each path needs of those who call it.
        keys: of clients.
        respond: an answer with an error, in the form of the API that was called.
        count: counts what clients did, by name.
        admit: raises ApiError where no further request may wait for the engine.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: ServeOptions,
        routes: RouteAccess,
        keys: ApiKeys,
        respond: Respond,
        count: Callable[[str], None],
        admit: Callable[[], None],
    ) -> None:
        self.app, self._options, self._keys, self._routes = app, options, keys, routes
        self._respond, self._count, self._admit = respond, count, admit
        self._most = int(options.max_body_mb * BYTES_PER_MB)
        self._held = 0  # bytes of bodies on their way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        is_http, body = scope["type"] == "http", b""
        access = self._routes.of(scope)
        try:
            self._check_head(scope, access)
            if is_http:
                if Access.ENGINE in access:  # refusing is what an overloaded server does most
                    self._admit()
                body = await self._body(scope, receive)
        except ApiError as error:
            await self._refuse(error, scope, receive, send)
            return
        try:
            self._check_form(scope, body)
        except ApiError as error:
            await self._respond(scope, error)(scope, receive, send)
            return
        if is_http and scope["method"] == "HEAD" and Access.OPEN in access:
            scope, send = {**scope, "method": "GET"}, _without_body(send)
        left: list[Message] = []
        is_large = len(body) >= LARGE_BODY
        if is_http:
            left.append({"type": "http.request", "body": body, "more_body": False})
        del body

        async def given() -> Message:
            return left.pop() if left else await receive()

        try:
            await self.app(scope, given, send)
        finally:
            if is_large:
                await asyncio.to_thread(return_memory)

    def _check_head(self, scope: Scope, access: Access) -> None:
        """Raise ApiError for a head that is too large, or whose sender may not call."""
        headers = Headers(scope=scope)
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size + len(scope.get("raw_path") or b"") > MOST_HEADERS_BYTES:
            raise ApiError(431, "the headers are too large")
        given = self._keys.given(headers)
        fitting = [key for key in given if self._keys.fit(key)]
        fits = bool(fitting)
        if fits and (call := CALL.get()) is not None:
            call.key = digest(fitting[0]).hex()
        self._check_site(scope, headers, access)
        if scope["type"] == "websocket":
            # A browser cannot send headers with a WebSocket: its first message may have the key.
            scope["state"]["has_key"] = fits or not self._keys
            needs_key = bool(given)
        else:
            needs_key = Access.OPEN not in access
        if self._keys and needs_key and not fits:
            self._count("unauthorized")
            raise unauthorized()

    def _check_site(self, scope: Scope, headers: Headers, access: Access) -> None:
        """Raise ApiError for a page of another site.

        A name of another site may lead to this machine (DNS rebinding), which makes all that a
        server answers a part of that site: without keys it goes by its own names only. A browser
        lets a page of any site open WebSockets, and post what has no body.
        """
        own = OwnNames(self._options, (scope.get("server") or ("",))[0])
        hosts, origin = headers.getlist("host"), headers.get("origin")
        if not self._keys and not all(own.has(_name(f"//{host}")) for host in hosts):
            raise ApiError(
                403, "this name of the server is not one of its own: see task.allowed_hosts"
            )
        allowed = self._options.cors_origins
        if origin is None or "*" in allowed or origin in allowed:
            return
        is_command = scope["type"] == "websocket" or Access.COMMAND in access
        is_other = is_command and _site(origin) != headers.get("host")
        if is_other or (not self._keys and not own.has(_name(origin))):
            raise ApiError(403, "this origin may not call: see task.cors_origins")

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body.

        Raises:
            ApiError: it is too large or too slow.
        """
        most = self._most
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdigit() and int(length) > most:
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._options.client_timeout_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(CLIENT_LEFT, "the client has left")
                    parts.append(message.get("body", b""))
                    more = message.get("more_body", False)
                    size += len(parts[-1])
                    self._held += len(parts[-1])
                    if size > most:
                        raise self._too_large()
                    if self._held > MOST_BODIES * most:
                        raise overloaded("too many bodies are on their way", 1)
        except TimeoutError:
            self._count("slow_senders")
            raise ApiError(
                408,
                "the body did not arrive in time: see task.client_timeout_s",
                kind="timeout_error",
            ) from None
        finally:
            self._held -= size
        return b"".join(parts)

    def _check_form(self, scope: Scope, body: bytes) -> None:
        """Raise ApiError for a body that is not JSON, or too deep.

        A page of another site can make a browser post a text or a form without asking, but no JSON.
        """
        if body:
            kind = Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json" and not kind.endswith("+json"):
                raise ApiError(415, "the body must be JSON: content-type: application/json")
            require_form(body, self._options.max_depth)

    def _too_large(self) -> ApiError:
        most = self._options.max_body_mb
        return ApiError(413, f"the body is larger than task.max_body_mb={most:g}")

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer before the body has been read, so that the client still reads the answer: the
        connection stays open until its body has come, for a moment at most."""
        answer = self._respond(scope, error)
        if error.status == 401:
            answer.headers["www-authenticate"] = "Bearer"
        if scope["type"] == "websocket":
            await answer(scope, receive, send)
            return
        answer.headers["connection"] = "close"

        async def unfinished(message: Message) -> None:
            is_body = message["type"] == "http.response.body"
            await send({**message, "more_body": True} if is_body else message)

        await answer(scope, receive, unfinished)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _without_body(send: Send) -> Send:
    """Send an answer's head and nothing behind it."""

    async def head(message: Message) -> None:
        is_body = message["type"] == "http.response.body"
        await send({**message, "body": b""} if is_body else message)

    return head


def return_memory() -> None:
    """Return to the system what the values of a large body took, which malloc would keep."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
