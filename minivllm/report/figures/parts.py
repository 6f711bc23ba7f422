"""Stacked bars: what a cell's memory and the time of its steps consist of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from minivllm.analysis.cell import Cell
from minivllm.analysis.format import count, sig
from minivllm.report.figures.cell_styles import CellStyles
from minivllm.report.figures.palette import BLACK, CLAY, HAZE, MIST, SAND, SLATE, STONE, TAUPE
from minivllm.report.figures.plots import cut, failures_note
from minivllm.report.figures.style import (
    Drawing,
    Sheet,
    beside,
    canvas,
    heading,
    legend_below,
    mark_failure,
    patch,
    rows_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HOST = "host RSS peak"
PHASES = {
    "schedule": TAUPE,
    "draft": CLAY,  # drawn where a model drafts
    "prepare": MIST,
    "forward": SLATE,
    "sample": SAND,
    "emit": HAZE,
    "gap": STONE,
}
DASHES = (0, (2, 1))
_Times = dict[str, float | None]  # ms of each phase; None is not known


@dataclass(frozen=True)
class _Memory:
    """One cell's memory in GB; None is not known."""

    weights: float | None
    pool: float  # the KV pool, as far as it counts in the total
    aside: float  # a pool in a host's memory, whose pages count only once they are written to
    rest: float
    kind: str  # what the total is; "" where there is none
    full: float | None  # what the weights take in 16 bits

    @property
    def total(self) -> float:
        """Of what is known."""
        return (self.weights or 0.0) + self.pool + self.rest

    @property
    def end(self) -> float:
        """Where its bar ends."""
        return max(self.total, (self.weights or 0.0) + self.aside)


def _memory_of(cell: Cell) -> _Memory | None:
    """The process's memory on the device where the model lies there, else RSS; None where nothing
    is known."""
    keys = {
        "device, whole process": "memory.device_process",
        "device, peak reserved": "memory.device_peak_reserved",
        HOST: "memory.host_rss_peak",
    }
    values = ((name, value) for name, key in keys.items() if (value := cell.mean(key)) is not None)
    kind, total = next(values, ("", None))
    weights, full = (cell.mean(f"memory.{name}") for name in ("weights", "weights_16bit"))
    if weights is None and total is None:
        return None
    pool = cell.mean("memory.kv_pool") or 0.0
    aside = pool if kind == HOST else 0.0
    rest = max(0.0, (total or 0.0) - (weights or 0.0) - (pool - aside))
    giga = [
        None if value is None else value / 1e9
        for value in (weights, pool - aside, aside, rest, full)
    ]
    return _Memory(giga[0], giga[1] or 0.0, giga[2] or 0.0, giga[3] or 0.0, kind, giga[4])


def memory(cells: list[Cell], styles: CellStyles) -> Drawing | None:
    """Weights, KV pool and the rest, stacked; the weights' 16-bit size as a mark.

    In a host's memory a pool is an outline: its pages take none until they are written to, so how
    much of it the process holds is not known.
    """
    shown, rest = cut(cells)
    known = {cell.label: _memory_of(cell) for cell in shown if cell.ok}
    held = [one for one in known.values() if one is not None]
    if not held:
        return None
    right = max(max(one.end, one.full or 0.0) for one in held) or 1.0
    outlined = any(one.aside for one in held)

    rows = [
        _MemoryRow(
            styles[cell.label].name, known.get(cell.label), "" if cell.ok else cell.status_text
        )
        for cell in shown
    ]
    kinds = list(dict.fromkeys(one.kind for one in held if one.kind))
    alt = f"Stacked bars of weights, KV pool and other memory for {count(len(shown), 'cell')}"
    alt += ", with the 16-bit size of the weights marked."
    caption = f"Total: {' or '.join(kinds) or 'not recorded'}."
    caption += " Dashed mark: what the same weights take in 16 bits."
    if HOST in kinds:
        caption += (
            " The host's peak is that of loading and of the measured window, without the probe "
            "of the limits."
        )
    if outlined:
        caption += (
            " Outline: the pool as it was set aside in the host's memory, where pages count in "
            "the total only once they are written to."
        )
    note = failures_note(shown)
    return Drawing(
        "memory",
        "What takes the memory?",
        alt + note,
        caption + note + styles.note + rest,
        partial(_draw_memory, rows, right, outlined),
    )


@dataclass(frozen=True)
class _MemoryRow:
    """A row of `memory`; `failure` is how the cell failed, or ""."""

    name: str
    memory: _Memory | None
    failure: str


def _draw_memory(rows: Sequence[_MemoryRow], right: float, outlined: bool, sheet: Sheet) -> Figure:
    from matplotlib.lines import Line2D

    figure, ax = canvas(height=sheet.height(len(rows)), sheet=sheet)
    for y, row in enumerate(rows):
        if row.failure:
            mark_failure(ax, y, row.failure, sheet, right=right)
        elif row.memory is None:
            beside(ax, 0.0, y, "not recorded")
        else:
            _memory_bar(ax, y, row.memory, sheet)
    rows_axis(ax, [row.name for row in rows], sheet)
    ax.set_xlim(0, right * sheet.margin(0.2))
    ax.set_xlabel("GB (10⁹ bytes); labels: weights of total")
    dashes = Line2D([], [], color=BLACK, lw=2, ls=DASHES)
    pool_key = (patch(MIST, outline=outlined), "KV pool, set aside" if outlined else "KV pool")
    parts = [(patch(SLATE), "weights"), pool_key, (patch(STONE), "rest of the process")]
    legend_below(figure, [*parts, (dashes, "the weights in 16 bits")])
    return figure


