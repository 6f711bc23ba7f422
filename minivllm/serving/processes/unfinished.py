"""A request that has not ended, with all that another replica needs to compute the rest of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from minivllm.processes.messages import Submit
from minivllm.processes.router import RoutedRequest
from minivllm.serving.processes.messages import Piece

LEAST_MS = 1e-3  # a deadline that has passed


class RequestOrigin(NamedTuple):
    """What another process calls a request, and when it came there."""

    request_id: str
    arrived_s: float


@dataclass
class Unfinished:
    """A request and what has come of its answer.

    Attributes:
        routed: as the router sees it.
        message: what its first replica was sent.
        hands_over: whether another replica may continue it once its prompt is computed.
        begun: whether anything of its answer has come.
        token_ids: of its answer so far, where it has one completion.
    """

    routed: RoutedRequest
    message: Submit
    hands_over: bool
    begun: bool = False
    token_ids: list[int] = field(default_factory=list)
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
