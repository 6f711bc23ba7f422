"""How long a step of so many tokens takes, measured before requests are served."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from minivllm.engine.batch_inputs import PackedStep, Sampling, StepShape
from minivllm.engine.executor import Executor

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
ROUNDS = 7
BUDGET_S = 2.0  # for all rounds but the first two
LONGEST_MS = 250.0  # of a step that is measured


class StepCost:
    """Milliseconds of a step by its tokens: straight lines between measured points, of which none
    is above a later one: what disturbs a measurement makes it longer.

    Args:
        sizes: tokens of the measured steps, ascending.
        times: their milliseconds.
    """

    def __init__(self, sizes: Sequence[int], times: Sequence[float]) -> None:
        self.sizes = list(sizes)
        self.times = np.minimum.accumulate(times[::-1])[::-1].tolist()

    def __call__(self, num_tokens: int) -> float:
        """Milliseconds; beyond the largest size in proportion to it."""
        sizes, times = self.sizes, self.times
        if num_tokens >= sizes[-1]:
            return float(times[-1] * num_tokens / sizes[-1])
        index = bisect_left(sizes, num_tokens)
        if sizes[index] == num_tokens:
            return float(times[index])
        low, high = sizes[index - 1], sizes[index]
        share = (num_tokens - low) / (high - low)
        return float(times[index - 1] + share * (times[index] - times[index - 1]))


def measure(
    executor: Executor,
    largest: int,
    most_requests: int,
    now: Callable[[], float] = time.perf_counter,
) -> StepCost:
    """The shortest of a few steps of each size, up to the first that takes longer than
    `LONGEST_MS`. They read and write the reserved block only: of what a cache holds nothing
    changes.

    Args:
        executor: computes the steps, or replays graphs of them.
        largest: most tokens of a step.
        most_requests: tokens beyond so many are drafts.
        now: the time in seconds.
    """
    sizes = sorted({min(size, largest) for size in SIZES})
    begin, shortest = now(), np.full(len(sizes), np.inf)
    # Round by round, so that what disturbs a moment does not disturb all steps of one size.
    for number in range(ROUNDS):
        if number > 1 and now() - begin > BUDGET_S:
            break
        for index, size in enumerate(sizes):
            milliseconds = _milliseconds(executor, _decoding(size, most_requests), now)
            shortest[index] = min(shortest[index], milliseconds)
            if milliseconds > LONGEST_MS:
                sizes = sizes[: index + 1]
                break
    return StepCost(sizes, shortest[: len(sizes)].tolist())


def _decoding(size: int, most_requests: int) -> PackedStep:
    """A step of `size` tokens in block 0, of requests without a context: one token of each, or of
    `most_requests` several."""
    count = min(size, most_requests)
    each, more = divmod(size, count)
    lens = (each + 1,) * more + (each,) * (count - more)
    width = max(lens)  # Blocks have one token or more.
    indices = np.zeros((4, size), np.int64)  # token ids, positions, slots, rows of the logits
    indices[3] = np.arange(size)
    rest = np.concatenate((np.cumsum((0, *lens)), lens, np.zeros(count * width)))
    return PackedStep(
        indices.tobytes() + rest.astype(np.int32).tobytes(),
        StepShape(size, lens, width, size),
        lens,
        lens,
        Sampling(),
        needs_logits=False,
    )


def _milliseconds(executor: Executor, packed: PackedStep, now: Callable[[], float]) -> float:
    begin = now()
    result = executor.run(packed)
    assert result.tokens is not None
    result.tokens.tolist()  # waits for the device
    return 1e3 * (now() - begin)
