"""The extras that requests may need, as an engine is given them. Beam search, grammars and the
timing of steps are imported and made where something first needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from minivllm.engine.engine import Engine
from minivllm.engine.extension import JointDecoding
from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Request
from minivllm.engine.step import SampledRows, ScheduledRequest, StepPlan
from minivllm.extras.adjust_logits import Adjustments, adjust_logits
from minivllm.extras.logprobs import take_prompt_logprobs, top_logprobs
from minivllm.extras.masks.bad_words import token_ids_of_words
from minivllm.extras.stop_strings import StopStrings
from minivllm.models.load.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minivllm.extras.masks.structured import Grammars
    from minivllm.extras.step_timing import StepTiming
    from minivllm.extras.vision.encoder import Encoder
    from minivllm.models.vision.tower import EmbeddedRows


def sampled_rows(plan: StepPlan) -> SampledRows:
    """The rows of the requests that sample: of each the last one, and with drafts one for each
    draft before it.

    Members of joint groups are apart from those that sample by themselves, and each member of a
    group that starts now samples from its leader's logits. A request that asks for the
    log-probabilities of its prompt has logits of all its tokens.
    """
    requests: list[Request] = []
    positions: list[int] = []
    rows: list[int] = []
    joint: dict[Request, int] = {}
    forks: list[tuple[Request, Request, int]] = []
    end = 0
    for part in plan.scheduled:
        request, drafts = part.request, part.num_drafts
        asks = request.params.prompt_logprobs is not None
        end += part.num_tokens if asks else part.samples + drafts
        if part.samples and request.is_joint:
            joint[request] = end - 1
        elif part.samples:
            requests += [request] * (1 + drafts)
            positions += range(part.end - drafts, part.end + 1)
            rows += range(end - 1 - drafts, end)
            forks += [(request, member, end - 1) for member in request.unstarted]
    all_in_order = not forks and rows == list(range(end))
    for _, member, row in forks:
        requests.append(member)
        positions.append(member.num_tokens)
        rows.append(row)
    pairs = tuple((parent, member) for parent, member, _ in forks)
    return SampledRows(requests, positions, None if all_in_order else tuple(rows), pairs, joint)


class RequestExtras:
    """Every extra; see Extensions.

    Args:
        vocab_size: of the model.
        one_by_one: choose for each beam by itself, so that no shape depends on the others.
        tokenizer: of the model, for grammars.
        eos_token_ids: of the model.
        encoder: of a model that takes images.
    """

    def __init__(
        self,
        vocab_size: int,
        one_by_one: bool = False,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
        encoder: Encoder | None = None,
    ) -> None:
        self.encoder = encoder
        self.vocab_size = vocab_size
        self._one_by_one = one_by_one
        self._tokenizer, self._eos_token_ids = tokenizer, eos_token_ids
        self._grammars: Grammars | None = None
        self._joint: JointDecoding | None = None

    @property
    def grammars(self) -> Grammars:
        """The grammars of the engine's requests."""
        if self._grammars is None:
            from minivllm.extras.masks.structured import Grammars

            self._grammars = Grammars(self._tokenizer, self.vocab_size, self._eos_token_ids)
        return self._grammars

    @property
    def joint(self) -> JointDecoding:
        if self._joint is None:
            from minivllm.extras.beam import BeamDecoding

            self._joint = BeamDecoding(self._one_by_one)
        return self._joint

    def counters(self) -> dict[str, int]:
        rounds = {"beam_rounds": 0} if self._joint is None else self._joint.counters
        masks = 0 if self._grammars is None else self._grammars.num_masks
        return {**rounds, "grammar_masks": masks}

    def step_timer(self, engine: Engine) -> StepTiming:
        from minivllm.extras.step_timing import StepTiming

        return StepTiming(engine, self.encoder)

    def inputs(self, scheduled: Sequence[ScheduledRequest]) -> EmbeddedRows | None:
        return None if self.encoder is None else self.encoder.embedded(scheduled)

    def sampled_rows(self, plan: StepPlan) -> SampledRows:
        return sampled_rows(plan)

    def prepare_params(self, params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
        if params.structured_outputs is not None:
            self.grammars.compile(params.structured_outputs)
        return token_ids_of_words(params, tokenizer, self.vocab_size)

    def detokenizer(self, tokenizer: Tokenizer, request: Request) -> StopStrings:
        if request.params.structured_outputs is not None:
            from minivllm.extras.masks.structured import StructuredText

            return StructuredText(tokenizer, request, self.grammars)
        return StopStrings(tokenizer, request.token_ids, request.params)

    def adjust_logits(self, requests: Sequence[Request], positions: Sequence[int]) -> Adjustments:
        return adjust_logits(requests, positions, self.vocab_size, self._grammars)

    def logprobs(
        self, logits: Tensor, token_ids: Sequence[int], requests: Sequence[Request]
    ) -> Sequence[dict[int, float] | None]:
        return top_logprobs(logits, token_ids, [r.params.logprobs for r in requests])

    def prompt_logprobs(self, plan: StepPlan, logits: Tensor) -> None:
        take_prompt_logprobs(plan, logits)
