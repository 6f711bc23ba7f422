"""Which replica computes a request; with prompts on some and answers on others, what each part of a
request is. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from minivllm.cache.prefix import TokenSequence
from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput
from minivllm.parallel.handover import Content, Handover, Stored, drop, make_folder
from minivllm.parallel.options import ParallelOptions
from minivllm.platform.folders import TemporaryFolder
from minivllm.processes.router import (
    CacheShape,
    LeastTokens,
    RoutedRequest,
    Router,
    make_router,
)

# Of an answer as a whole, which neither replica has.
WHOLE = (
    *("presence_penalty", "frequency_penalty", "beam_width", "stop", "bad_words"),
    *("token_mask", "structured_outputs"),
)


def require_splittable(params: SamplingParams) -> None:
    """Raise BadInput for what one replica alone cannot do that continues an answer."""
    for name in WHOLE:
        if getattr(params, name) != getattr(SamplingParams(), name):
            raise BadInput(f"decoding.{name} goes by one engine: leave out parallel.disaggregated")


class Rest(NamedTuple):
    """What is left of a request once its prompt is computed.

    Args:
        params: of its answer without the first token.
        prompt: its tokens.
    """

    params: SamplingParams
    prompt: TokenSequence


class Handovers:
    """Splits requests in two: one computes the prompt and the first token, the other continues.

    The first `num_prefill` replicas compute prompts; of the others the least loaded one continues.

    Args:
        num_prefill: replicas that compute prompts.
        num_replicas: of both kinds.
        folder: for files of keys and values; None: messages have them.
    """

    def __init__(
        self, num_prefill: int, num_replicas: int, folder: TemporaryFolder | None = None
    ) -> None:
        self.num_prefill = num_prefill
        self.decoders = LeastTokens(num_replicas - num_prefill)
        self.num_tokens = self.num_files = 0  # handed over
        self._rests: dict[str, Rest] = {}
        self._folder = folder
        self._files: dict[str, Stored] = {}  # of requests that have not ended

    def by(self, number: int) -> Handover:
        """How a replica hands over keys and values."""
        return Handover(None if self._folder is None else self._folder.path, number)

    def received(self, request_id: str, content: Content) -> None:
        """Note what a replica has handed over: a file that nobody has read by then is deleted when
        the request ends."""
        if isinstance(content, Stored):
            self.num_files += 1
            self._files[request_id] = content

    def split(
        self, request_id: str, prompt: TokenSequence, params: SamplingParams, wanted: int
    ) -> SamplingParams:
        """The sampling of the first part; the second is remembered.

        Args:
            wanted: tokens of the answer.

        Raises:
            BadInput: see `require_splittable`.
        """
        require_splittable(params)
        if wanted == 1:
            return params
        least = max(0, params.min_tokens - 1)
        rest = replace(params, max_tokens=wanted - 1, min_tokens=least)
        self._rests[request_id] = Rest(rest, prompt)
        return replace(params, max_tokens=1, min_tokens=min(1, params.min_tokens))

    def rest(self, request_id: str, finish_reason: str | None) -> Rest | None:
        """What another replica has to do of a request whose replica is done with it; None: nothing,
        it has ended."""
        rest = self._rests.pop(request_id, None)
        return rest if finish_reason == "length" else None

    def continues_at(self, request_id: str, tokens: TokenSequence, params: SamplingParams) -> int:
        """The replica that continues, which has the request from now on.

        Args:
            tokens: prompt and first token.
            params: of the rest.
        """
        self.num_tokens += len(tokens)
        return self.decodes(request_id, tokens, params)

    def decodes(self, request_id: str, tokens: TokenSequence, params: SamplingParams) -> int:
        """The same, of a request whose keys and values are lost with the replica that had it."""
        routed = RoutedRequest(request_id, tokens, params.max_tokens or 0)
        return self.num_prefill + self.decoders.route(routed)

    def end(self, request_id: str) -> None:
        """Forget a request; it may be unknown."""
        self._rests.pop(request_id, None)
        self.decoders.end(request_id)
        drop(self._files.pop(request_id, b""))

    def lose(self, number: int) -> None:
        """Delete what a replica that has died has written and not reported."""
        self.by(number).remove_all_but(self._files.values())

    def close(self) -> None:
        """Delete all files."""
        if self._folder is not None:
            self._folder.close()

    def recount(self) -> None:
        """Count from 0."""
        self.num_tokens = self.num_files = 0
        self.decoders.recount()

    @property
    def given(self) -> Sequence[int]:
        """Requests that each replica of the second kind got."""
        return self.decoders.given


class Routing:
    """Who computes each request of an engine in several replicas: the router's choice, and with
    `parallel.disaggregated` one of the others once its prompt is computed.

    Args:
        options: the knobs of the group `parallel`.
        cache: those of its group, for the folder of what is handed over; None: it needs none.

    Attributes:
        router: among all replicas, or those that compute prompts; from `begin` on.
        handovers: to the others; None: replicas serve whole requests.

    Raises:
        BadInput: see `make_folder`.
    """

    router: Router
    handovers: Handovers | None

    def __init__(self, options: ParallelOptions, cache: Mapping[str, Any] | None = None) -> None:
        self._options, self.handovers = options, None
        folder = None if cache is None else make_folder(options, cache)
        if options.disaggregated:
            self.handovers = Handovers(options.prefill_replicas, options.replicas, folder)

    def begin(self, cache: CacheShape | None) -> None:
        """Choose from now on; see `make_router`."""
        self.router = make_router(self._options, cache)

    def continues_at(self, request_id: str, tokens: TokenSequence, params: SamplingParams) -> int:
        """The replica that continues a request whose prompt is computed; see Handovers."""
        assert self.handovers is not None
        self.router.end(request_id)
        return self.handovers.continues_at(request_id, tokens, params)

    def end(self, request_id: str) -> None:
        """Forget a request; it may be unknown."""
        self.router.end(request_id)
        if self.handovers is not None:
            self.handovers.end(request_id)

    # ---- replicas that come and go

    def join(self, number: int) -> None:
        """Give a replica requests, see Router."""
        router, place = self._place(number)
        router.join(place)

    def leave(self, number: int) -> None:
        """Give a replica no further requests, see Router."""
        router, place = self._place(number)
        router.leave(place)

    def lose(self, number: int) -> list[str]:
        """Note that a replica is dead; its requests, which another one is to compute."""
        if self.handovers is not None:
            self.handovers.lose(number)
        router, place = self._place(number)
        return router.lose(place)

    def _place(self, number: int) -> tuple[Router, int]:
        """Who chooses among the replicas of the same kind as this one, and its number there."""
        if self.handovers is None or number < self.handovers.num_prefill:
            return self.router, number
        return self.handovers.decoders, number - self.handovers.num_prefill

    # ---- what was done

    @property
    def num_rerouted(self) -> int:
        """Requests that other replicas took over."""
        routers = [self.router, *([self.handovers.decoders] if self.handovers else [])]
        return sum(router.counters["requests_rerouted"] for router in routers)

    def recount(self) -> None:
        """Count from 0."""
        self.router.recount()
        if self.handovers is not None:
            self.handovers.recount()

    def report(self) -> dict[str, float | str]:
        """What was counted, for the group `parallel` of the liveness."""
        counters = self.router.report()
        if self.handovers is None:
            return counters
        given = [*self.router.given, *self.handovers.given]
        return {
            **counters,
            "replicas": float(len(given)),
            "requests": " | ".join(map(str, given)),
            "tokens_handed_over": float(self.handovers.num_tokens),
            "files_handed_over": float(self.handovers.num_files),
        }

    def close(self) -> None:
        """Delete all files."""
        if self.handovers is not None:
            self.handovers.close()
