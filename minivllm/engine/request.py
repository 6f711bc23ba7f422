"""A request: its tokens, how far they are computed, and its state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import StrEnum
from typing import Any

from minivllm.cache.manager import CacheManager
from minivllm.cache.prefix import CachedSequence, TokenSequence
from minivllm.engine.options import SamplingParams
from minivllm.models.vision.inputs import RequestInputs, keyed


def placeholder(row: int) -> int:
    """What stands for a token that the device has chosen and the host does not know yet: row `row`
    of its step."""
    return -1 - row


class RequestState(StrEnum):
    """The state of a request. It is WAITING until the first step that computes some of it, even if
    it was admitted before."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    DONE = "done"


@dataclass(eq=False, repr=False, slots=True)
class Request:
    """One sequence being generated.

    The scheduler needs three integers of it: tokens known (`num_tokens`), tokens computed
    (`num_computed_tokens`), tokens allowed (`max_num_tokens`).

    Args:
        request_id: unique among unfinished requests.
        prompt_token_ids: at least one token.
        params: decoding parameters.
        max_num_tokens: prompt and output together may not exceed this.
        seed: of the sampling noise.
        eos_token_ids: end the output, unless `params.ignore_eos`.
        arrival_s: arrival time on the scheduler's clock.
    """

    request_id: str
    prompt_token_ids: InitVar[TokenSequence]
    params: SamplingParams
    _: KW_ONLY
    max_num_tokens: int
    seed: int
    eos_token_ids: InitVar[tuple[int, ...]] = ()
    arrival_s: float = 0.0
    token_ids: Any = field(init=False)  # of the prompt and of what was generated
    num_prompt_tokens: int = field(init=False)
    num_rotated_tokens: int = field(init=False)  # the length that some rotary scalings go by
    num_computed_tokens: int = field(default=0, init=False)
    stop_ids: frozenset[int] = field(init=False)  # tokens that end the output
    state: RequestState = field(default=RequestState.WAITING, init=False)
    # (due time, arrival number), set by the scheduler: the lower one is served first.
    rank: tuple[float, int] = field(default=(0.0, 0), init=False)
    inputs: RequestInputs | None = field(default=None, init=False)  # images
    group: Group | None = field(default=None, init=False)  # requests that grow from the same prompt
    cache: CachedSequence = field(default_factory=CachedSequence, init=False)
    num_preemptions: int = field(default=0, init=False)
    finish_reason: str | None = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)  # ends it with the reason "error"
    # An entry for each prompt token after the first, if they are wanted: token id -> natural log
    # of its probability.
    prompt_logprobs: list[dict[int, float]] | None = field(default=None, init=False)

    def __post_init__(
        self, prompt_token_ids: TokenSequence, eos_token_ids: tuple[int, ...]
    ) -> None:
        copied = isinstance(prompt_token_ids, list)
        self.token_ids = list(prompt_token_ids) if copied else prompt_token_ids
        self.num_prompt_tokens = self.num_rotated_tokens = len(prompt_token_ids)
        ends = () if self.params.ignore_eos else eos_token_ids
        self.stop_ids = frozenset((*self.params.stop_token_ids, *ends))
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = []

    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt and what was generated."""
        return len(self.token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that the cache holds."""
        return self.num_computed_tokens - self.cache.num_evicted

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def unstarted(self) -> Sequence[Request]:
        """Further members of its group, which start once its prompt is computed."""
        return self.group.unstarted if self.group is not None and self.group.leader is self else ()

    @property
    def joint_members(self) -> Sequence[Request]:
        """The request, and those that are preempted, resumed and ended together with it."""
        return self.group.members if self.is_joint and self.group is not None else (self,)

    @property
    def is_joint(self) -> bool:
        """Whether the members of its group choose their tokens together."""
        return self.group is not None and self.group.joint

    @property
    def deadline_s(self) -> float:
        """When it should have ended, on the scheduler's clock; infinite without a deadline."""
        allowed = self.params.deadline_ms
        return math.inf if allowed is None else self.arrival_s + allowed / 1000

    @property
    def cache_keys(self) -> TokenSequence:
        """The tokens as the prefix cache compares them: those of images carry their digests, and
        all of them the salt of the request."""
        marks = self.inputs, self.params.cache_salt
        return keyed(self.token_ids, *marks) if any(marks) else self.token_ids

    @property
    def reusable_token_ids(self) -> TokenSequence:
        """The tokens whose keys and values may come from the prefix cache: none once some are
        computed, or where the logits of the prompt are needed."""
        nothing = self.num_computed_tokens or self.params.prompt_logprobs is not None
        return () if nothing else self.cache_keys

    def may_stop(self, position: int) -> bool:
        """Whether the token at `position` may end the output."""
        return position - self.num_prompt_tokens >= self.params.min_tokens

    def adjusts_logits(self, position: int) -> bool:
        """Whether a bias, penalty, mask or `min_tokens` changes the logits of the token at
        `position`."""
        may_not_stop = self.params.min_tokens and self.stop_ids and not self.may_stop(position)
        return self.params.adjusts_logits or bool(may_not_stop)

    def ends(self, token_id: int) -> str | None:
        """The finish reason if `token_id` came next: "stop", "length", or None if it is not the
        last one."""
        if token_id in self.stop_ids and self.may_stop(len(self.token_ids)):
            return "stop"
        return "length" if len(self.token_ids) + 1 >= self.max_num_tokens else None

    def append(self, token_id: int) -> str | None:
        """Append a generated token; the finish reason if it is the last one."""
        reason = self.ends(token_id)
        self.token_ids.append(token_id)
        return reason


class Group:
    """Requests that grow from one prompt, such as the samples of `n`. One member computes the
    prompt, and the others start on its blocks.

    Args:
        members: the first is the request that the user added.
    """

    knob = "n"  # the parameter that sets the number of members
    # Whether the members choose their tokens together, and are preempted and ended together.
    joint = False

    def __init__(self, members: Sequence[Request]) -> None:
        self.members = members
        self.leader = members[0]  # computes the prompt; the unstarted members wait for it
        self.unstarted = list(members[1:])
        for member in members:
            member.group = self

    def check(self, cache: CacheManager) -> None:
        """Raises BadInput if the members can never run together; samples can run one after
        another."""
