"""The engine, in one or in several replicas, as its server starts it, asks it and listens to it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from minivllm.config.groups import Config
from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput
from minivllm.models.vision.inputs import RequestInputs
from minivllm.parallel.handover import Content
from minivllm.processes.handover import Routing
from minivllm.processes.link import EngineLink, end_silent
from minivllm.processes.messages import (
    Abort,
    Piece,
    Prefix,
    Ready,
    Rejected,
    Reset,
    Step,
    Submit,
    ViewFrame,
)
from minivllm.processes.router import CacheShape, RoutedRequest, RoutingFailed
from minivllm.serving.errors import ApiError, internal, unavailable
from minivllm.serving.processes.fleet import Fleet
from minivllm.serving.processes.replicas import CacheReset, Replicas
from minivllm.serving.processes.resizing import Resizing
from minivllm.serving.processes.token_stream import (
    RequestOrigin,
    Streams,
    Submission,
    TokenStream,
    Unfinished,
)

DIED = "the engine has stopped"
DIED_MIDWAY = "the replica that was answering has stopped"


class EngineClient(Streams):
    """Starts the engine's processes and serves requests with them.

    A request goes to the replica that the router chooses. Where that replica dies or falls silent,
    another one computes the rest: of an answer that has begun, from the tokens that its client has.
    Several samples or beams that have begun end with an error. A replica that has died is started
    again. With `parallel.disaggregated` the router chooses among the replicas that compute prompts;
    after the first token another replica continues. A request of several samples, or with images,
    is served whole where its prompt is computed.

    Args:
        config: the resolved configuration.
        slow_reader_pieces: see ServeOptions.
        step_limit_s: see EngineLink.
    """

    def __init__(
        self, config: dict[str, Any], slow_reader_pieces: int, step_limit_s: float = math.inf
    ) -> None:
        super().__init__()
        self._config, self._most_waiting = config, slow_reader_pieces
        view = Config.of(config)
        self._parallel, self._seed = view.parallel, view.measure.seed
        self.routing = Routing(self._parallel, config.get("cache") or {})
        self.submitted: list[Callable[[TokenStream], None]] = []  # called with every request
        self.viewers: list[Callable[[ViewFrame], None]] = []  # called with every frame
        self.ended = asyncio.Event()  # no replica is left
        self.replicas = Replicas(
            self._parallel,
            lambda number: EngineLink(number, self._receive, self._lost, step_limit_s),
        )
        self._unfinished: dict[str, Unfinished] = {}
        self._begun = False  # requests can be routed
        self._count = 0
        self._reset = CacheReset()
        self._last_lost: EngineLink | None = None
        self._fleet = Fleet(config)
        self._watching: asyncio.Task[None] | None = None
        self._resizing = Resizing(
            self.replicas, self._fleet, self.routing, self._release, self._is_idle
        )

    async def start(self) -> Ready:
        """Start the processes and wait until the engines are built; what they say, as of one.

        Raises:
            BadInput: the engine cannot be built with this configuration.
            Crashed: its process failed.
        """
        self._watching = asyncio.ensure_future(end_silent(self.replicas.links))
        self.begin(await self._fleet.start(self.replicas.links))
        return self.replicas.info

    def begin(self, ready: list[Ready]) -> None:
        """Route requests from now on, to engines that are built.

        Args:
            ready: what each replica says of itself.
        """
        caching = (self._config.get("cache") or {}).get("prefix_caching")
        shape = CacheShape(ready[0].block_size, ready[0].num_blocks)
        self.routing.begin(shape if caching else None)
        self._begun = True
        for link in self.replicas.links:
            if not link.is_alive:  # it has died while others were still being built
                self.routing.lose(link.number)
        self._revive([link for link in self.replicas.wanted if not link.is_alive])

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served."""
        return self.replicas.can_serve

    async def exit_reason(self) -> str:
        """Why the engines have stopped."""
        links = self.replicas.links
        failed = next((link for link in links if link.failure), self._last_lost)
        return "nobody knows why" if failed is None else await failed.exit_reason()

    @property
    def replica_events(self) -> dict[str, int]:
        """How often replicas were lost, started again, added and taken away; requests that others
        took over."""
        return {
            **self._resizing.events,
            "restarted": self._fleet.num_restarts,
            "requests_rerouted": self.routing.num_rerouted,
        }

    # ---- requests

    def submit_all(self, requests: Submission) -> list[TokenStream]:
        """Send requests that were admitted, all or none; see `submit`."""
        streams: list[TokenStream] = []
        prompts, params, session, inputs, _, origins = requests
        of_each: Sequence[RequestOrigin | None] = origins or [None] * len(prompts)
        try:
            for ids, origin in zip(prompts, of_each, strict=True):
                streams.append(self.submit(ids, params, session, inputs, origin))
        except ApiError:
            for stream in streams:
                stream.close()
            raise
        return streams

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        session: str | None = None,
        inputs: RequestInputs | None = None,
        origin: RequestOrigin | None = None,
    ) -> TokenStream:
        """Send a request to a replica.

        Args:
            inputs: the images of the prompt.
            session: the conversation or client that it belongs to, for a router that goes by it.
            origin: None: it comes from this process, and is named here.

        Raises:
            ApiError: the engine has stopped, or the router fails.
        """
        if not self.is_alive:
            raise unavailable(DIED)
        self._count += 1
        request_id, arrived_s = origin or RequestOrigin(f"r{self._count}", time.perf_counter())
        if params.seed is None and len(self.replicas.links) > 1:  # replicas would derive equal ones
            params = replace(params, seed=hash((self._seed, self._count)) & (2**63 - 1))
        stream = TokenStream(
            request_id,
            params.n,
            len(prompt_token_ids),
            self._most_waiting,
            self._abort,
            arrived_s,
        )
        keyed = prompt_token_ids if inputs is None else inputs.keyed(prompt_token_ids)
        self._send(
            Unfinished(
                RoutedRequest(request_id, keyed, params.n * (params.max_tokens or 0), session),
                Submit(request_id, prompt_token_ids, params, inputs),
                can_split=params.n == params.beam_width == 1 and inputs is None,
            )
        )
        self.streams[request_id] = stream
        for listener in self.submitted:
            listener(stream)
        return stream

    def _send(self, one: Unfinished) -> None:
        """Have a replica compute a request, or what is left of one that another one had."""
        message, handovers = one.to_send(), self.routing.handovers
        one.link = link = self.replicas.links[self._chosen(one)]
        self._unfinished[message.request_id] = one
        one.is_split = one.can_split and not one.begun and handovers is not None
        if one.is_split and handovers is not None:
            message = message._replace(hands_over=handovers.by(link.number))
        link.send(message)

    def _chosen(self, one: Unfinished) -> int:
        """The replica of a request.

        Raises:
            ApiError: the router fails.
        """
        handovers = self.routing.handovers
        if one.begun and handovers is not None:
            message = one.message
            tokens = [*message.prompt_token_ids, *one.token_ids]
            return handovers.decodes(message.request_id, tokens, message.params)
        try:
            return self.routing.router.route(one.routed)
        except RoutingFailed as error:
            raise internal(str(error)) from None

    def _continue(self, request_id: str, content: Content) -> None:
        """Let another replica continue a request, unless its client has left."""
        handovers = self.routing.handovers
        assert handovers is not None
        handovers.received(request_id, content)
        one = self._unfinished.get(request_id)
        if one is None or not one.is_split or not self.is_alive:
            handovers.end(request_id)
            return
        one.is_split, message = False, one.to_send()
        tokens = [*message.prompt_token_ids, *message.output_token_ids]
        number = self.routing.continues_at(request_id, tokens, message.params)
        one.link = link = self.replicas.links[number]
        link.send(message._replace(prefix=content))

    def _forget(self, request_id: str) -> EngineLink | None:
        """Note that a request has ended; who had it."""
        self.streams.pop(request_id, None)
        one = self._unfinished.pop(request_id, None)
        self.routing.end(request_id)
        return None if one is None else one.link

    def _abort(self, stream: TokenStream) -> None:
        link = self._forget(stream.request_id)
        if link is not None and link.is_alive:
            link.send(Abort(stream.request_id))

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix caches; False where requests are running."""
        if not self.is_alive:
            raise unavailable(DIED)
        living = [link for link in self.replicas.links if link.is_alive]
        done = await self._reset.run(living)
        if done:
            self.routing.router.forget_prefixes()
        return done

    # ---- from the engines

    def _receive(self, link: EngineLink, message: Any) -> None:
        match message:
            case Step():
                self.take_step(message)
            case ViewFrame():
                for viewer in self.viewers:
                    viewer(message)
            case Prefix(request_id, content):
                self._continue(request_id, content)
            case Rejected(request_id, text):
                if (stream := self.streams.get(request_id)) is not None:
                    self._forget(request_id)
                    stream.fail(ApiError(400, text))
            case Reset(done):
                self._reset.note(link, done)

    def _note(self, piece: Piece) -> None:
        if (one := self._unfinished.get(piece.request_id)) is not None:
            one.note(piece)

    # ---- replicas that come and go

    def _lost(self, link: EngineLink) -> None:
        """An engine's process is gone: others take the requests that it has not answered."""
        self._last_lost = link
        self._resizing.events["lost"] += 1
        if self._begun and link.is_wanted and (spare := self.replicas.replace(link)) is not None:
            self.routing.join(spare.number)
        self._release(link)
        if self._begun:
            self._revive([link] if link.is_wanted else [])

    def _revive(self, dead: Sequence[EngineLink]) -> None:
        """Start replicas again, unless no other is left that serves."""
        if not self.is_alive:
            self.ended.set()
            return
        for link in dead:
            self._resizing.revive(link)

    def resize(self, count: int, drain_s: float) -> None:
        """Have so many replicas serve: others are started, or those too many end once they have
        answered what they have.

        Args:
            drain_s: after which others take what such a replica still has.

        Raises:
            ApiError: there cannot be so many, or so few.
        """
        least = self.replicas.num_prefill + 1
        if count < least:
            raise ApiError(400, f"replicas: {least} is the least here", param="replicas")
        try:
            self._fleet.require_room(count)
        except BadInput as error:
            raise ApiError.of(error, "replicas") from None
        self.replicas.resize(count)
        self._resizing.settle(drain_s)

    def _is_idle(self, link: EngineLink) -> bool:
        """Whether a replica has answered all that it had."""
        return all(one.link is not link for one in self._unfinished.values())

    def _release(self, link: EngineLink) -> None:
        """Have other replicas take all that one has."""
        self._reset.note(link, False)
        if self._begun:
            for request_id in self.routing.lose(link.number):
                self._move(request_id, self.is_alive)
            self.replicas.note_gone(link)

    def _move(self, request_id: str, possible: bool) -> None:
        """Have another replica compute what is left of a request, or end it with an error."""
        one, stream = self._unfinished[request_id], self.streams[request_id]
        error = unavailable(DIED)
        if possible and one.can_move:
            try:
                self._send(one)
                return
            except ApiError as failed:
                error = failed
        elif possible:
            error = internal(f"{DIED_MIDWAY}, after {stream.num_output_tokens} tokens")
        self._forget(request_id)
        stream.fail(error)

    async def stop(self) -> None:
        """End the engines' processes."""
        tasks = [*self._resizing.tasks, *([self._watching] if self._watching is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(link.stop() for link in self.replicas.links))
        self._fleet.close()
        self.routing.close()
