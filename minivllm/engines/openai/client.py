"""HTTP to one server, from an event loop in a thread: bounded in size and time, and to no other
address."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Coroutine
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from minivllm.engines.openai.stream import MOST_EVENT
from minivllm.engines.openai.stream_event import (
    MOST_ERROR,
    ServerError,
    served_models,
    server_json,
    server_words,
)
from minivllm.errors import BadInput
from minivllm.platform.processes.channel import prepare_tcp
from minivllm.platform.untrusted import MIB, printable, size

ASK_S = 30.0  # for an answer that should not take any computing, and for a connection
EMPTYING_S = 5.0  # for requests of closed connections to let go of the prefix cache
LOOK_S = 0.1
MOST_ANSWER = 4 * MIB  # of one that is no stream
T = TypeVar("T")


class Client:
    """Asks one server; its methods that are coroutines run in the loop's thread (`wait`, `start`).

    A redirect is an error: it would be a detour in every measured time, and lead away with the key.

    Args:
        url: where the API is: /v1 where it has no path (see `models`). A user and password in it
            are sent as basic authentication, a query with every request.
        key: sent as a bearer token, unless the URL has a user; None for none.
        connections: most requests under way at once.
        knob: the knob that the URL is of, for messages.

    Attributes:
        connections: see above.
        queued_s: how long each request that found no free connection waited for one.

    Raises:
        BadInput: the URL is none.
    """

    def __init__(
        self, url: str, key: str | None, connections: int, knob: str = "engine.url"
    ) -> None:
        self._knob, self.connections = knob, connections
        self.queued_s: list[float] = []
        try:
            parts = urlsplit(url)
            _ = parts.port  # checks it
        except ValueError as error:
            raise BadInput(f"{knob} is no address ({error}); give http://host:port/v1") from None
        self._query = f"?{parts.query}" if parts.query else ""
        self._root = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._may_be_root = not parts.path.strip("/")
        self._path = "/v1" if self._may_be_root else parts.path.rstrip("/")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()
        headers = {"Accept-Encoding": "identity"}
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        elif key and key.strip():
            headers["Authorization"] = f"Bearer {key.strip()}"
        self._session = self.wait(self._open(headers, connections))

    async def _open(self, headers: dict[str, str], connections: int) -> aiohttp.ClientSession:
        queue = aiohttp.TraceConfig()
        queue.on_connection_queued_start.append(self._note_queued)
        queue.on_connection_queued_end.append(self._note_connected)
        return aiohttp.ClientSession(
            trace_configs=[queue],
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=ASK_S),
            connector=aiohttp.TCPConnector(limit=connections, socket_factory=_socket),
            read_bufsize=MOST_EVENT // 2,  # a line may have twice as much
            auto_decompress=False,  # a small answer could become a huge one
        )

    async def _note_queued(self, session: object, request: SimpleNamespace, _: object) -> None:
        request.queued_at = time.monotonic()

    async def _note_connected(self, session: object, request: SimpleNamespace, _: object) -> None:
        self.queued_s.append(time.monotonic() - request.queued_at)

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it in the loop's thread and wait for what it returns or raises."""
        return self.start(coroutine).result()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run it in the loop's thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def address(self, path: str) -> str:
        """Where a path below the API is; free of secrets."""
        return f"{self._root}{self._path}/{path.lstrip('/')}".rstrip("/")

    def beside(self, path: str) -> str:
        """Where a path is that lies beside the API's /v1; free of secrets."""
        return f"{self._root}{self._path.removesuffix('/v1')}/{path.lstrip('/')}"

    def served(self, knob: str = "engine.url") -> dict[str, int | None]:
        """The models of the server, see `served_models`. Raises ServerError besides as `models`."""
        return served_models(self.wait(self.models()), knob)

    async def models(self) -> Any:
        """The JSON value of the server's list of models.

        Where the URL has no path, and only the root of the server has the list, the API is there.

        Raises:
            ServerError: see `ask_json`.
        """
        try:
            return await self.ask_json("models")
        except ServerError:
            if not self._may_be_root:
                raise
            path, self._path = self._path, ""
            try:
                return await self.ask_json("models")
            except (OSError, ServerError):
                self._path = path
            raise

    async def ask(self, method: str, address: str) -> bytes:
        """The body of a short answer.

        Raises:
            ServerError: no connection, a status that is no success, a redirect, or too long an
                answer in size or time.
        """
        timeout = aiohttp.ClientTimeout(total=ASK_S)
        what = f"{method} {address}"
        try:
            async with self._session.request(
                method, address + self._query, timeout=timeout, allow_redirects=False
            ) as response:
                await self._require_success(response, what)
                return await _body(response, MOST_ANSWER, what)
        except TimeoutError:
            raise ServerError(f"{what}: no whole answer within {ASK_S:g} s") from None
        except aiohttp.ClientError as error:
            raise ServerError(_words(error)) from error

    async def ask_json(self, path: str) -> Any:
        """The JSON value of a short answer to GET; see `ask`. Raises ServerError for no JSON,
        too."""
        address = self.address(path)
        return server_json(await self.ask("GET", address), f"GET {address}: the answer")

    async def empty_cache(self, path: str) -> None:
        """Have a server empty its prefix cache, by a POST to a path.

        vLLM answers `{"success": false}` with status 200 where blocks are still held; it is sent
        again for EMPTYING_S.

        Raises:
            ServerError: as of `ask`, or the server says that it did not empty the cache.
        """
        address, deadline = self.beside(path), time.monotonic() + EMPTYING_S
        while not _emptied(body := await self.ask("POST", address)):
            if time.monotonic() > deadline:
                words = printable(body.decode("utf-8", "replace"))[:200]
                raise ServerError(
                    f"POST {address}: the server did not empty its prefix cache in "
                    f"{EMPTYING_S:g} s; it answers {words}"
                )
            await asyncio.sleep(LOOK_S)

    async def lines(self, path: str, body: dict[str, Any]) -> AsyncGenerator[bytes]:
        """The lines of the answer to a POST, as they come.

        Raises:
            ServerError: no connection, a status that is no success, a redirect, or a line that is
                too long.
        """
        try:
            async with self._session.post(
                self.address(path) + self._query, json=body, allow_redirects=False
            ) as response:
                await self._require_success(response)
                while line := await _line(response):
                    yield line
        except aiohttp.ClientError as error:
            raise ServerError(_words(error)) from error

    async def _require_success(self, response: aiohttp.ClientResponse, what: str = "") -> None:
        """Raise ServerError unless the answer is the one expected."""
        prefix = f"{what}: HTTP {response.status}".removeprefix(": ")
        if 300 <= response.status < 400:
            target = server_words(response.headers.get("Location", "nowhere"))
            raise ServerError(
                f"{prefix}: it redirects to {target}, which is not followed; give the final "
                f"address in {self._knob}",
                response.status,
            )
        if not 200 <= response.status < 300:
            text = await _body(response, MOST_ERROR, prefix, cut=True)
            words = server_words(text.decode("utf-8", "replace"))
            raise ServerError(f"{prefix}: {words}", response.status)

    def close(self) -> None:
        """Close all connections and end the thread."""
        self.wait(self._session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _words(error: Exception) -> str:
    return (
        f"{type(error).__name__}: {server_words(str(error))}"
        if str(error)
        else type(error).__name__
    )


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket for a connection, which ends where the server's host or the link to it is gone."""
    made = socket.socket(*address[:3])
    prepare_tcp(made)
    return made


async def _line(response: aiohttp.ClientResponse) -> bytes:
    """The next line; ServerError for one that is too long, which releases of aiohttp say in two
    ways."""
    try:
        return await response.content.readline()
    except (HttpProcessingError, ValueError) as error:
        if isinstance(error, aiohttp.ClientError):
            raise
        raise ServerError(f"a line of the stream is longer than {size(MOST_EVENT)}") from error


async def _body(
    response: aiohttp.ClientResponse, limit: int, what: str, cut: bool = False
) -> bytes:
    """The whole body; ServerError if it is longer than the limit, unless the rest may be left
    out."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit:
            if cut:
                break
            raise ServerError(f"{what}: the answer is longer than {size(limit)}")
    return bytes(body[:limit])


def _emptied(body: bytes) -> bool:
    """Whether the answer of a server does not say that its cache was left as it was."""
    try:
        answer = json.loads(body)
    except ValueError:
        return True  # SGLang answers with a sentence
    return not (isinstance(answer, dict) and answer.get("success") is False)
