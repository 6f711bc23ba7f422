"""A request of a simulation, whose tokens are counted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from typing import Any

from minivllm.bench.workloads.lazy_prompt import answer_positions, runs_of
from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Request
from minivllm.engines.base import EngineOutput

TOKEN = (0,)


class SimulatedTokens(Sequence[Any]):
    """A request's tokens by where they come from; a slice costs the same however long it is.

    Slices are hashable, and equal where the tokens are: a range of positions (of a `LazyPrompt`'s
    text, or of this answer alone), a tuple of token ids, or a tuple of such
    pieces.

    Args:
        prompt: the prompt.
        request_id: of the request; no two answers share one.
    """

    __slots__ = ("_runs", "_starts", "length")

    def __init__(self, prompt: Sequence[int], request_id: str) -> None:
        runs = runs_of(prompt)
        self._runs = (*runs, answer_positions(request_id))
        self._starts = [0]
        for run in runs:
            self._starts.append(self._starts[-1] + len(run))
        self.length = self._starts[-1]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int | slice) -> Any:
        starts, runs = self._starts, self._runs
        if isinstance(index, int):
            index = range(self.length)[index]
            run = bisect_right(starts, index) - 1
            return runs[run][index - starts[run]]
        start, stop, step = index.start, index.stop, index.step
        if (
            step is not None
            or start is None
            or stop is None
            or not 0 <= start < stop <= self.length
        ):
            start, stop, step = index.indices(self.length)
            if step != 1:
                raise ValueError("simulated tokens are cut into stretches only")
        run = bisect_right(starts, start) - 1
        first = starts[run]
        if stop - first <= len(runs[run]):  # nearly every block of a prefix
            return runs[run][start - first : stop - first]
        pieces = []
        while start < stop:
            end = min(stop, starts[run] + len(runs[run]))
            pieces.append(runs[run][start - starts[run] : end - starts[run]])
            start, run = end, run + 1
        return tuple(pieces)

    def block_keys(self, size: int, blocks: range) -> list[Hashable]:
        """What each of these blocks of `size` tokens is compared by: its first position where all
        its tokens follow on from there, otherwise its slice. So a prompt of thousands of tokens
        is cut without an object a block.

        Args:
            blocks: in a row, full.
        """
        keys: list[Hashable] = []
        start, stop = size * blocks.start, size * blocks.stop
        run = bisect_right(self._starts, start) - 1
        while start < stop:
            positions, first = self._runs[run], start - self._starts[run]
            count = (min(len(positions) - first, stop - start)) // size
            if count > 0 and isinstance(positions, range) and positions.step == 1:
                begin = positions.start + first
                keys += range(begin, begin + count * size, size)
                start += count * size
            elif first >= len(positions):
                run += 1
            else:
                keys.append(self[start : start + size])
                start += size
        return keys

    def extend(self, token_ids: Sequence[Any]) -> None:
        """Append so many tokens to the answer, whatever they are."""
        self.length += len(token_ids)

    def __delitem__(self, index: slice) -> None:
        """Drop the end of the answer, from `index.start` on."""
        self.length = index.start


class SimulatedRequest(Request):
    """A request whose answer is counted, not known."""

    __slots__ = ("output", "started_s")

    def __init__(
        self,
        request_id: str,
        tokens: SimulatedTokens,
        params: SamplingParams,
        max_num_tokens: int,
        seed: int,
        arrival_s: float,
    ) -> None:
        super().__init__(
            *(request_id, tokens, params),
            max_num_tokens=max_num_tokens,
            seed=seed,
            arrival_s=arrival_s,
        )
        self.started_s: float | None = None
        self.output = EngineOutput(request_id, TOKEN)  # the same object for each token but the last

    def begin(self, now: float) -> None:
        """Take note of its first step, and of what the prefix cache had of it."""
        self.started_s, cached = now, self.cache.num_reused
        self.output = EngineOutput(self.request_id, TOKEN, started_s=now, cached_tokens=cached)

    def grow(self, count: int) -> str | None:
        """Append so many tokens; the finish reason if the answer has its full length."""
        tokens = self.token_ids
        tokens.length += count
        return "length" if tokens.length >= self.max_num_tokens else None
