"""Which blocks of cells may be held against each other, and what is said of the others."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.analysis.cell import Cell
from minivllm.analysis.interleaving import (
    apart,
    caveat,
    in_turns,
    interval_text,
    marked,
    relative,
    took_turns,
)
from minivllm.analysis.rows import Row, number
from minivllm.bench.records.measurement import SIMULATED

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
SPEED = "metrics.output_tokens_per_s"
BUSY = "other processes used 40 % of the processor time"


def cell(starts: list[float], speeds: list[float] | None = None, host: str = "h") -> Cell:
    """A cell of so many blocks, which were begun so many seconds after the first of all."""
    rows: list[Row] = [
        {
            "status": "ok",
            "block": block,
            "provenance.host": host,
            "provenance.started_at": (BEGIN + timedelta(seconds=start)).isoformat(),
            SPEED: 100.0 if speeds is None else speeds[block],
        }
        for block, start in enumerate(starts)
    ]
    return Cell("s", "a", "c", rows)


def speed(row: Row) -> float | None:
    return number(row.get(SPEED))


def test_cells_in_turns_give_pairs_and_an_interval() -> None:
    machine = [1.0, 1.1, 0.9, 1.2, 1.0, 0.8]
    first = cell([20.0 * b for b in range(6)], [100 * m for m in machine])
    second = cell([20.0 * b + 10 for b in range(6)], [150 * m for m in machine])
    assert in_turns(first, second) == [("h", b) for b in range(6)] and took_turns(first, second)
    found = relative(second, first, speed)
    assert found is not None and found.low is not None and found.n == 6
    assert found.low == pytest.approx(1.5) and caveat(first, second) == ""


def test_cells_that_were_measured_apart_give_no_interval() -> None:
    rng = np.random.default_rng(0)
    speeds = [[100 * f * math.exp(rng.normal(0, 0.005)) for _ in range(8)] for f in (1.0, 1.1)]
    first, second = (cell([10.0 * b + 80 * k for b in range(8)], speeds[k]) for k in (0, 1))
    assert apart(first, second) and not took_turns(first, second)
    found = relative(second, first, speed)
    assert found is not None and found.ratio == pytest.approx(1.1, rel=0.02)
    assert found.low is found.high is found.p_value is None
    assert caveat(first, second) == " (measured apart, so without an interval)"
    assert interval_text(found, first, second) == "apart"


def test_a_block_that_was_measured_again_is_left_out() -> None:
    first = cell([0, 20, 40, 60, 80, 100])
    second = cell([10, 30, 500, 70, 90, 110])  # the third, later
    assert in_turns(first, second) == [("h", b) for b in (0, 1, 3, 4, 5)]
    assert not apart(first, second) and not took_turns(first, second)


def test_other_hosts_and_times_that_are_not_known_are_no_turns() -> None:
    there, elsewhere = cell([0, 20]), cell([10, 30], host="other")
    assert apart(there, elsewhere)
    for text in ("", "yesterday"):
        silent = cell([10, 30])
        for row in silent.rows:
            row["provenance.started_at"] = text
        assert apart(there, silent)
    naive = cell([10, 30])
    for row in naive.rows:
        row["provenance.started_at"] = row["provenance.started_at"].removesuffix("+00:00")
    assert took_turns(there, naive)  # in UTC, as all that this program writes


def test_a_single_block_is_neither() -> None:
    assert not apart(cell([0]), cell([10])) and not took_turns(cell([0]), cell([10]))
    found = relative(cell([10], [50.0]), cell([0]), speed)
    assert found is not None and found.ratio == pytest.approx(0.5) and found.low is None


def test_a_simulation_has_no_time_to_change_in() -> None:
    cells = cell([0, 1, 2, 3]), cell([10, 11, 12, 13])
    for one in cells:
        for row in one.rows:
            row["config.engine._target_"] = SIMULATED
    assert all(one.simulated for one in cells) and took_turns(*cells)


def test_a_busy_block_is_said() -> None:
    first, second = cell([0, 20]), cell([10, 30])
    second.rows[1]["validity.notes"] = [BUSY]
    assert caveat(first, second) == " (1 of 4 blocks busy)" and caveat(first) == ""
    assert marked("1.20×", first, second) == "1.20× (busy)" and marked("–", second) == "–"


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=12))
def test_spans_that_are_kept_never_overlap(starts: list[tuple[int, int]]) -> None:
    one, other = (cell([float(pair[k]) for pair in starts]) for k in (0, 1))
    spans = sorted((min(starts[b]), max(starts[b])) for _, b in in_turns(one, other))
    assert spans and all(a[1] < b[0] for a, b in pairwise(spans))
