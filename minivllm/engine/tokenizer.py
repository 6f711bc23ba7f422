"""Token ids to text, incrementally."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from minivllm.models.load.tokenizer import Tokenizer


class Detokenizer:
    """Text of one growing output, safe on characters split over tokens.

    A token is decoded together with the few before it, those of the prompt included, because what
    it reads as may depend on them (SentencePiece drops a leading space, byte tokens make up one
    character); the new text is what the longer decoding has more. The algorithm is that of
    text-generation-inference and vLLM, but for characters that were incomplete: what the shorter
    decoding has in place of one is not part of the text that both share.

    Args:
        tokenizer: decodes.
        prompt_token_ids: what the output follows.
        skip_special_tokens: leave special tokens out of the text.
    """

    CONTEXT = 6  # tokens of the prompt that the first output token is decoded with
    BYTES = 4  # of a character in UTF-8, hence its most tokens
    # Tokens without a whole character at their end before their bytes are shown as U+FFFD.
    HELD = 64

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._decode: Callable[[Sequence[int]], str] = (
            tokenizer.decode
            if skip_special_tokens
            else partial(tokenizer.decode, skip_special_tokens=False)
        )
        size = len(prompt_token_ids)
        start = max(0, size - self.CONTEXT)
        # Begin with a whole character, if there is one. A prompt may end inside of one, too.
        places = (
            (i, end)
            for end in range(size, max(start, size - self.BYTES + 1) - 1, -1)
            for i in range(start, max(-1, start - self.BYTES), -1)
        )
        texts = ((i, end, self._decode(prompt_token_ids[i:end])) for i, end in places)
        starts = ((i, end) for i, end, text in texts if text.strip("\ufffd") == text)
        begin, whole = next(starts, (start, size))
        self._ids = list(prompt_token_ids[begin:])
        # Where decoding starts, and the end of the text returned so far.
        self._prefix, self._read = 0, size - begin
        self._whole = whole - begin  # end of the last whole character of that text
        # The stop string that has ended the text; "": its grammar has.
        self.stop_reason: str | None = None

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """Take a token; the new text that is certain.

        Args:
            token_id: the next token of the output.
            may_stop: whether a stop string may end the text here.
        """
        self._ids.append(token_id)
        return self._new_text(final=False)

    def finish(self, end_token_id: int | None = None) -> str:
        """The output has ended: the text still held back, unfinished characters as U+FFFD.

        Args:
            end_token_id: the token that ended it, if one did.
        """
        return self._new_text(final=True)

    def _new_text(self, final: bool) -> str:
        """What the tokens since the last call add; nothing while a character is incomplete."""
        end = len(self._ids)
        text = self._decode(self._ids[self._prefix : end])
        if text.endswith("\ufffd") and not final:
            if end - self._read < self.HELD:
                return ""
            end -= self.BYTES - 1  # earlier bytes cannot complete a character any more
            text = self._decode(self._ids[self._prefix : end])
        known = self._decode(self._ids[self._prefix : self._read])
        begun = False
        if text.startswith(known):
            new = text[len(known) :]
        else:
            # The prompt's last character is complete now, or invalid bytes change the decoding of
            # text that was returned already.
            known = self._decode(self._ids[self._prefix : self._whole])
            begun = text.startswith(known)
            new = text[len(known) :] if begun else self._decode(self._ids[self._read : end])
        if new or final:
            # The text returned so far ends inside of that character.
            self._prefix = self._prefix if begun else self._read
            self._read = self._whole = end
        return new
