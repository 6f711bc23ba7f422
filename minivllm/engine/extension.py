"""The protocol of what assembly adds to an engine for requests that need more than the core; see
extras/."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from minivllm.engine.batch_inputs import LogitsAdjustment
from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Group, Request
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.step import StepPlan
from minivllm.engine.tokenizer import Detokenizer
from minivllm.models.load.tokenizer import Tokenizer


class JointDecoding(Protocol):
    """How the members of a joint group choose their tokens together."""

    counters: dict[str, int]  # liveness

    def group(self, members: Sequence[Request]) -> Group:
        """A joint group of these requests; the first one is the one that the user asked for."""

    def choose(self, logits: Tensor, members: Sequence[Request]) -> Any:
        """The choices of members from the logits [R, vocab] of a step; row i belongs to
        members[i]. Members may be of several groups."""

    def advance(
        self, members: Sequence[Request], choices: Any, scheduler: Scheduler
    ) -> Iterable[tuple[Request, list[int], str]]:
        """Append tokens to members; of each finished group its first member, the output and the
        finish reason.

        Args:
            members: as given to `choose`.
            choices: what that returned.
            scheduler: forks members.
        """


class Extensions(Protocol):
    """What requests need beyond the core."""

    joint: JointDecoding

    def token_ids_of_words(
        self, params: SamplingParams, tokenizer: Tokenizer | None
    ) -> SamplingParams:
        """Parameters with token ids for stop strings that are special tokens, and for bad words.
        Raises BadInput without a tokenizer."""

    def stop_strings(
        self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams
    ) -> Detokenizer:
        """The text of an output that stop strings may end."""

    def adjust_logits(self, requests: Sequence[Request]) -> LogitsAdjustment:
        """What changes the logits of requests; row i belongs to requests[i]."""

    def logprobs(
        self, logits: Tensor, token_ids: Sequence[int], requests: Sequence[Request]
    ) -> Sequence[dict[int, float] | None]:
        """The log-probabilities that requests ask for of chosen tokens; row i of the logits
        [R, vocab] belongs to requests[i]."""

    def prompt_logprobs(self, plan: StepPlan, logits: Tensor) -> None:
        """Keep the log-probabilities that prompts ask for. Logits [L, vocab] are those of every
        token of such requests, and of the last known one of others."""
