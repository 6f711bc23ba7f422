"""Equal cells are not ranked, whichever of them happened to lead; cells that differ are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from minivllm.analysis.cell import Cell
from minivllm.analysis.rows import Row
from minivllm.analysis.separation import Separations

SPEED = "metrics.output_tokens_per_s"


def sweep(speeds: np.ndarray, *, turns: bool = True) -> list[Cell]:
    """Cells of these figures, [cells, blocks], measured in turns or one after another."""
    cells, blocks = speeds.shape
    made = []
    for k in range(cells):
        rows: list[Row] = []
        for b in range(blocks):
            second = b * cells + k if turns else k * blocks + b
            begun = f"2026-01-01T00:{second // 60:02d}:{second % 60:02d}+0000"
            rows.append(
                {
                    "status": "ok",
                    "block": b,
                    "provenance.host": "h",
                    "provenance.started_at": begun,
                    SPEED: float(speeds[k, b]),
                }
            )
        made.append(Cell("s", str(k), str(k), rows))
    return made


def leaders(cells: list[Cell]) -> tuple[Cell, Cell, Cell]:
    """The first, the second and the last by their means."""
    ranked = sorted(cells, key=lambda cell: -(cell.mean(SPEED) or 0.0))
    return ranked[0], ranked[1], ranked[-1]


@pytest.mark.parametrize("blocks", [2, 3, 6])
def test_of_ten_equal_cells_one_sweep_in_twenty_has_a_fastest(blocks: int) -> None:
    rng = np.random.default_rng(blocks)
    named = ratios = 0
    for _ in range(200):
        machine = 0.05 * rng.normal(size=blocks)
        cells = sweep(100 * np.exp(machine + 0.02 * rng.normal(size=(10, blocks))))
        first, second, last = leaders(cells)
        separations = Separations(cells, SPEED)
        named += separations.between(first, second) == "separated"
        ratios += separations.between(first, last) == "separated"
    assert named + ratios <= 0.05 * 200


def test_cells_that_differ_are_told_apart_by_two_blocks() -> None:
    rng = np.random.default_rng(0)
    base = np.array([[100.0], [130.0], [131.0], [60.0]])
    cells = sweep(base * np.exp(0.01 * rng.normal(size=(4, 2))))
    separations = Separations(cells, SPEED)
    assert separations.between(cells[1], cells[3]) == "separated"
    assert separations.between(cells[3], cells[1]) == "separated"
    assert separations.between(cells[1], cells[2]) == "not separated"


def test_cells_that_took_no_turns_or_have_one_block_are_not_judged() -> None:
    speeds = np.array([[100.0, 101.0], [200.0, 201.0]])
    apart = sweep(speeds, turns=False)
    assert Separations(apart, SPEED).between(*apart) == "apart"
    once = sweep(speeds[:, :1])
    assert Separations(once, SPEED).between(*once) == "once"


def test_a_cell_that_lost_its_blocks_does_not_silence_the_others() -> None:
    speeds = np.array([[100.0, 101.0, 100.0, 102.0, 99.0, 100.5], [2e2] * 6, [150.0] * 6])
    cells = sweep(speeds)
    del cells[2].rows[1:]
    assert Separations(cells, SPEED).between(cells[0], cells[1]) == "separated"


def test_a_difference_that_reads_as_one_is_none() -> None:
    cells = sweep(100 * np.exp(1e-6 * np.arange(12).reshape(2, 6) ** 2 + np.array([[0], [0.003]])))
    assert Separations(cells, SPEED).between(*cells) == "not separated"
    assert math.isclose(cells[1].mean(SPEED) or 0.0, 100.3, rel_tol=1e-3)
