"""What proposers have in common, and what speculation counts, in vLLM's names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from minivllm.engine.request import Request
from minivllm.engine.step import StepPlan
from minivllm.extras.speculative.options import SpeculativeOptions

if TYPE_CHECKING:
    from torch import Tensor

    from minivllm.attention.base import AttentionBackend
    from minivllm.cache.kv import KVCache
    from minivllm.engine.engine import Engine
    from minivllm.models.load.loading import LoadedModel

Node = Mapping[str, Any]
# The attention of a loaded model over its own cache.
MakeAttention = Callable[["LoadedModel", "KVCache"], "AttentionBackend"]


class LoadModel(Protocol):
    """Loads a drafting model."""

    def __call__(
        self, model: Node | None, quant: Node | None, pruning: Node | None = None
    ) -> LoadedModel:
        """A model with its passes applied, of options of these groups; None: the target's, or for
        a model of its own no pruning."""


class Proposer:
    """Guesses the next tokens of requests. A wrong guess costs time and changes no output.

    A proposer of the user's own overrides `propose`, and what else it needs.

    Attributes:
        name: of the option.
        options: the knobs that all proposers have.
    """

    name = ""
    options = SpeculativeOptions()

    def load(self, load_model: LoadModel) -> int:
        """Load models, before the cache takes the memory that they leave; the bytes of keys and
        values that each token takes beside the target's."""
        return 0

    def attach(self, engine: Engine, attention: MakeAttention) -> None:
        """The engine is ready."""

    def cost(self, largest: int) -> Callable[[int], float] | None:
        """Milliseconds to draft one token for each of so many requests, up to `largest`; None: no
        measurable time."""
        return None

    def propose(self, request: Request, most: int) -> list[int]:
        """At most `most` draft tokens that may follow `request.token_ids`, none if nothing is worth
        a guess. Tokens may have been appended since the last call; none has changed."""
        raise NotImplementedError

    def fill(self, plan: StepPlan) -> None:
        """Replace drafts at the end of the requests of a planned step, whose blocks are ready: for
        a model that drafts for all requests at once."""

    def draft_logits(self, request: Request) -> Sequence[Tensor]:
        """The logits [vocab] that each draft token of a request in this step was drawn from; none
        where a proposer has none, or keeps none."""
        return ()

    def finished(self, request: Request) -> None:
        """Drop what is kept for a request that has ended, whether it was ever proposed for or
        not."""

    def forget(self) -> None:
        """Drop what was learned of requests that have ended: a measurement that asks the same again
        must not find its own answers."""


class NoProposer(Proposer):
    """speculative=none."""

    name = "none"


MOST_REQUESTS = 100_000  # the latest, that have counts of their own


@dataclass
class SpeculationCounters:
    """Counts since the last reset.

    A draft is what a request verifies in one step: several draft tokens, of which those before the
    first wrong one are accepted.
    """

    steps: int = 0  # that verified drafts
    # Decoding requests, with a draft or without, summed over all steps.
    num_request_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    draft_s: float = 0.0  # spent on drafting
    # Draft tokens at each position of their draft, and those accepted.
    drafted_per_pos: Counter[int] = field(default_factory=Counter)
    accepted_per_pos: Counter[int] = field(default_factory=Counter)
    # Drafts of each length, and their accepted tokens.
    drafts_of_length: Counter[int] = field(default_factory=Counter)
    accepted_of_length: Counter[int] = field(default_factory=Counter)
    # Drafts, draft tokens and accepted tokens of each request.
    requests: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def note(self, request_id: str, length: int, accepted: int) -> None:
        """Count a draft of `length` tokens, of which the first `accepted` are right."""
        self.num_drafts += 1
        self.num_draft_tokens += length
        self.num_accepted_tokens += accepted
        self.drafted_per_pos.update(range(length))
        self.accepted_per_pos.update(range(accepted))
        self.drafts_of_length[length] += 1
        self.accepted_of_length[length] += accepted
        if len(self.requests) >= MOST_REQUESTS and request_id not in self.requests:
            del self.requests[next(iter(self.requests))]  # the oldest
        drafts, drafted, right = self.requests.get(request_id, (0, 0, 0))
        self.requests[request_id] = drafts + 1, drafted + length, right + accepted
