"""Prompts that are computed when looked at, so that a trace of 150 million tokens takes no memory;
and random token ids, uniform over a vocabulary but for ids that no prompt may hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import overload

import numpy as np
from numpy.typing import NDArray

from minivllm.errors import BadInput
from minivllm.models.load.reserved_ids import Reserved

WORD = 1 << 64
ANSWERS = 1 << 64  # where the positions of simulated answers begin, beyond those of any prompt
LONGEST_ANSWER = 1 << 32


class _Computed(Sequence[int]):
    """A sequence that knows how to go through itself; single tokens are rarely read."""

    __slots__ = ()

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return tuple(self)[index]


@dataclass(frozen=True, slots=True)
class LazyPrompt(_Computed):
    """A sequence of token ids, given by runs of positions in an endless generated text.

    The text's token at each position comes from (seed, position) alone, so prompts that share a run
    share its tokens: that is how the hash ids of a trace become really shared prefixes.

    Args:
        runs: stretches of the text, none empty, positions in [0, 2^63); a run that follows on from
            the one before is part of it.
        vocab_size: ids are uniform over [0, vocab_size) but for the reserved ones.
        seed: of the text.
        reserved: ids that the text does not hold, see `reserved_ids`.
    """

    runs: tuple[range, ...]
    vocab_size: int
    seed: int
    reserved: Reserved = ()

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    def __iter__(self) -> Iterator[int]:
        for run in self.runs:
            yield from self._ids(run)

    def _ids(self, run: range) -> list[int]:
        """Splitmix64 (Steele et al. 2014) of the positions, down to the vocabulary."""
        x = np.arange(run.start, run.stop, dtype=np.uint64)
        x += np.uint64((self.seed + 1) * 0x9E3779B97F4A7C15 % WORD)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        allowed = drawable(self.vocab_size, self.reserved)
        ids: list[int] = allowed[(x ^ (x >> np.uint64(31))) % np.uint64(len(allowed))].tolist()
        return ids


@dataclass(frozen=True, slots=True)
class JoinedPrompt(_Computed):
    """A prompt in pieces: the earlier turns of a conversation, then the new one.

    Args:
        pieces: token ids each, or a stretch of `answer_positions` where nothing is computed.
    """

    pieces: tuple[Sequence[int], ...]

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.pieces)


def runs_of(prompt: Sequence[int]) -> tuple[Sequence[int], ...]:
    """A prompt by stretches that are equal where its tokens are; ranges of positions wherever it
    has them."""
    if isinstance(prompt, LazyPrompt):
        return prompt.runs
    if isinstance(prompt, JoinedPrompt):
        return tuple(chain.from_iterable(map(runs_of, prompt.pieces)))
    return (prompt if isinstance(prompt, range) else tuple(prompt),)


def answer_positions(request_id: str, length: int = LONGEST_ANSWER) -> range:
    """Positions of a simulated answer; only later turns of its conversation share them."""
    number = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big")
    start = ANSWERS + number * LONGEST_ANSWER
    return range(start, start + length)


def joined(runs: Sequence[range]) -> tuple[range, ...]:
    """The same positions in as few runs as can be."""
    result: list[range] = []
    for run in runs:
        if result and result[-1].stop == run.start:
            result[-1] = range(result[-1].start, run.stop)
        elif run:
            result.append(run)
    return tuple(result)


@lru_cache(maxsize=8)
def drawable(vocab_size: int, reserved: Reserved) -> NDArray[np.int64]:
    """The ids below `vocab_size` that are not reserved, int64, ascending.

    Raises:
        BadInput: there is none.
    """
    allowed = np.ones(vocab_size, dtype=np.bool_)
    for run in reserved:
        allowed[run.start : run.stop] = False
    ids = np.flatnonzero(allowed)
    if not len(ids):
        raise BadInput(
            f"all {vocab_size} token ids are special, so that no random prompt can be made: give "
            "prompts with workload=file"
        )
    return ids


def draw_ids(
    length: int, vocab_size: int, reserved: Reserved, rng: np.random.Generator
) -> tuple[int, ...]:
    """So many random ids. Raises BadInput as `drawable` does."""
    ids = drawable(vocab_size, reserved)
    drawn: list[int] = ids[rng.integers(0, len(ids), size=length)].tolist()
    return tuple(drawn)
