"""The texts of sessions: stretches of an endless generated text, equal where prompts are equal."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from fractions import Fraction

from minivllm.bench.workloads.lazy_prompt import joined
from minivllm.errors import BadInput

Runs = tuple[range, ...]
STRETCH = 1 << 36  # positions that the texts of one session may take
MARKERS = 1 << 61  # where the markers of replays begin, beyond all texts
MARKER_LEN = 8  # tokens
DENOMINATOR = 1_000_000  # of a factor on lengths


class TextSpace:
    """Positions of the generated text (see `LazyPrompt`), handed out to pieces by their names.

    Args:
        number: of the space; no two share a position.
    """

    def __init__(self, number: int) -> None:
        self._next = number * STRETCH
        self._pieces: dict[Hashable, range] = {}

    def fresh(self, length: int) -> range:
        """Text that nothing else has."""
        start = self._next
        self._next += length
        return range(start, self._next)

    def named(self, name: Hashable, length: int) -> range:
        """The text of this name, always of the same length."""
        if name not in self._pieces:
            self._pieces[name] = self.fresh(length)
        return self._pieces[name]

    def prompt(self, hash_ids: Sequence[int], block: int, length: int, where: str) -> Runs:
        """The text of a prompt that is known by the hashes of its blocks.

        A partial last block may have a hash or not; without one it is text that nothing else has.

        Args:
            hash_ids: of the prompt's blocks, in order; none: nothing is known of it.
            block: tokens that one hash stands for.
            length: tokens of the prompt.
            where: how the error begins.

        Raises:
            BadInput: there are not as many hashes as blocks.
        """
        whole, rest = divmod(length, block)
        if hash_ids and len(hash_ids) not in (whole, whole + bool(rest)):
            raise BadInput(
                f"{where}: {length} prompt tokens are {whole + bool(rest)} blocks of {block} "
                f"tokens, and there are {len(hash_ids)} hash_ids"
            )
        runs = [self.named((block, one), block) for one in hash_ids]
        if len(hash_ids) > whole:
            runs[-1] = runs[-1][:rest]
        runs.append(self.fresh(length - sum(map(len, runs))))
        return joined(runs)


def scaled(runs: Runs, factor: Fraction) -> Runs:
    """The same text at another length; what two texts share they share still."""
    if factor == 1:
        return runs
    up, down = factor.numerator, factor.denominator
    short = joined([range(run.start * up // down, run.stop * up // down) for run in runs])
    first = runs[0].start * up // down
    return short or (range(first, first + 1),)  # a prompt has a token


def marked(runs: Runs, after: int, number: int) -> Runs:
    """The text with a marker in place of the `MARKER_LEN` tokens after its first `after` ones.

    Args:
        number: of the marker; each has tokens of its own.
    """
    length = sum(map(len, runs))
    end = min(after + MARKER_LEN, length)
    start = MARKERS + number * MARKER_LEN
    marker = range(start, start + end - after)
    return joined([*cut(runs, 0, after), marker, *cut(runs, end, length)])


def cut(runs: Runs, begin: int, end: int) -> Runs:
    """Tokens `begin` to `end` of a text."""
    pieces, at = [], 0
    for run in runs:
        low, high = max(begin - at, 0), min(end - at, len(run))
        if low < high:
            pieces.append(run[low:high])
        at += len(run)
    return tuple(pieces)
