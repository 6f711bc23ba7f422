"""Blocks on two levels are told from noise, and the first ones from the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.analysis.cells import gather
from minivllm.analysis.levels import apart, levels
from minivllm.analysis.rows import Row
from minivllm.bench.records.measurement import SIMULATED


def rows(values: Sequence[float], arm: str = "one", **further: Any) -> list[Row]:
    """A cell's blocks with these throughputs, in the order in which they were measured."""
    return [
        {
            "cell_id": arm,
            "arm": arm,
            "sweep": "s",
            "block": i,
            "status": "ok",
            "metrics.output_tokens_per_s": value,
            "provenance.started_at": f"2026-01-01T00:{i:02}:00+0000",
            **further,
        }
        for i, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            [32.7, 94.2, 96.1, 95.0],
            "the first block lies apart from the others, 32.7 against 94.2 to 96.1 output tokens/s",
        ),
        (
            [50, 52, 99, 100, 101],
            "the first 2 of 5 blocks lie apart from the others, 50.0 to 52.0 against 99.0 to 101",
        ),
        ([100, 99, 70, 101], "block 3 of 4 lies apart from the others, 70.0 against 99.0 to 101"),
        ([100, 60, 101, 61], "its 4 blocks lie on two levels"),
        ([28.5, 50, 55, 62.7], "the first block lies apart from the others, 28.5 against 50.0"),
        ([50, 28.5, 55, 62.7], None),  # wide on this machine, and not what is suspected
        ([100, 104, 98, 101], None),
        ([100, 84, 92, 108], None),  # wide, and even
        ([50, 100], None),  # of two none is the other's exception
    ],
)
def test_blocks_apart(values: list[float], words: str | None) -> None:
    lines = apart(gather(rows(values)))
    assert bool(lines) is (words is not None)
    assert words is None or (words in lines[0] and "none of these states" in lines[0])


def test_what_is_simulated_has_no_noise_and_many_cells_few_lines() -> None:
    values = [30, 90, 91]
    simulated = {"config.engine._target_": SIMULATED}
    assert not apart(gather(rows(values, **simulated)))
    several = [row for arm in "abcde" for row in rows(values, arm, **{"config.cache.x": arm})]
    lines = apart(gather(several))
    assert len(lines) == 4 and lines[-1] == "Blocks lie apart in 2 more cells."


@given(
    st.lists(st.floats(0.5, 1.5), min_size=1, max_size=8),
    st.lists(st.floats(0.5, 1.5), min_size=1, max_size=8),
    st.randoms(),
)
def test_levels_far_apart_are_found_in_any_order(
    low: list[float], high: list[float], random: Any
) -> None:
    """Every value is on one of them, and those of one level stay together."""
    values = [*low, *(value + 10 for value in high)]
    random.shuffle(values)
    if (found := levels(values)) is None:
        assert len(values) < 3
        return
    few, many = found
    assert sorted(few + many) == list(range(len(values))) and len(few) <= len(many)
    assert all(
        (values[i] > 5) == (values[j] > 5) for places in found for i in places for j in places
    )
