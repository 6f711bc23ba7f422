"""Strings that end an output."""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.engine.options import SamplingParams
from minivllm.engine.tokenizer import Detokenizer
from minivllm.models.load.tokenizer import Tokenizer


class StopStrings(Detokenizer):
    """Text that ends at the first stop string. What may yet turn out to be the beginning of one is
    held back.

    Args:
        tokenizer: decodes.
        prompt_token_ids: what the output follows.
        params: of the request.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        super().__init__(tokenizer, prompt_token_ids, params.skip_special_tokens)
        self._stop, self._keep_stop = params.stop, params.include_stop_str_in_output
        self._tokenizer = tokenizer
        self._held = ""

    def push(self, token_id: int, may_stop: bool = True) -> str:
        if self.stop_reason is not None:
            return ""
        return self._release(super().push(token_id), may_stop)

    def finish(self, end_token_id: int | None = None) -> str:
        """An output may have ended at a special token that is a stop string, and
        whose text is never seen."""
        if self.stop_reason is not None:
            return ""
        text = self._release(super().finish(), may_stop=True)
        if self.stop_reason is None:
            text, self._held = text + self._held, ""
            if end_token_id is not None:
                end = self._tokenizer.decode([end_token_id], False)
                self.stop_reason = end if end in self._stop else None
        return text

    def _release(self, piece: str, may_stop: bool) -> str:
        """The text that is certain after a new piece. A stop string counts where it ends, and may
        begin in text that came before the output might stop."""
        held, text = len(self._held), self._held + piece
        starts = ((text.find(stop, max(0, held - len(stop) + 1)), stop) for stop in self._stop)
        hits = [(start, stop) for start, stop in starts if start >= 0]
        if hits and may_stop:
            position, self.stop_reason = min(hits, key=lambda hit: hit[0])
            self._held = ""
            return text[: position + len(self.stop_reason) * self._keep_stop]
        keep = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), keep, -1):
                if stop.startswith(text[len(text) - length :]):
                    keep = length
                    break
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep]
