"""What every engine behind `BenchEngine` does alike: text, and the rejection of what can never be
served."""

from __future__ import annotations

from collections.abc import Container, Sequence

from minivllm.engine.options import SamplingParams
from minivllm.engines.base import EngineInfo
from minivllm.errors import BadInput
from minivllm.models.load.tokenizer import Tokenizer


class Adapter:
    """Base of the engines under test. Subclasses set both attributes when they are built."""

    info: EngineInfo
    tokenizer: Tokenizer | None

    def text(self, token_ids: list[int]) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode(token_ids)

    def encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise BadInput("this checkpoint has no tokenizer: the workload must give token ids")
        return self.tokenizer.encode(text)

    def tokens_wanted(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        unfinished: Container[str],
    ) -> int:
        """How many tokens a request may produce, for engines that do not check requests themselves.

        Args:
            unfinished: ids that are taken.

        Raises:
            BadInput: the id is taken, or the prompt is empty, too long, or holds ids that are none.
        """
        length, limit, vocab = len(prompt_token_ids), self.info.max_model_len, self.info.vocab_size
        if request_id in unfinished:
            raise BadInput(f"request {request_id} is already being served; choose another id")
        if not length:
            raise BadInput(f"request {request_id} has an empty prompt; give at least one token")
        if length >= limit:
            raise BadInput(
                f"request {request_id}: the prompt has {length} tokens and the context is "
                f"{limit}, which leaves no room for output; shorten the prompt or raise "
                "model.max_model_len if it is below the model's own"
            )
        simulated = self.info.clock is not None  # its prompts may be too long to look through
        if not simulated and not 0 <= min(prompt_token_ids) <= max(prompt_token_ids) < vocab:
            raise BadInput(f"request {request_id}: prompt token ids must be in [0, {vocab})")
        return min(params.max_tokens or limit, limit - length)
