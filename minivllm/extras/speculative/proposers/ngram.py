"""Prompt lookup: a draft is copied from where the last tokens of a request occurred before."""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.engine.request import Request
from minivllm.extras.speculative.options import NgramOptions
from minivllm.extras.speculative.proposer import Proposer


class NgramIndex:
    """Where each n-gram of a growing text occurred last, and was followed by a token.

    Keys are the tokens themselves, so that a collision of hashes finds nothing wrong. A token takes
    one entry for each length, in constant time; a look-up takes one dictionary access for each
    length, whatever the text.

    Args:
        shortest, longest: n, in tokens.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self.num_tokens = 0  # of the text
        # n -> n-gram -> position of the token after its last occurrence, longest n first
        self.after: dict[int, dict[tuple[int, ...], int]] = {
            length: {} for length in range(longest, shortest - 1, -1)
        }

    def extend(self, token_ids: Sequence[int]) -> None:
        """Index the tokens that the text has more than at the last call."""
        for length, after in self.after.items():
            for position in range(max(self.num_tokens, length), len(token_ids)):
                after[tuple(token_ids[position - length : position])] = position
        self.num_tokens = len(token_ids)

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Position of the token after the latest earlier occurrence of the longest run of last
        tokens that occurred before; None if none did."""
        for length, after in self.after.items():
            position = after.get(tuple(token_ids[-length:]))
            if position is not None:
                return position
        return None


class NgramProposer(Proposer):
    """speculative=ngram: prompt lookup decoding (Saxena 2023), over prompt and output.

    Memory is linear in the tokens of the running requests: some 130 bytes a token for each length
    of n-gram.
    """

    name = "ngram"

    def __init__(self, options: NgramOptions) -> None:
        self.options: NgramOptions = options
        self.indexes: dict[Request, NgramIndex] = {}

    def propose(self, request: Request, most: int) -> list[int]:
        """What followed the latest earlier occurrence of the last tokens. A draft that reaches the
        end of the text goes on with its own first tokens, as text that repeats itself does."""
        index = self.indexes.get(request)
        if index is None:
            index = NgramIndex(self.options.prompt_lookup_min, self.options.prompt_lookup_max)
            self.indexes[request] = index
        token_ids = request.token_ids
        index.extend(token_ids)
        position = index.find(token_ids)
        if position is None:
            return []
        draft = token_ids[position : position + most]
        repeats = -(-most // len(draft)) if draft else 0
        return (draft * repeats)[:most]

    def finished(self, request: Request) -> None:
        self.indexes.pop(request, None)
