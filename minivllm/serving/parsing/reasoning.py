"""Thinking blocks: what a model writes for itself before its answer, taken apart while it comes."""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.models.load.tokenizer import Tokenizer

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
END_OF_THOUGHTS = f"\n{THINK_CLOSE}\n\n"  # for a model that has to answer now
SPACE = " \t\r\n"
_TAIL = 4  # tokens at the end of a prompt that may open a block


def begins_thinking(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> bool:
    """Whether a prompt ends inside a thinking block, which some chat templates open."""
    tail = tokenizer.decode(prompt_token_ids[-_TAIL:], skip_special_tokens=False)
    return tail.rstrip().endswith(THINK_OPEN)


class ThinkingSplitter:
    """Splits text that comes in pieces into pairs (whether it is thinking, text), without the tags.

    A thinking block is one at the beginning of the answer, after nothing but space; a later tag is
    text, as the model may speak of it. A tag may be split over pieces, so that its possible
    beginning waits for the next piece. How a text is cut into pieces changes nothing but the cuts.

    Args:
        thinking: whether the text begins inside a block.
        trims: leave out space at both ends of the block, and behind it.
    """

    def __init__(self, thinking: bool = False, trims: bool = False) -> None:
        self.is_thinking = thinking
        self._trims = trims
        self._held = ""
        self._may_open = not thinking  # nothing but space has come
        self._at_start = thinking and trims  # space that comes now is left out

    def push(self, text: str) -> list[tuple[bool, str]]:
        """The pairs that are certain with this piece."""
        self._held += text
        result: list[tuple[bool, str]] = []
        if self._may_open and not self._opened():
            return result
        if self.is_thinking:
            before, tag, after = self._held.partition(THINK_CLOSE)
            if not tag:
                self._take(result, len(self._held) - self._unsure())
                return result
            self._held = before.rstrip(SPACE) if self._trims else before
            self._take(result, len(self._held))
            self._held, self.is_thinking, self._at_start = after, False, self._trims
        self._take(result, len(self._held))
        return result

    def finish(self) -> list[tuple[bool, str]]:
        """The text has ended: the pairs that are left."""
        result: list[tuple[bool, str]] = []
        if self.is_thinking and self._trims:
            self._held = self._held.rstrip(SPACE)
        self._take(result, len(self._held))
        return result

    def _opened(self) -> bool:
        """Whether it is known by now if the answer begins with a block."""
        text = self._held.lstrip(SPACE)
        if len(text) < len(THINK_OPEN) and THINK_OPEN.startswith(text):
            return False
        self._may_open = False
        if text.startswith(THINK_OPEN):
            self._held = text[len(THINK_OPEN) :]
            self.is_thinking, self._at_start = True, self._trims
        return True

    def _unsure(self) -> int:
        """Characters at the end of a thought that may belong to the closing tag, or to space that
        is left out."""
        held = self._held
        size = min(len(THINK_CLOSE) - 1, len(held))
        while not THINK_CLOSE.startswith(held[len(held) - size :]):
            size -= 1
        before = held[: len(held) - size]
        return size + (len(before) - len(before.rstrip(SPACE)) if self._trims else 0)

    def _take(self, result: list[tuple[bool, str]], size: int) -> None:
        """Move so many characters of the held text into the result."""
        text, self._held = self._held[:size], self._held[size:]
        if self._at_start:
            text = text.lstrip(SPACE)
        if text:
            self._at_start = False
            result.append((self.is_thinking, text))
