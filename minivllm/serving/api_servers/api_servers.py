"""The API servers of a server: processes that answer clients on one socket, and what the process
with the engines does for them."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm.errors import Crashed
from minivllm.platform.processes.heartbeat import BEAT_S
from minivllm.serving.api_servers.messages import (
    Begin,
    Called,
    CallEnded,
    ClientsCounted,
    Drain,
    End,
    Ended,
    Heard,
    Left,
    Serving,
    Share,
    Submitted,
    Taken,
)
from minivllm.serving.api_servers.relay import RelayedCalls
from minivllm.serving.errors import ApiError
from minivllm.serving.http.calls import CALL, Call
from minivllm.serving.processes.engine_client import Given
from minivllm.serving.processes.messages import Abort, Piece, Step
from minivllm.serving.processes.process_link import ProcessLink
from minivllm.serving.processes.restarts import Restarts
from minivllm.serving.processes.started import LocalServerProcess
from minivllm.serving.processes.token_stream import TokenStream
from minivllm.serving.service import EngineService

if TYPE_CHECKING:
    from starlette.types import ASGIApp

MODULE = "minivllm.serving.api_servers.api_server"


class ApiServerLink(ProcessLink):
    """The process of one API server and the connection to it.

    Args:
        number: its place among them.
        service: serves its requests.
        app: answers the calls that it relays.
        lost: told when its process is gone.
    """

    ready_kind = Serving

    def __init__(
        self,
        number: int,
        service: EngineService,
        app: ASGIApp,
        lost: Callable[[ApiServerLink], None],
    ) -> None:
        super().__init__()
        self.number, self._service, self._on_lost = number, service, lost
        self.streams: dict[str, TokenStream] = {}  # of its requests that have not ended
        self._calls: dict[int, Call] = {}  # that have requests
        self._relayed = RelayedCalls(app, self.send)

    def take(self, message: Any) -> None:
        """Take a message of the API server."""
        match message:
            case Submitted():
                self._submit(message)
            case Abort(request_id):
                if (stream := self.streams.pop(request_id, None)) is not None:
                    stream.close()
            case CallEnded(number):
                if (call := self._calls.pop(number, None)) is not None:
                    call.end()
            case Called() | Heard() | Taken() | Left():
                self._relayed.take(message)
            case ClientsCounted(counts, statuses):
                self._service.counts.update(counts)
                self._service.statuses.update(statuses)

    def _submit(self, message: Submitted) -> None:
        call = self._calls.get(message.call)
        if call is None:
            call = Call("", "", began_s=message.came_s, session=message.session)
            self._calls[message.call] = call
        token = CALL.set(call)
        try:
            stream = self._service.relay(
                Given(message.request_id, message.arrived_s),
                message.prompt_token_ids,
                message.params,
                message.inputs,
                message.is_admitted,
            )
        except ApiError as error:
            self.send(Ended(message.request_id, error))
            return
        finally:
            CALL.reset(token)
        self.streams[message.request_id] = stream
        stream.on_over.append(self._note_over)

    def _note_over(self, stream: TokenStream) -> None:
        """Tell the end soon: the step that ends a request is told before."""
        asyncio.get_running_loop().call_soon(self._tell_end, stream)

    def _tell_end(self, stream: TokenStream) -> None:
        if self.streams.pop(stream.request_id, None) is not None and stream.error is not None:
            self.send(Ended(stream.request_id, stream.error))

    def gone(self) -> None:
        """End what the process had asked for."""
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.close()
        for call in self._calls.values():
            call.end()
        self._calls.clear()
        self._relayed.end()
        self._on_lost(self)


class _Part(NamedTuple):
    """What a step gave to the requests of one API server."""

    pieces: list[Piece]
    begun: list[tuple[str, float]]


class ApiServers:
    """Processes that answer clients. One that dies or falls silent is started again; the requests
    of its clients end with it.

    Args:
        config: the resolved configuration.
        service: of this process.
        app: answers what is asked of the whole server.
        paths: of calls that are of the whole server.
    """

    def __init__(
        self, config: dict[str, Any], service: EngineService, app: ASGIApp, paths: frozenset[str]
    ) -> None:
        self._service, count = service, service.options.api_server_count
        self._begin = Begin(0, config, service.model, service.created, service.info, paths)
        self.links = [ApiServerLink(n, service, app, self._lost) for n in range(count)]
        self._restarts = Restarts()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._ending = False
        self._num_started = 0
        service.client.listeners.append(self._share)

    async def start(self, listener: socket.socket) -> None:
        """Start all, and wait until they answer clients.

        Args:
            listener: a socket with an address.

        Raises:
            BadInput: they cannot be built with this configuration.
            Crashed: a process failed.
        """
        self._listener = listener
        starts = (link.start(*self._next()) for link in self.links)
        self._watching = asyncio.ensure_future(self._watch())
        try:
            await asyncio.gather(*starts)
        except Crashed as error:
            raise Crashed(f"an API server does not start: {error}") from None
        self._note_pids()

    def _next(self) -> tuple[LocalServerProcess, Begin]:
        """A process, and what it is to do."""
        self._num_started += 1
        begin = self._begin._replace(number=self._num_started)
        return LocalServerProcess(MODULE, [self._listener]), begin

    async def serve(self) -> None:
        """Wait until no API server is left."""
        while self._tasks or any(link.is_alive for link in self.links):
            self._changed.clear()
            await self._changed.wait()

    def drain(self) -> None:
        """Have them take no further requests."""
        self._send(Drain())

    def end(self, at_once: bool = False) -> None:
        """End them once the answers that are complete are read, or at once."""
        self._ending = True
        for task in self._tasks:
            task.cancel()
        self._send(End(at_once))

    def _send(self, message: Any) -> None:
        for link in self.links:
            link.send(message)

    async def stop(self) -> None:
        """End what is left of them."""
        self._ending = True
        self._watching.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(link.stop() for link in self.links))

    # ---- what they share

    def _share(self, step: Step) -> None:
        """Send each what a step gave to its requests."""
        parts: dict[ApiServerLink, _Part] = defaultdict(lambda: _Part([], []))
        for link in self.links:
            for piece in step.pieces:
                if (stream := link.streams.get(piece.request_id)) is not None:
                    stream.drop()
                    parts[link].pieces.append(piece)
            for first in step.begun:
                if first[0] in link.streams:
                    parts[link].begun.append(first)
        queue, state = self._service.client.queue, step.state._replace(counters=None)
        for link, (pieces, begun) in parts.items():
            link.send(Share(Step(step.time_s, pieces, state, begun), *queue))

    # ---- those that die

    def _lost(self, link: ApiServerLink) -> None:
        self._note_pids()
        self._changed.set()
        if self._ending or self._service.is_draining:
            return
        self._service.count("api_servers_lost")
        task = asyncio.ensure_future(self._again(link))
        self._tasks.add(task)
        task.add_done_callback(self._tended)

    def _tended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed.set()

    async def _again(self, link: ApiServerLink) -> None:
        """Start one again that has died, each try later than the one before."""
        which = f"API server {link.number} of {len(self.links)}"
        words = await link.last_words()
        self._restarts.note_death(link.number)
        print(f"warning: {which} has stopped ({words})", file=sys.stderr)

        async def start() -> None:
            await link.restart(*self._next())

        if await self._restarts.until_it_serves(link.number, which, start):
            self._note_pids()
            print(f"{which} serves again", file=sys.stderr)

    def _note_pids(self) -> None:
        alive = (link for link in self.links if link.is_alive)
        self._service.api_servers = [link.pid for link in alive if link.pid is not None]

    async def _watch(self) -> None:
        """End those that are silent for too long, until this is cancelled."""
        while True:
            await asyncio.sleep(BEAT_S)
            for link in self.links:
                link.end_if_silent()
