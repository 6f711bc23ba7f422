"""The tokens of one request on their way from the engine to a client, and all that another replica
needs to compute the rest of them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from minivllm.engine.options import SamplingParams
from minivllm.models.vision.inputs import RequestInputs
from minivllm.processes.link import EngineLink
from minivllm.processes.messages import Piece, Step, Submit
from minivllm.processes.router import RoutedRequest
from minivllm.serving.errors import ApiError, internal, too_late

LEAST_MS = 1e-3  # a deadline that has passed
OVERFLOW_S = 0.1  # that too many pieces may wait


class Queued(NamedTuple):
    """How many completions wait for their first token, and the tokens of their prompts."""

    completions: int
    prompt_tokens: int


class TokenStream:
    """The tokens of one request, on their way to one client.

    Args:
        request_id: unique.
        num_completions: how many completions it makes.
        num_prompt_tokens: of its prompt.
        most_waiting: pieces that wait for a client that does not read, at most.
        abort: tells the engine to end it.
        arrived_s: when it came, as of `time.perf_counter`; None: now.
    """

    def __init__(
        self,
        request_id: str,
        num_completions: int,
        num_prompt_tokens: int,
        most_waiting: int,
        abort: Callable[[TokenStream], None],
        arrived_s: float | None = None,
    ) -> None:
        self.request_id, self.num_completions = request_id, num_completions
        self.num_prompt_tokens = num_prompt_tokens
        self.arrived_s = time.perf_counter() if arrived_s is None else arrived_s
        self.begun_s: float | None = None  # its first step in the engine
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.unfinished = num_completions
        self._unbegun = set(range(num_completions))
        self.error: ApiError | None = None
        self.finish_reason: str | None = None  # of the completion that ended last
        self.timer: asyncio.TimerHandle | None = None  # ends it when it takes too long
        self.on_over: list[Callable[[TokenStream], None]] = []  # called once, at its end
        self.cut_off: Callable[[], None] = lambda: None  # closes its client's connection
        self._most_waiting, self._abort = most_waiting, abort
        self._overflow: asyncio.TimerHandle | None = None  # set while too many pieces wait
        self._pieces: deque[Piece] = deque()
        self._changed = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """How many of its completions wait for their first token."""
        return 0 if self.is_over else len(self._unbegun)

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self.unfinished == 0 or self.error is not None

    def push(self, piece: Piece, time_s: float) -> None:
        """Take a piece from the engine; one that is an error ends the request with its other
        completions."""
        if piece.error is not None:
            self.end(ApiError(400, piece.error) if piece.bad_input else internal(piece.error))
        elif piece.finish_reason == "shed":
            self.end(too_late("the request could not meet its deadline"))
        self._unbegun.discard(piece.completion)
        if piece.token_id is not None:
            self.num_output_tokens += 1
            self.last_token_s = time_s
            if self.first_token_s is None:
                self.first_token_s, self.num_cached_tokens = time_s, piece.num_cached_tokens
        if piece.finish_reason is not None:
            self.unfinished -= 1
            self.finish_reason = piece.finish_reason
        if self.error is None:
            self._pieces.append(piece)
        if len(self._pieces) > self._most_waiting and self._overflow is None:
            # Not at once: this process may have been late itself, and then many come together.
            loop = asyncio.get_running_loop()
            self._overflow = loop.call_later(OVERFLOW_S, self._check_reader)
        self._settle()

    def _check_reader(self) -> None:
        """End the request of a client that has let too much wait, and its connection."""
        self._overflow = None
        if len(self._pieces) > self._most_waiting and not self.is_over:
            self.end(internal("the client does not read its answer: the request was ended"))
            self.cut_off()

    def fail(self, error: ApiError) -> None:
        """Note that the engine has ended it with an error; the pieces that have come stay."""
        self.error = self.error or error
        self._settle()

    def end(self, error: ApiError) -> None:
        """End it with an error, here and in the engine."""
        self.fail(error)
        self._abort(self)

    def _settle(self) -> None:
        """Wake who waits for a change; nothing is timed once it is over."""
        self._changed.set()
        if self.is_over:
            if self.timer is not None:
                self.timer.cancel()
            listeners, self.on_over = self.on_over, []
            for listener in listeners:
                listener(self)

    async def batches(self) -> AsyncGenerator[list[Piece], None]:
        """The pieces as they come, all that wait at once; a completion ends with a finish reason.

        Leaving the iterator early ends the request.

        Raises:
            ApiError: the request failed.
        """
        try:
            while self._pieces or not self.is_over:
                if not self._pieces:
                    self._changed.clear()
                    await self._changed.wait()
                if self._pieces:
                    taken = list(self._pieces)
                    self._pieces.clear()
                    yield taken
            if self.error is not None:
                raise self.error
        finally:
            self.close()

    def drop(self) -> None:
        """Forget the pieces that wait: another process has them."""
        self._pieces.clear()

    def close(self) -> None:
        """End the request, if it has not ended."""
        if not self.is_over:
            self.end(internal("the request was ended"))


class Streams:
    """The requests of a process that answers clients, and the steps of engines in another one.

    Attributes:
        streams: of requests that have not ended, by their ids.
        listeners: called with every step.
    """

    def __init__(self) -> None:
        self.streams: dict[str, TokenStream] = {}
        self.listeners: list[Callable[[Step], None]] = []

    @property
    def queue(self) -> Queued:
        """What waits for the engine."""
        waiting = [(one.num_waiting, one) for one in self.streams.values()]
        tokens = sum(
            one.num_prompt_tokens for count, one in waiting if count == one.num_completions
        )
        return Queued(sum(count for count, _ in waiting), tokens)

    def take_step(self, step: Step) -> None:
        """Take what a step gave."""
        for request_id, time_s in step.begun:
            if (stream := self.streams.get(request_id)) is not None:
                stream.begun_s = time_s
        for piece in step.pieces:
            if (stream := self.streams.get(piece.request_id)) is not None:
                self._note(piece)
                stream.push(piece, step.time_s)
                if stream.is_over:
                    self._forget(piece.request_id)
        for listener in self.listeners:
            listener(step)

    def _note(self, piece: Piece) -> None:
        """Note a piece of an answer that has not ended."""

    def _forget(self, request_id: str) -> object:
        """Note that a request has ended."""
        return self.streams.pop(request_id, None)


class RequestOrigin(NamedTuple):
    """What another process calls a request, and when it came there."""

    request_id: str
    arrived_s: float


class Submission(NamedTuple):
    """Requests that are sent to the engines together, all or none.

    Args:
        session: the conversation or client that they belong to, for a router that goes by it.
        inputs: the images of each prompt.
        is_admitted: they come in the place of others that were admitted.
        origins: of each; none: they come from this process.
    """

    prompts: Sequence[list[int]]
    params: SamplingParams
    session: str | None = None
    inputs: RequestInputs | None = None
    is_admitted: bool = False
    origins: Sequence[RequestOrigin] = ()


@dataclass
class Unfinished:
    """A request and what has come of its answer.

    Attributes:
        routed: as the router sees it.
        message: what its first replica was sent.
        can_split: whether another replica may continue it once its prompt is computed.
        begun: whether anything of its answer has come.
        token_ids: of its answer so far, where it has one completion.
        link: who has it.
        is_split: whether another replica is to continue it.
    """

    routed: RoutedRequest
    message: Submit
    can_split: bool
    begun: bool = False
    token_ids: list[int] = field(default_factory=list)
    link: EngineLink | None = None
    is_split: bool = False
    _sent_s: float = field(default_factory=time.monotonic)

    @property
    def can_move(self) -> bool:
        """Whether another replica can compute the rest. Samples and beams that have begun stand in
        the memory of one replica."""
        params = self.message.params
        return not self.begun or params.n == params.beam_width == 1

    def note(self, piece: Piece) -> None:
        """Note a piece of its answer."""
        self.begun = True
        if piece.token_id is not None:
            self.token_ids.append(piece.token_id)

    def to_send(self) -> Submit:
        """What its replica is sent. Where another one has begun it, the tokens that the client has
        go with it as if they were computed there: noise goes by seed and position, so that the
        rest is the same."""
        params = self.message.params
        if params.deadline_ms is not None:
            gone_ms = 1e3 * (time.monotonic() - self._sent_s)
            params = replace(params, deadline_ms=max(LEAST_MS, params.deadline_ms - gone_ms))
        if not self.begun:
            return self.message._replace(params=params, hands_over=None)
        assert params.seed is not None  # with several replicas each request has one
        params = replace(params, prompt_logprobs=None)  # the client has them
        tokens = list(self.token_ids)
        return self.message._replace(params=params, hands_over=None, output_token_ids=tokens)
