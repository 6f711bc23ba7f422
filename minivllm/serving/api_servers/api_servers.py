"""The API servers of a server: processes that answer clients on one socket, and what the process
with the engines does for them."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minivllm.processes.link import ProcessLink, end_silent
from minivllm.processes.messages import Abort, EngineState, Step
from minivllm.processes.started import LocalProcess
from minivllm.serving.api_servers.messages import (
    ApiServerReady,
    ApiServerStart,
    CallCancelled,
    CallEnded,
    ClientCounts,
    Drain,
    End,
    FromClient,
    MessageDelivered,
    NewRequests,
    RelayedCall,
    RequestFailed,
)
from minivllm.serving.api_servers.relay import RelayedCalls
from minivllm.serving.errors import ApiError, internal
from minivllm.serving.http.access import Accesses
from minivllm.serving.http.calls import CALL, Call
from minivllm.serving.processes.fleet import Restarts
from minivllm.serving.processes.token_stream import Queued, TokenStream
from minivllm.serving.service import EngineService

if TYPE_CHECKING:
    from starlette.types import ASGIApp

logger = logging.getLogger("minivllm.serving")

MODULE = "minivllm.serving.api_servers.api_server"
QUEUE_S = 0.05  # between two looks at how much waits for the engine
NO_STATE = EngineState(0, 0, 0, None)  # which an API server needs not


class ApiServerLink(ProcessLink):
    """The process of one API server and the connection to it.

    Args:
        number: its place among them.
        service: serves its requests.
        app: answers the calls that it relays.
        lost: called when its process is gone.
    """

    ready_kind = ApiServerReady

    def __init__(
        self,
        number: int,
        service: EngineService,
        app: ASGIApp,
        lost: Callable[[ApiServerLink], None],
    ) -> None:
        super().__init__()
        self.number, self._service, self._app, self._on_lost = number, service, app, lost
        self.streams: dict[str, TokenStream] = {}  # of its requests that have not ended
        self._calls: dict[int, Call] = {}  # that have requests
        self._relayed = RelayedCalls(app, self.send)

    def take(self, message: Any) -> None:
        """Take a message of the API server."""
        match message:
            case NewRequests():
                self._begin(message)
            case Abort(request_id):
                if (stream := self.streams.pop(request_id, None)) is not None:
                    stream.close()
            case CallEnded(number):
                if (call := self._calls.pop(number, None)) is not None:
                    call.end()
            case RelayedCall() | FromClient() | MessageDelivered() | CallCancelled():
                self._relayed.take(message)
            case ClientCounts(counts, statuses):
                self._service.counts.update(counts)
                self._service.statuses.update(statuses)

    def _begin(self, new: NewRequests) -> None:
        """Send requests to the engines, or say why not."""
        call = self._calls.get(new.call)
        if call is None:
            call = Call("", "", began_s=new.came_s, session=new.session)
            self._calls[new.call] = call
        token = CALL.set(call)
        try:
            streams = self._service.relay(
                new.prompts, new.params, new.inputs, new.arrived_s, new.is_admitted
            )
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.error("requests failed: %s", [*new.prompts], exc_info=error)
                error = internal("the server made a mistake; see its log")
            for name in new.prompts:
                self.send(RequestFailed(name, error))
            return
        finally:
            CALL.reset(token)
        for stream in streams:
            self.streams[stream.request_id] = stream
            stream.on_over.append(self._note_over)

    def _note_over(self, stream: TokenStream) -> None:
        """Note the end soon: the step that ends a request is sent before."""
        asyncio.get_running_loop().call_soon(self._note_end, stream)

    def _note_end(self, stream: TokenStream) -> None:
        if self.streams.pop(stream.request_id, None) is not None and stream.error is not None:
            self.send(RequestFailed(stream.request_id, stream.error))

    def gone(self) -> None:
        """End what the process has begun; the next one begins from nothing."""
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.close()
        for call in self._calls.values():
            call.end()
        self._calls.clear()
        self._relayed.end()
        self._relayed = RelayedCalls(self._app, self.send)
        self._on_lost(self)


class ApiServers:
    """Processes that answer clients. One that dies or falls silent is started again; the requests
    of its clients end with it.

    Args:
        config: the resolved configuration.
        service: of this process.
        app: answers what concerns the whole server.
        relayed: what the routes of calls declare that do.
    """

    def __init__(
        self, config: dict[str, Any], service: EngineService, app: ASGIApp, relayed: Accesses
    ) -> None:
        self._service, count = service, service.options.api_server_count
        facts = (service.model, service.created, service.info, relayed)
        self._first = ApiServerStart(0, config, *facts)
        self.links = [ApiServerLink(n, service, app, self._lost) for n in range(count)]
        self._restarts = Restarts()
        self._restarting: set[asyncio.Task[None]] = set()
        self._watching: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._is_started = self._is_ending = False
        self._num_started = 0
        self._queue = Queued(0, 0)  # as it was sent last
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
        watching = (end_silent(self.links), self._send_queue())
        self._watching = [*map(asyncio.ensure_future, watching)]
        await asyncio.gather(*map(self._start, self.links))
        self._is_started = True
        for link in self.links:
            if not link.is_alive:  # it has died while others were still being built
                self._lost(link)
        self._note_pids()

    async def _start(self, link: ApiServerLink) -> None:
        """The start of one that has not been started before; see `start`."""
        await link.start_first(self._name_of(link), *self._next())

    def _name_of(self, link: ApiServerLink) -> str:
        return f"API server {link.number} of {len(self.links)}"

    def _next(self) -> tuple[LocalProcess, ApiServerStart]:
        """A process, and its first message."""
        self._num_started += 1
        first = self._first._replace(number=self._num_started)
        return LocalProcess(MODULE, [self._listener]), first

    async def serve(self) -> None:
        """Wait until no API server is left."""
        while self._restarting or any(link.is_alive for link in self.links):
            self._changed.clear()
            await self._changed.wait()

    def drain(self) -> None:
        """Have them take no further requests, and start none again."""
        self._end_restarts()
        self._send(Drain())

    def end(self, at_once: bool = False) -> None:
        """End them once the answers that are complete are read, or at once."""
        self._is_ending = True
        self._end_restarts()
        self._send(End(at_once))

    def _end_restarts(self) -> None:
        for task in self._restarting:
            task.cancel()
        for link in self.links:
            if not link.is_alive:
                link.cut()

    def _send(self, message: Any) -> None:
        for link in self.links:
            link.send(message)

    async def stop(self) -> None:
        """End what is left of them."""
        self._is_ending = True
        for task in (*self._watching, *self._restarting):
            task.cancel()
        await asyncio.gather(*(link.stop() for link in self.links))

    # ---- what they share

    def _share(self, step: Step) -> None:
        """Send each what a step gave to its requests."""
        for link in self.links:
            pieces = [piece for piece in step.pieces if piece.request_id in link.streams]
            begun = [one for one in step.begun if one[0] in link.streams]
            for piece in pieces:
                link.streams[piece.request_id].drop()
            if pieces or begun:
                link.send(Step(step.time_s, pieces, NO_STATE, begun))

    async def _send_queue(self) -> None:
        """Send how much waits for the engine whenever that has changed, until this is cancelled."""
        while True:
            await asyncio.sleep(QUEUE_S)
            queue = self._service.client.queue
            if queue != self._queue:
                self._queue = queue
                self._send(queue)

    # ---- those that die

    def _lost(self, link: ApiServerLink) -> None:
        self._note_pids()
        self._changed.set()
        if not self._is_started or self._is_ending or self._service.is_draining:
            return
        self._service.count("api_servers_lost")
        task = asyncio.ensure_future(self._again(link))
        self._restarting.add(task)
        task.add_done_callback(self._note_restart)

    def _note_restart(self, task: asyncio.Task[None]) -> None:
        self._restarting.discard(task)
        self._changed.set()

    async def _again(self, link: ApiServerLink) -> None:
        """Start one again that has died, each try later than the one before."""
        which = self._name_of(link)
        reason = await link.exit_reason()
        self._restarts.note_death(link.number)
        print(f"warning: {which} has stopped ({reason})", file=sys.stderr)

        async def start() -> None:
            await link.restart(*self._next())

        if await self._restarts.until_it_serves(link.number, which, start):
            link.send(self._queue)
            self._note_pids()
            print(f"{which} serves again", file=sys.stderr)

    def _note_pids(self) -> None:
        alive = (link for link in self.links if link.is_alive)
        self._service.api_servers = [link.pid for link in alive if link.pid is not None]
