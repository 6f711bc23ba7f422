"""Tokens by themselves, as log-probabilities show them: their text, and their bytes."""

from __future__ import annotations

import re

from minivllm.models.load.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # of tokenizers that fall back to bytes
_SPACE = "▁"  # how SentencePiece writes a space


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level tokenizers write for bytes (GPT-2, Radford et al. 2019)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenTexts:
    """The text and the bytes of single tokens, so that the bytes of an answer's tokens make up the
    bytes of its text, where a character is split over tokens and where a token begins with space.

    Args:
        tokenizer: of the tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._fast = tokenizer.fast
        self._special = tokenizer.fast.get_added_tokens_decoder()
        letters = _byte_letters()
        is_byte_level = all(self._fast.token_to_id(one) is not None for one in "ĠĊ")
        self._letters = letters if is_byte_level else None
        self._known: dict[int, bytes] = {}

    def data(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id without a token."""
        if (known := self._known.get(token_id)) is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def text(self, token_id: int) -> str:
        """The text of a token; bytes that form no character become U+FFFD."""
        return self.data(token_id).decode(errors="replace")

    def label(self, token_id: int) -> str:
        """The text of a token; of bytes that form no character, their names as OpenAI writes them,
        so that no two tokens read the same: `bytes:\\xc3`."""
        data = self.data(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def num_characters(self, token_id: int) -> int:
        """How many characters begin in a token."""
        return sum(byte & 0xC0 != 0x80 for byte in self.data(token_id))

    def _look_up(self, token_id: int) -> bytes:
        token = self._fast.id_to_token(token_id)
        if token is None or token_id in self._special:
            return (token or "").encode()
        if self._letters is not None and all(one in self._letters for one in token):
            return bytes(self._letters[one] for one in token)
        if found := _BYTE.fullmatch(token):
            return bytes.fromhex(found[1])
        return token.replace(_SPACE, " ").encode()
