"""Times of steps by their tokens: between measured points, and from an executor with a clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.extras.speculative.step_cost import LONGEST_MS, SIZES, StepCost, measure


@given(st.lists(st.floats(0.1, 100), min_size=4, max_size=4), st.integers(1, 200))
def test_more_tokens_never_take_less(times: list[float], size: int) -> None:
    cost = StepCost([1, 4, 16, 64], times)
    assert cost(size) <= cost(size + 1) + 1e-9
    assert min(times) <= cost(size) <= max(times) * max(1, size / 64) + 1e-9


def test_measured_points_and_lines_between_them() -> None:
    cost = StepCost([1, 4, 16], [2.0, 5.0, 9.0])
    assert [cost(size) for size in (1, 2, 4, 10, 16, 32)] == pytest.approx(
        [2.0, 3.0, 5.0, 7.0, 9.0, 18.0]
    )
    # a point above a later one was disturbed
    assert StepCost([1, 2, 4], [3.0, 8.0, 4.0])(2) == 4.0


REQUESTS = 5  # most of a step; what has more tokens has drafts


class Clocked:
    """An executor whose steps take as long as it says, and twice as long every fifth time."""

    def __init__(self, milliseconds: Any) -> None:
        self.milliseconds, self.time_s, self.sizes = milliseconds, 0.0, []

    def run(self, packed: Any) -> Any:
        """Take the time of a step, which reads and writes block 0 alone."""
        size = packed.shape.tokens
        self.sizes.append(size)
        ints = torch.frombuffer(bytearray(packed.ints), dtype=torch.int32)
        tensors = packed.shape.unpack(ints)
        assert not tensors["block_table"].any() and not tensors["slot_mapping"].any()
        lens = tensors["query_start_loc"].diff()
        assert lens.tolist() == list(packed.query_lens) == tensors["seq_lens"].tolist()
        assert len(lens) == min(size, REQUESTS) and lens.max() - lens.min() <= 1
        assert tensors["logit_rows"].tolist() == list(range(size))
        self.time_s += self.milliseconds(size) * (1 + (len(self.sizes) % 5 == 0)) / 1e3
        return SimpleNamespace(tokens=torch.zeros(size))


@pytest.mark.parametrize("largest", [1, 7, 64, 10_000])
def test_the_shortest_time_of_each_size_is_taken(largest: int) -> None:
    executor = Clocked(lambda size: 1.0 + 0.1 * size)
    cost = measure(executor, largest, REQUESTS, lambda: executor.time_s)
    assert max(executor.sizes) == min(largest, SIZES[-1])
    assert len(set(cost.sizes)) == len(cost.sizes)
    for size in cost.sizes:
        assert cost(size) == pytest.approx(1.0 + 0.1 * size)


def test_slow_steps_are_measured_a_few_times() -> None:
    executor = Clocked(lambda size: 100.0 * size)
    cost = measure(executor, 256, REQUESTS, lambda: executor.time_s)
    assert cost.sizes[-1] < LONGEST_MS / 100 + 1, "it went on after a step that took too long"
    assert executor.sizes.count(1) < 7
    assert cost(64) == pytest.approx(64 / cost.sizes[-1] * cost.times[-1])
