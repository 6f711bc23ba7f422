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
from minivllm.engine.step import SampledRows, ScheduledRequest, StepPlan
from minivllm.engine.tokenizer import Detokenizer
from minivllm.models.load.tokenizer import Tokenizer


class JointDecoding(Protocol):
    """How the members of a joint group choose their tokens together."""

    counters: dict[str, int]  # liveness

    def group(self, members: Sequence[Request]) -> Group:
        """A joint group of these requests; the first one is the user's request."""

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


class Speculation(Protocol):
    """Drafts, which a step verifies beside the token that it computes anyway."""

    needs_logits: bool  # `verify` reads them

    def draft(self, plan: StepPlan) -> None:
        """Put drafts at the end of requests for which a plan has verified places. Called once the
        cache is ready for the step."""

    def verify(
        self, plan: StepPlan, token_ids: Sequence[int], logits: Tensor | None
    ) -> tuple[StepPlan, list[tuple[int, int]]]:
        """Drop the drafts that are wrong.

        Args:
            plan: the step.
            token_ids: chosen by the target at each row: before the first draft of a request, after
                each draft.
            logits: [S, vocab], if `needs_logits`.

        Returns:
            The plan with the accepted drafts only, and the rows that count with their tokens.
        """


class StepTimer(Protocol):
    """Emits StepTimed events."""

    def launched(self) -> None:
        """A step was launched, whose experts are being counted."""

    def computed(self) -> None:
        """A step was computed, and requests that it finishes still hold their blocks."""

    def emit(self, plan: StepPlan, seq_lens: Sequence[int], marks: Sequence[float | None]) -> None:
        """Emit the timing of a step, or keep it while its experts are being counted.

        Args:
            plan: the step.
            seq_lens: tokens that each request holds after it.
            marks: end of the step before, then beginning, and the ends of schedule, draft, prepare,
                forward, sample and emit, in seconds; None where nothing was drafted.
        """

    def emit_pending(self) -> None:
        """Emit the timing that is kept: its tokens are read, so its experts are counted."""


class Extensions(Protocol):
    """What requests need beyond the core."""

    @property
    def joint(self) -> JointDecoding:
        """How joint groups choose their tokens."""

    def counters(self) -> dict[str, int]:
        """Counts of work, for `liveness.decoding`."""

    def step_timer(self, engine: Any) -> StepTimer:
        """The timer of an engine's steps."""

    def inputs(self, scheduled: Sequence[ScheduledRequest]) -> Any:
        """The embeddings of images in a step that computes prompts; None where it has none. See
        models/vision/tower.py."""

    def sampled_rows(self, plan: StepPlan) -> SampledRows:
        """Which rows of the logits choose tokens, where requests have drafts or groups, or want
        logits of their prompts."""

    def prepare_params(self, params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
        """Parameters with token ids for stop strings that are special tokens, and for bad words;
        their grammar is compiled. Raises BadInput without a tokenizer, and for a wrong grammar."""

    def detokenizer(self, tokenizer: Tokenizer, request: Request) -> Detokenizer:
        """The text of an output that stop strings or a grammar may end."""

    def adjust_logits(
        self, requests: Sequence[Request], positions: Sequence[int]
    ) -> LogitsAdjustment:
        """What changes the logits of rows; row i chooses the token of requests[i] at
        positions[i]."""

    def logprobs(
        self, logits: Tensor, token_ids: Sequence[int], requests: Sequence[Request]
    ) -> Sequence[dict[int, float] | None]:
        """The log-probabilities of chosen tokens; row i of the logits
        [R, vocab] belongs to requests[i]."""

    def prompt_logprobs(self, plan: StepPlan, logits: Tensor) -> None:
        """Keep the log-probabilities of prompts. Logits [L, vocab] are those of every
        token of such requests, and of the last known one of others."""
