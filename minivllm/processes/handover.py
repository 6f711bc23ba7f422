"""Prompts on some replicas, answers on others: what each part of a request is. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from minivllm.cache.prefix import TokenSequence
from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput
from minivllm.parallel.handover import Content, Handover, Stored, drop
from minivllm.parallel.options import ParallelOptions
from minivllm.platform.folders import TemporaryFolder
from minivllm.processes.router import LeastTokens, RoutedRequest, Router

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
        """Delete what a replica that has died has written and told nobody."""
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


def chooser_of(router: Router, handovers: Handovers | None, number: int) -> tuple[Router, int]:
    """Who chooses among the replicas of the same kind as this one, and its number among these."""
    if handovers is None or number < handovers.num_prefill:
        return router, number
    return handovers.decoders, number - handovers.num_prefill


def lose(router: Router, handovers: Handovers | None, number: int) -> list[str]:
    """Note that a replica is dead, for who chooses among those of its kind; its requests."""
    if handovers is not None:
        handovers.lose(number)
    chooser, place = chooser_of(router, handovers, number)
    return chooser.lose(place)


def make_handovers(
    options: ParallelOptions, folder: TemporaryFolder | None = None
) -> Handovers | None:
    """What `parallel.disaggregated` asks for; None: replicas serve whole requests.

    Args:
        options: the knobs of the group.
        folder: see Handovers.
    """
    if not options.disaggregated:
        return None
    return Handovers(options.prefill_replicas, options.replicas, folder)
