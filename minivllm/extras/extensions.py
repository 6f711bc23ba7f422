"""The extras that requests may need, as an engine is handed them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from minivllm.engine.engine import Engine
from minivllm.engine.extension import JointDecoding
from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Request
from minivllm.engine.step import SampledRows, StepPlan
from minivllm.extras.adjust_logits import Adjustments, adjust_logits
from minivllm.extras.bad_words import token_ids_of_words
from minivllm.extras.beam import BeamDecoding
from minivllm.extras.logprobs import top_logprobs
from minivllm.extras.prompt_logprobs import take_prompt_logprobs
from minivllm.extras.sampled_rows import sampled_rows
from minivllm.extras.step_timing import StepTiming
from minivllm.extras.stop_strings import StopStrings
from minivllm.models.load.tokenizer import Tokenizer


class RequestExtras:
    """Every extra; see Extensions.

    Args:
        vocab_size: of the model.
        one_by_one: choose for each beam by itself, so that no shape depends on the others.
    """

    def __init__(self, vocab_size: int, one_by_one: bool = False) -> None:
        self.vocab_size = vocab_size
        self.joint: JointDecoding = BeamDecoding(one_by_one)

    def step_timer(self, engine: Engine) -> StepTiming:
        """See Extensions."""
        return StepTiming(engine)

    def sampled_rows(self, plan: StepPlan) -> SampledRows:
        """See Extensions."""
        return sampled_rows(plan)

    def token_ids_of_words(
        self, params: SamplingParams, tokenizer: Tokenizer | None
    ) -> SamplingParams:
        """See Extensions."""
        return token_ids_of_words(params, tokenizer, self.vocab_size)

    def stop_strings(
        self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams
    ) -> StopStrings:
        """See Extensions."""
        return StopStrings(tokenizer, prompt, params)

    def adjust_logits(self, requests: Sequence[Request], positions: Sequence[int]) -> Adjustments:
        """See Extensions."""
        return adjust_logits(requests, positions, self.vocab_size)

    def logprobs(
        self, logits: Tensor, token_ids: Sequence[int], requests: Sequence[Request]
    ) -> Sequence[dict[int, float] | None]:
        """See Extensions."""
        return top_logprobs(logits, token_ids, [r.params.logprobs for r in requests])

    def prompt_logprobs(self, plan: StepPlan, logits: Tensor) -> None:
        """See Extensions."""
        take_prompt_logprobs(plan, logits)