def _memory_bar(ax: Axes, y: int, one: _Memory, sheet: Sheet) -> None:
    left = 0.0
    for value, colour in ((one.weights or 0.0, SLATE), (one.pool, MIST), (one.rest, STONE)):
        ax.barh(y, value, left=left, height=sheet.bar, color=colour)
        left += value
    if one.aside:
        start = one.weights or 0.0
        ax.barh(
            y,
            one.aside,
            left=start,
            height=sheet.bar,
            facecolor="none",
            edgecolor=MIST,
            linewidth=1.4,
        )
    if one.full is not None:
        ax.plot(
            [one.full] * 2,
            [y - 0.65 * sheet.bar, y + 0.65 * sheet.bar],
            color=BLACK,
            lw=2,
            ls=DASHES,
        )
    beside(ax, one.end, y, f"{sig(one.weights)} of {sig(one.total)}")


def breakdown(cells: list[Cell], styles: CellStyles) -> Drawing | None:
    """Mean milliseconds a step by phase, stacked."""
    measured = [cell for cell in cells if cell.mean("breakdown.forward_ms") is not None]
    shown, rest = cut(measured)
    if not shown:
        return None
    phases = [phase for phase in PHASES if _is_recorded(phase, shown)]
    rows = [
        (
            styles[cell.label].name,
            {phase: cell.mean(f"breakdown.{phase}_ms") for phase in phases},
        )
        for cell in shown
    ]
    alt = f"Stacked bars of a step's phases ({', '.join(phases)}) in milliseconds, "
    alt += f"{count(len(shown), 'cell')}."
    parts = (
        "Once whole, and once without the forward pass, on its own scale, with its share of the "
        "step. Gap is the time between the end of one step and the start of the next."
    )
    caption = parts if len(phases) > 1 else "Phases of a step are not told apart."
    caption += f"{_on_gpu(shown)}{styles.note}{rest}"
    if len(measured) < len(cells):
        caption += (
            f" {len(measured)} of {count(len(cells), 'cell')}: the others failed or show no steps."
        )
    title = "Where does the time of a step go?"
    return Drawing("breakdown", title, alt, caption, partial(_draw_breakdown, rows))


def _is_recorded(phase: str, cells: Sequence[Cell]) -> bool:
    """Whether some cell says how long a phase took; of drafts, whether it had any."""
    means = [cell.mean(f"breakdown.{phase}_ms") for cell in cells]
    return any(means) if phase == "draft" else any(mean is not None for mean in means)


def _draw_breakdown(rows: Sequence[tuple[str, _Times]], sheet: Sheet) -> Figure:
    """A row a cell, of its name and its times."""
    known = list(rows[0][1])
    panels = {
        "The whole step": known,
        "Without forward": [phase for phase in known if phase != "forward"],
    }
    panels = {title: phases for title, phases in panels.items() if phases}
    figure, _ = canvas(
        1, len(panels), height=sheet.height(len(rows), 1.15), sheet=sheet, sharey=True
    )
    for index, (ax, (title, phases)) in enumerate(zip(figure.axes, panels.items(), strict=True)):
        right = max(_phases_bar(ax, y, times, phases, sheet) for y, (_, times) in enumerate(rows))
        ax.set_xlim(0, (right or 1.0) * sheet.margin(0.18 if index == 0 else 0.4))
        rows_axis(ax, [name for name, _ in rows], sheet, labels=index == 0)
        ax.set_xlabel("ms a step, mean")
        heading(ax, title)
    legend_below(figure, [(patch(PHASES[phase]), phase) for phase in known])
    return figure


def _phases_bar(ax: Axes, y: int, times: _Times, phases: list[str], sheet: Sheet) -> float:
    """Draw one row of `breakdown`; returns where it ends."""
    left = 0.0
    for phase in phases:
        ax.barh(y, times[phase] or 0.0, left=left, height=sheet.bar, color=PHASES[phase])
        left += times[phase] or 0.0
    whole = math.fsum(value or 0.0 for value in times.values())
    if all(times[phase] is None for phase in phases):
        note = "not told apart"  # another engine's steps may have no parts
    elif len(phases) == len(times):
        note = sig(left)
    else:
        note = f"{sig(left)} ({sig(100 * left / whole, 2) if whole else 0} %)"
    beside(ax, left, y, note)
    return left


def _on_gpu(shown: list[Cell]) -> str:
    """What forward and sample are where the model's work is only launched."""
    on_gpu = [cell for cell in shown if cell.first("memory.device_peak_allocated") is not None]
    which = "" if len(on_gpu) == len(shown) else f" of {count(len(on_gpu), 'cell')}"
    words = (
        f" On a GPU{which}, forward is the time to launch the model, and the wait for its end is "
        "in sample."
    )
    return words if on_gpu else ""
