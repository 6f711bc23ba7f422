"""The page's main table: a row a cell, and why a figure or a column is not there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minivllm.analysis.cell import Cell, like_for_like
from minivllm.analysis.cells import name_columns, names_of
from minivllm.analysis.format import MISSING, listing, show
from minivllm.analysis.rows import distinct
from minivllm.analysis.separation import Separations
from minivllm.report.figures.plots import THROUGHPUT
from minivllm.report.percentiles import too_few, why_missing
from minivllm.report.sections import MAX_LINKS, MAX_ROWS, constants, link, place_of, unshown
from minivllm.report.tables import (
    COLUMNS,
    MBU,
    WINDOW,
    Column,
    drifted,
    main_columns,
    speedups,
    spread_text,
    text,
)

IN_CACHE = "the streamed bytes fit the last-level cache, so it would say nothing about memory"


def section(
    cells: list[Cell], out_dir: Path, requested: Sequence[Column] = COLUMNS
) -> dict[str, Any]:
    """Header and rows, what is the same in every cell, and why a column that was requested is
    absent."""
    columns = [
        column
        for column in (*main_columns(cells, requested), WINDOW)
        if any(_figure(cell, column) is not None for cell in cells)
    ]
    top = {
        c.key: max((cell.mean(c.key) or 0.0 for cell in cells), default=0.0)
        for c in columns
        if c.bar
    }
    names = name_columns(cells)
    ratios = speedups(cells)
    comparable = [
        cell for cell in cells if cell.summary(THROUGHPUT) and like_for_like(cells[0], cell)
    ]
    separations = Separations(comparable, THROUGHPUT)
    rows = []
    for index, cell in enumerate(cells[:MAX_ROWS]):
        rows.append(
            {
                "names": names_of(cell, names),
                "status": cell.marked_status,
                "tone": cell.tone,
                "speedup": ratios[index] if ratios else None,
                "tinge": _tinge(cell, cells[0], separations) if ratios and ratios[index] else "",
                "href": place_of(cell, index, out_dir),
                "figures": [_shown(cell, column, top.get(column.key)) for column in columns],
                "links": [
                    (show(row.get("block")), link(row, out_dir)) for row in cell.rows[:MAX_LINKS]
                ],
                "more": max(0, len(cell.rows) - MAX_LINKS),
            }
        )
    return {
        "names": names,
        "columns": columns,
        "rows": rows,
        "compare": bool(ratios),
        "unshown": unshown(cells, "table.csv"),
        "absent": _absent(cells, columns, requested),
        "constants": constants(cells),
        "blocks": max(len(cell.timed) for cell in cells),
        "busy": any(cell.busy for cell in cells),
        "apart": drifted(cells, ratios),
    }


def _tinge(cell: Cell, base: Cell, separations: Separations) -> str:
    """Whether a cell is shown to be faster or slower than the first, see `Separations`; "" where it
    is not."""
    mine, theirs = cell.mean(THROUGHPUT), base.mean(THROUGHPUT)
    if mine is None or theirs is None:
        return ""
    if cell is base or separations.between(cell, base) != "separated":
        return ""
    return "better" if mine > theirs else "worse"


def _figure(cell: Cell, column: Column) -> float | None:
    """What the table shows of a cell; None where it is not known, or would say nothing."""
    return None if column is MBU and _in_cache(cell) else cell.mean(column.key)


def _in_cache(cell: Cell) -> bool:
    return bool(cell.first("roofline.fits_cache"))


def _shown(cell: Cell, column: Column, top: float | None) -> dict[str, Any]:
    """One figure of the table; its bar is a share of the column's largest, `top`."""
    value = _figure(cell, column)
    return {
        "text": MISSING if value is None else text(cell, column),
        "sort": value,
        "spread": "" if value is None or column is WINDOW else spread_text(cell, column),
        "bar": 100 * value / top if value and top else None,
        "why": _why_missing(cell, column) if value is None else "",
    }


def _why_missing(cell: Cell, column: Column) -> str:
    if not cell.ok:
        return ""
    if column is MBU and _in_cache(cell):
        return IN_CACHE
    if column.key.startswith("energy."):
        return str(cell.first("energy.reason") or "no reason recorded")
    return why_missing(cell, column) or "not recorded"


def _absent(cells: list[Cell], used: list[Column], requested: Sequence[Column]) -> list[str]:
    """Why columns that a reader may look for are not in the table, or not in all its rows."""
    # The others are of quality alone.
    ok = [row for cell in cells if cell.summary(THROUGHPUT) for row in cell.ok]
    keys: set[str] = {column.key for column in used}
    notes: list[str] = []
    if not ok:
        return notes
    notes += too_few(
        cells,
        [column for column in requested if requested is not COLUMNS or column.key not in keys],
    )
    if "energy.joules_per_output_token" not in keys:
        notes.append(
            "J/token: "
            f"{listing([show(v) for v in distinct(ok, 'energy.reason')]) or 'no reason recorded'}."
        )
    if any(map(_in_cache, cells)):
        notes.append(f"MBU, where it is not shown: {IN_CACHE}.")
    elif MBU.key not in keys and not all(cell.simulated for cell in cells):
        notes.append(
            "MBU: no roofline was recorded (measure.roofline), or with runtime.overlap no three "
            "decoding steps in a row."
        )
    return notes
