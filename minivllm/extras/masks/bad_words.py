"""Words of a request as token ids: those that end its output, and those that may not come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from minivllm.engine.options import SamplingParams, TokenMask
from minivllm.errors import BadInput
from minivllm.models.load.tokenizer import Tokenizer


def token_ids_of_words(
    params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int
) -> SamplingParams:
    """The same parameters, with token ids for stop strings that are special tokens, whose text is
    never seen, and a mask for bad words.

    Raises:
        BadInput: there is no tokenizer, or it makes no tokens of a bad word.
    """
    if tokenizer is None:
        name = "stop" if params.stop else "bad_words"
        raise BadInput(
            f"{name} needs a tokenizer, and this checkpoint has none; use stop_token_ids, "
            "allowed_token_ids or logit_bias"
        )
    special = (tokenizer.token_id(text) for text in params.stop)
    ends = (*params.stop_token_ids, *(token for token in special if token is not None))
    mask = params.token_mask
    if params.bad_words:
        mask = BadWords(params.bad_words, tokenizer, vocab_size, mask)
    return replace(params, stop_token_ids=ends, token_mask=mask)


class BadWords:
    """Forbids the last token of a word where the output so far ends with those before it, as vLLM
    does.

    A word counts as it stands and after a space, whatever tokens spell it: the tokenizer's own
    choice may differ after a space, also in its number of tokens, and a model may choose others.

    Args:
        words: at least one.
        tokenizer: spells them.
        vocab_size: number of token ids.
        mask: what else the request allows; None allows all.

    Raises:
        BadInput: a word has no tokens.
    """

    def __init__(
        self,
        words: Sequence[str],
        tokenizer: Tokenizer,
        vocab_size: int,
        mask: TokenMask | None = None,
    ) -> None:
        self._mask, self._vocab_size = mask, vocab_size
        self._spelling = tokenizer.fast.id_to_token  # in the letters of the vocabulary
        # By the beginning of a word that has been spelled: the tokens that would complete it.
        self._ends: dict[str, set[int]] = defaultdict(set)
        for word in words:
            for text in (word, f" {word.lstrip()}"):
                ids = tokenizer.encode(text, add_special_tokens=False)
                if not ids:
                    raise BadInput(
                        f"decoding.bad_words: the tokenizer makes no tokens of {word!r}; leave it "
                        "out"
                    )
                self._add("".join(self._spelling(token) or "" for token in ids), tokenizer)
        self._longest = max(map(len, self._ends))

    def _add(self, spelled: str, tokenizer: Tokenizer) -> None:
        for begun in range(len(spelled)):
            last = tokenizer.fast.token_to_id(spelled[begun:])
            if last is not None and last < self._vocab_size:
                self._ends[spelled[:begun]].add(last)

    def _forbidden(self, output: Sequence[int]) -> list[int]:
        """The tokens that would complete a word after this output."""
        found, begun = set(self._ends.get("", ())), ""
        for token in reversed(output):
            begun = (self._spelling(token) or "") + begun
            if len(begun) > self._longest:
                break
            found |= self._ends.get(begun, set())
        return sorted(found)

    def __call__(self, prompt: list[int], output: list[int]) -> Any:
        """The ids that may come next, bool [vocab] or as the inner mask has it; None for all. See
        TokenMask."""
        allowed = None if self._mask is None else self._mask(prompt, output)
        bad = self._forbidden(output)
        if not bad:
            return allowed
        if allowed is None:
            allowed = torch.ones(self._vocab_size, dtype=torch.bool)
        if isinstance(allowed, torch.Tensor) and allowed.dtype is torch.bool:
            allowed = allowed.clone()
            allowed[bad] = False
            return allowed
        return [token for token in map(int, allowed) if token not in bad]
