"""What is handed to an engine for requests that need more than the core does; see extras/."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from minivllm.engine.batch_inputs import LogitsAdjustment
from minivllm.engine.options import TokenMask
from minivllm.engine.request import Group, Request
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.step import StepPlan
from minivllm.models.load.tokenizer import Tokenizer


class JointDecoding(Protocol):
    """How the members of a joint group choose their tokens together."""

    counters: dict[str, int]  # of its own work

    def group(self, members: Sequence[Request]) -> Group:
        """A joint group of these requests; the first one is the one that was asked for."""

    def choose(self, logits: Tensor, members: Sequence[Request]) -> Any:
        """What a step's logits say: [R, vocab], row i belongs to members[i], of any number of
        groups."""

    def advance(
        self, members: Sequence[Request], choices: Any, scheduler: Scheduler
    ) -> Iterable[tuple[Request, list[int], str]]:
        """Give members their tokens; of each group that is over its first member, its output and
        the finish reason.

        Args:
            members: as given to `choose`.
            choices: what that returned.
            scheduler: forks members.
        """


class Extensions(NamedTuple):
    """The extras that an engine has."""

    joint: JointDecoding | None = None
    # (words, tokenizer, vocab_size, the request's own mask): a mask that forbids the words
    bad_words: Callable[[Sequence[str], Tokenizer, int, TokenMask | None], TokenMask] | None = None
    # What changes the logits of requests that ask for it: row i belongs to requests[i].
    adjust_logits: Callable[[Sequence[Request]], LogitsAdjustment] | None = None
    # Of rows of logits, for tokens and counts, see `top_logprobs`.
    logprobs: (
        Callable[[Tensor, Sequence[int], Sequence[int | None]], Sequence[dict[int, float] | None]]
        | None
    ) = None
    # Keeps the log-probabilities that prompts ask for of a step's logits.
    prompt_logprobs: Callable[[StepPlan, Tensor], None] | None = None


CORE = Extensions()  # none
