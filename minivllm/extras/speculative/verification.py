"""Which drafts are kept."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, Protocol

from minivllm.engine.request import Request

if TYPE_CHECKING:
    from torch import Tensor


def uniform(seed: int, position: int, salt: int = 0) -> float:
    """A number in [0, 1) that depends on (seed, position, salt) alone, and not on
    the noise that draws tokens."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, position, salt), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class DraftedRun(NamedTuple):
    """What a step has computed of one request with drafts."""

    request: Request  # ends with the drafts
    start: int  # position of the first draft
    drafts: Sequence[int]  # D draft tokens
    # What the target draws at each draft and after the last one, D + 1 tokens or more; below 0
    # where its logits are not finite.
    chosen: Sequence[int]
    logits: Tensor | None  # of these positions [D + 1 or more, vocab], if `needs_logits`


class Verifier(Protocol):
    """How drafts are judged."""

    needs_logits: bool

    def verify(self, run: DraftedRun) -> list[int]:
        """The tokens that a request gets: its accepted drafts, and one more."""


class SameNoise:
    """A draft is accepted while it is the token that the target draws itself.

    Draws are `argmax(p / e)` with noise `e` hashed from (seed, position, token), so what the target
    draws at a position does not depend on drafts, and the output is that of no speculation at every
    temperature and with any proposer. A drafting model that draws with the same noise is right with
    probability (1 - d) / (1 + d) or more, where d is the total variation distance of the two
    distributions: a Gumbel coupling, which needs neither of them at the other's side (Daliri,
    Musco, Suresh 2024, arXiv:2408.07978). Rejection sampling, which needs both, reaches 1 - d.
    """

    needs_logits = False

    def verify(self, run: DraftedRun) -> list[int]:
        return list(run.chosen[: common_prefix(run.drafts, run.chosen) + 1])


class GivenAcceptance:
    """Drafts are accepted at a given rate, whatever they are: their cost is real, the verdict is
    drawn. So speed can be measured on random weights, at the acceptance of a trained model.

    Args:
        rates: by position of the draft, given that those before it are accepted; the last one holds
            for all positions after it.
    """

    needs_logits = False

    def __init__(self, rates: Sequence[float]) -> None:
        self.rates = rates

    def verify(self, run: DraftedRun) -> list[int]:
        accepted = 0
        while accepted < len(run.drafts) and run.chosen[accepted] >= 0:
            rate = self.rates[min(accepted, len(self.rates) - 1)]
            if uniform(run.request.seed, run.start + accepted) >= rate:
                break
            accepted += 1
        return [*run.drafts[:accepted], run.chosen[accepted]]
