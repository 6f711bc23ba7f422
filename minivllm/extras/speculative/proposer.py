"""What proposers have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
