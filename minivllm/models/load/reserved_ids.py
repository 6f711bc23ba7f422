"""Token ids that engines and servers act on, so that no random prompt may hold them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.models.load.tokenizer import Tokenizer

# Where nobody says which ids are special: of most vocabularies the first one is.
UNNAMED = (range(1),)

Reserved = tuple[range, ...]


def reserved_ids(
    tokenizer: Tokenizer | None, eos_token_ids: Iterable[int], vocab_size: int
) -> Reserved:
    """The ids that a random prompt must not hold, since engines and servers act on them: the end
    tokens, special tokens, and ids beyond the tokenizer's.

    Args:
        tokenizer: None: the special ids are not known, and `UNNAMED` stands for them.
        eos_token_ids: of the model.
        vocab_size: of the model.
    """
    found = set(eos_token_ids)
    if tokenizer is None:
        found.update(*UNNAMED)
    else:
        found.update(tokenizer.special_ids, range(tokenizer.size, vocab_size))
    return runs_of_ids(token for token in found if 0 <= token < vocab_size)


def runs_of_ids(ids: Iterable[int]) -> Reserved:
    """Ids as ascending ranges, in as few as can be."""
    runs: list[range] = []
    for token in sorted(set(ids)):
        if runs and runs[-1].stop == token:
            runs[-1] = range(runs[-1].start, token + 1)
        else:
            runs.append(range(token, token + 1))
    return tuple(runs)
