"""The engine as the process of HTTP sees it, in one process or in several replicas: it is started,
asked, and listened to by asyncio."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from minivllm.bench.hardware.gpu import replica_gpus
from minivllm.cluster.actors import RayActors
from minivllm.cluster.handover import make_handovers
from minivllm.cluster.placement import ALONE, placements
from minivllm.cluster.router import CacheShape, RoutedRequest, RoutingFailed, make_router
from minivllm.config.typed import Config
from minivllm.engine.options import SamplingParams
from minivllm.models.vision.inputs import RequestInputs
from minivllm.parallel.handover import make_folder
from minivllm.serving.errors import ApiError, internal, too_late, unavailable
from minivllm.serving.processes.engine_link import EngineLink
from minivllm.serving.processes.messages import (
    Abort,
    EngineState,
    HandedOver,
    Piece,
    Ready,
    Rejected,
    Reset,
    ResetPrefixCache,
    Step,
    Submit,
    ViewFrame,
    Watch,
)
from minivllm.serving.processes.started import MODULE, ActorEngine, LocalEngine, StartedEngine
from minivllm.serving.processes.token_stream import TokenStream

DIED = "the engine has stopped"
DIED_MIDWAY = "the replica that was answering has stopped"


class EngineClient:
    """Starts the engine's processes and serves requests with them.

    A request goes to the replica that the router chooses. Where that replica dies before it has
    answered, another one gets the request; an answer that has begun ends with an error. With
    `parallel.disaggregated` the router chooses among the replicas that compute prompts; after the
    first token another replica continues. A request of several samples, or with images, is served
    whole where its prompt is computed.

    Args:
        config: the resolved configuration.
        slow_reader_pieces: see ServeOptions.
    """

    def __init__(self, config: dict[str, Any], slow_reader_pieces: int) -> None:
        self._config, self._most_waiting = config, slow_reader_pieces
        view = Config.of(config)
        self._parallel, self._seed = view.parallel, view.measure.seed
        folder = make_folder(self._parallel, config.get("cache") or {})
        self.handovers = make_handovers(self._parallel, folder)
        self.streams: dict[str, TokenStream] = {}  # that have not ended
        self.listeners: list[Callable[[Step], None]] = []  # told of every step
        self.submitted: list[Callable[[TokenStream], None]] = []  # told of every request
        self.viewers: list[Callable[[ViewFrame], None]] = []  # told of every frame
        self.ended = asyncio.Event()  # no replica is left
        self._links = [
            EngineLink(number, self._receive, self._lost)
            for number in range(self._parallel.replicas)
        ]
        self._at: dict[str, EngineLink] = {}  # who has each request
        # Requests of which nothing has come back, and whether another replica may continue them.
        self._unanswered: dict[str, tuple[RoutedRequest, Submit, bool]] = {}
        self._to_continue: dict[str, Submit] = {}  # requests that are to be handed over
        self._begun = False  # requests can be routed
        self._count = 0
        self._reset: asyncio.Future[bool] | None = None
        self._resetting: set[EngineLink] = set()  # who has not answered yet
        self._watched: EngineLink | None = None
        self._last_lost: EngineLink | None = None
        self._actors: RayActors | None = None
        self._warnings: set[asyncio.Task[None]] = set()  # that are being made

    async def start(self) -> Ready:
        """Start the processes and wait until the engines are built; what they say, as of one.

        Raises:
            BadInput: the engine cannot be built with this configuration.
            RuntimeError: its process failed.
        """
        if len(self._links) == 1:
            self.begin([await self._links[0].start(LocalEngine(), self._config)])
            return self.info
        runtime = self._config["runtime"]
        if self._parallel.backend == "ray":
            asked = partial(replica_gpus, self._config)
            self._actors = RayActors(f"{MODULE}.serve", self._config["parallel"], runtime, asked)
            places = self._actors.places
        else:
            gpus, ranks = replica_gpus(self._config), self._parallel.tensor
            places = placements(runtime, len(self._links), gpus, ranks)
        starts = []
        for link, place in zip(self._links, places, strict=True):
            config = {**self._config, "runtime": place}
            config["parallel"] = {**self._config["parallel"], **ALONE}
            starts.append(asyncio.ensure_future(link.start(await self._started(), config)))
        self.begin(await asyncio.gather(*starts))
        return self.info

    async def _started(self) -> StartedEngine:
        """The next process."""
        if self._actors is None:
            return LocalEngine()
        return ActorEngine(await asyncio.to_thread(self._actors.start))

    def begin(self, ready: list[Ready]) -> None:
        """Route requests from now on, to engines that are built.

        Args:
            ready: what each replica says of itself.
        """
        caching = (self._config.get("cache") or {}).get("prefix_caching")
        shape = CacheShape(ready[0].block_size, ready[0].num_blocks)
        self.router = make_router(self._parallel, shape if caching else None)
        self.info = ready[0]._replace(
            max_num_seqs=sum(one.max_num_seqs for one in ready),
            num_blocks=sum(one.num_blocks for one in ready),
            warnings=list(dict.fromkeys(text for one in ready for text in one.warnings)),
        )
        self._begun = True
        for link in self._links:
            if not link.is_alive:  # it has died while others were still being built
                self._lose(link.number)

    def _lose(self, number: int) -> list[str]:
        """Note that a replica is dead, for who chooses among those of its kind; its requests."""
        if self.handovers is None:
            return self.router.lose(number)
        self.handovers.lose(number)
        if number >= self.handovers.num_prefill:
            return self.handovers.decoders.lose(number - self.handovers.num_prefill)
        return self.router.lose(number)

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served: a replica lives, with `parallel.disaggregated` one of
        each kind."""
        count = self._parallel.prefill_replicas if self._parallel.disaggregated else 0
        kinds = self._links[:count], self._links[count:]
        return all(any(link.is_alive for link in kind) for kind in kinds if kind)

    async def last_words(self) -> str:
        """Why the engines have stopped."""
        failed = next((link for link in self._links if link.failure), self._last_lost)
        return "nobody knows why" if failed is None else await failed.last_words()

    @property
    def pids(self) -> list[int]:
        """Process ids of the engines that are on this machine."""
        return [link.pid for link in self._links if link.pid is not None]

    @property
    def state(self) -> EngineState:
        """Sums over the replicas that live."""
        states = [link.state for link in self._links if link.is_alive]
        return EngineState(
            sum(state.num_running for state in states),
            sum(state.num_waiting for state in states),
            sum(state.num_used_blocks for state in states),
            None,
        )

    @property
    def counters(self) -> dict[str, float]:
        """Sums over all replicas: counters grow, so those of the dead stay."""
        names = dict.fromkeys(name for link in self._links for name in link.counters)
        return {name: sum(link.counters.get(name, 0.0) for link in self._links) for name in names}

    # ---- requests

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        session: str | None = None,
        inputs: RequestInputs | None = None,
    ) -> TokenStream:
        """Send a request to a replica.

        Args:
            inputs: the images of the prompt.
            session: the conversation or client that it belongs to, for a router that goes by it.

        Raises:
            ApiError: the engine has stopped, or the router fails.
        """
        if not self.is_alive:
            raise unavailable(DIED)
        self._count += 1
        request_id = f"r{self._count}"
        if params.seed is None and len(self._links) > 1:  # replicas would derive equal ones
            params = replace(params, seed=hash((self._seed, self._count)) & (2**63 - 1))
        stream = TokenStream(
            request_id, params.n, len(prompt_token_ids), self._most_waiting, self._abort
        )
        keyed = prompt_token_ids if inputs is None else inputs.keyed(prompt_token_ids)
        self._send(
            RoutedRequest(request_id, keyed, params.n * (params.max_tokens or 0), session),
            Submit(request_id, prompt_token_ids, params, inputs),
            hands_over=params.n == params.beam_width == 1 and inputs is None,
        )
        self.streams[request_id] = stream
        for listener in self.submitted:
            listener(stream)
        return stream

    def _send(self, request: RoutedRequest, message: Submit, hands_over: bool) -> None:
        try:
            link = self._links[self.router.route(request)]
        except RoutingFailed as error:
            raise internal(str(error)) from None
        self._at[request.request_id] = link
        self._unanswered[request.request_id] = request, message, hands_over
        if hands_over and self.handovers is not None:
            message = message._replace(hands_over=self.handovers.by(link.number))
            self._to_continue[request.request_id] = message
        link.send(message)

    def _continue(self, done: HandedOver) -> None:
        """Let another replica continue a request, unless its client has left."""
        message = self._to_continue.pop(done.request_id, None)
        if self.handovers is None:
            return
        self.handovers.received(done.request_id, done.content)
        if message is None or not self.is_alive:
            self.handovers.end(done.request_id)
            return
        prompt, params = message.prompt_token_ids, message.params
        params = replace(params, seed=done.seed, prompt_logprobs=None)
        self.router.end(done.request_id)
        tokens = [*prompt, *done.token_ids]
        link = self._links[self.handovers.continues_at(done.request_id, tokens, params)]
        self._at[done.request_id] = link
        link.send(Submit(done.request_id, prompt, params, rest=done))

    def _forget(self, request_id: str) -> EngineLink | None:
        """Note that a request has ended; who had it."""
        self.streams.pop(request_id, None)
        self._unanswered.pop(request_id, None)
        self._to_continue.pop(request_id, None)
        self.router.end(request_id)
        if self.handovers is not None:
            self.handovers.end(request_id)
        return self._at.pop(request_id, None)

    def _abort(self, stream: TokenStream) -> None:
        link = self._forget(stream.request_id)
        if link is not None and link.is_alive:
            link.send(Abort(stream.request_id))

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix caches; False where requests are running."""
        if not self.is_alive:
            raise unavailable(DIED)
        if self._reset is None or self._reset.done():
            self._reset = asyncio.get_running_loop().create_future()
            self._all_reset = True
            self._resetting = {link for link in self._links if link.is_alive}
            for link in self._resetting:
                link.send(ResetPrefixCache())
        return await asyncio.shield(self._reset)

    def _note_reset(self, link: EngineLink, done: bool) -> None:
        if link not in self._resetting:
            return
        self._resetting.discard(link)
        self._all_reset &= done
        if not self._resetting and self._reset is not None and not self._reset.done():
            if self._all_reset:
                self.router.forget_prefixes()
            self._reset.set_result(self._all_reset)

    @property
    def watched(self) -> int:
        """The number of the replica that is watched, or would be."""
        link = self._watched
        if link is None or not link.is_alive:
            link = next((one for one in self._links if one.is_alive), self._links[0])
        return link.number

    def watch(self, on: bool, number: int | None = None) -> None:
        """Have a replica send its whole state and what changes, or no more of it: the one that is
        watched already, else the first that lives.

        Args:
            number: watch this one from now on, if it lives.
        """
        before = self._watched
        if number is not None and self._links[number].is_alive:
            self._watched = self._links[number]
        self._watched = link = self._links[self.watched]
        if before is not None and before is not link and before.is_alive:
            before.send(Watch(False))
        if link.is_alive:
            link.send(Watch(on))
        if not on:
            self._watched = None

    # ---- from the engines

    def _receive(self, link: EngineLink, message: Any) -> None:
        match message:
            case Step():
                for request_id, time_s in message.begun:
                    if (stream := self.streams.get(request_id)) is not None:
                        stream.begun_s = time_s
                for piece in message.pieces:
                    self._deliver(piece, message.time_s)
                for listener in self.listeners:
                    listener(message)
            case ViewFrame():
                for viewer in self.viewers:
                    viewer(message)
            case HandedOver():
                self._continue(message)
            case Rejected(request_id, text):
                if (stream := self.streams.get(request_id)) is not None:
                    self._forget(request_id)
                    stream.fail(ApiError(400, text))
            case Reset(done):
                self._note_reset(link, done)

    def _deliver(self, piece: Piece, time_s: float) -> None:
        if (stream := self.streams.get(piece.request_id)) is None:
            return
        self._unanswered.pop(piece.request_id, None)
        if piece.error is not None:
            wrong = ApiError(400, piece.error) if piece.bad_input else internal(piece.error)
            stream.end(wrong)  # with its other completions
        elif piece.finish_reason == "shed":
            stream.end(too_late("the request could not meet its deadline"))
        stream.push(piece, time_s)
        if stream.is_over:
            self._forget(piece.request_id)

    def _lost(self, link: EngineLink) -> None:
        """An engine's process is gone: others take the requests that it has not answered."""
        self._note_reset(link, False)
        self._last_lost = link
        left = sum(one.is_alive for one in self._links) if self.is_alive else 0
        if not left:
            self.ended.set()
        if not self._begun:
            return
        orphans = self._lose(link.number)
        for request_id in orphans:
            stream = self.streams.get(request_id)
            if left and (asked := self._unanswered.get(request_id)) is not None:
                try:
                    self._send(*asked)
                except ApiError as error:
                    self._forget(request_id)
                    if stream is not None:
                        stream.fail(error)
            elif stream is not None:
                self._forget(request_id)
                begun = f"{DIED_MIDWAY}, after {stream.num_output_tokens} tokens"
                stream.fail(internal(begun) if left else unavailable(DIED))
        if left:
            warning = asyncio.ensure_future(self._warn(link, left))
            self._warnings.add(warning)
            warning.add_done_callback(self._warnings.discard)
            if link is self._watched:
                self.watch(True)

    async def _warn(self, link: EngineLink, left: int) -> None:
        words = await link.last_words()
        print(
            f"warning: replica {link.number} of {len(self._links)} has stopped ({words}); "
            f"{left} left",
            file=sys.stderr,
        )

    async def stop(self) -> None:
        """End the engines' processes."""
        await asyncio.gather(*(link.stop() for link in self._links))
        if self._actors is not None:
            self._actors.close()
        if self.handovers is not None:
            self.handovers.close()
