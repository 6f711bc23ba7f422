"""Token ids to text, incrementally."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from minivllm.models.load.tokenizer import Tokenizer


class Detokenizer:
    """Text of one growing output, safe on characters split over tokens and on stop strings.

    A token is decoded together with the few before it, those of the prompt included, because what
    it reads as may depend on them (SentencePiece drops a leading space, byte tokens make up one
    character); the new text is what the longer decoding has more. The algorithm is that of
    text-generation-inference and vLLM, but for characters that were incomplete: what the shorter
    decoding has in place of one is not part of the text that both share. Text that may yet turn out
    to be the beginning of a stop string is held back.

    Args:
        tokenizer: decodes.
        stop: strings that end the output.
        prompt_token_ids: what the output follows.
        keep_stop: leave the stop string at the end of the text.
        skip_special_tokens: leave special tokens out of the text.
    """

    CONTEXT = 6  # tokens of the prompt that the first output token is decoded with
    BYTES = 4  # of a character, so at most so many tokens
    # tokens without a whole character at their end, after which they are taken for what they are
    HELD = 64

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        prompt_token_ids: Sequence[int] = (),
        keep_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._decode: Callable[[Sequence[int]], str] = (
            tokenizer.decode
            if skip_special_tokens
            else partial(tokenizer.decode, skip_special_tokens=False)
        )
        self._stop, self._keep_stop = tuple(stop), keep_stop
        size = len(prompt_token_ids)
        start = max(0, size - self.CONTEXT)
        # Begin with a whole character, if there is one. A prompt may end inside of one, too.
        places = (
            (i, end)
            for end in range(size, max(start, size - self.BYTES + 1) - 1, -1)
            for i in range(start, max(-1, start - self.BYTES), -1)
        )
        texts = ((i, end, self._decode(prompt_token_ids[i:end])) for i, end in places)
        found = ((i, end) for i, end, text in texts if text.strip("\ufffd") == text)
        begin, whole = next(found, (start, size))
        self._ids = list(prompt_token_ids[begin:])
        self._prefix, self._read = 0, size - begin  # decoded with, and already told
        self._whole = whole - begin  # of what was told, up to its last whole character
        self._held = ""
        self.stop_reason: str | None = None  # the stop string that was found

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.stop_reason is not None

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """Take a token; the new text that is certain. Stop strings end the text only where
        `may_stop`."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        return self._release(self._new_text(final=False), may_stop)

    def finish(self) -> str:
        """The output has ended: the text still held back, unfinished characters as U+FFFD."""
        if self.stopped:
            return ""
        text = self._release(self._new_text(final=True), may_stop=True)
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _new_text(self, final: bool) -> str:
        """What the tokens since the last call add; nothing while a character is incomplete."""
        end = len(self._ids)
        text = self._decode(self._ids[self._prefix : end])
        if text.endswith("\ufffd") and not final:
            if end - self._read < self.HELD:
                return ""
            end -= self.BYTES - 1  # bytes before these will make no character any more
            text = self._decode(self._ids[self._prefix : end])
        known = self._decode(self._ids[self._prefix : self._read])
        begun = False
        if text.startswith(known):
            new = text[len(known) :]
        else:
            # A character that the prompt began is whole now, or bytes that make none spoil what was
            # told already.
            known = self._decode(self._ids[self._prefix : self._whole])
            begun = text.startswith(known)
            new = text[len(known) :] if begun else self._decode(self._ids[self._read : end])
        if new or final:
            # which is inside of that character
            self._prefix = self._prefix if begun else self._read
            self._read = self._whole = end
        return new

    def _release(self, piece: str, may_stop: bool) -> str:
        text = self._held + piece
        if not may_stop:
            self._held = ""
            return text
        hits = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if hits:
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
