"""Figures over time: what was in the batch and the cache at each step, and what the machine did meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm.report.cells import Cell
from minivllm.report.format import count
from minivllm.report.rows import record_folder
from minivllm.report.style import (
    BLUE,
    FAINT,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    Plot,
    canvas,
    legend_below,
    png,
    short,
)

if TYPE_CHECKING:
    import pandas as pd

MAX_TIMELINES = 12
MAX_POINTS = 800  # a line; more than pixels would only grow the file


@dataclass(frozen=True)
class Panel:
    """One column of a timeline figure: the series drawn in it and the unit."""

    title: str
    series: tuple[tuple[str, str, str, float], ...]  # field, name, colour, scale


STEPS = (
    Panel(
        "requests",
        (("num_requests", "requests in the batch", BLUE, 1.0), ("waiting", "waiting", ORANGE, 1.0)),
    ),
    Panel(
        "KV blocks",
        (("kv_blocks_used", "KV blocks used", GREEN, 1.0), ("kv_blocks_total", "in the pool", FAINT, 1.0)),
    ),
)
TELEMETRY = (
    Panel("host GB", (("rss", "resident memory of the worker", BLUE, 1e-9),)),
    Panel(
        "CPU % of a core",
        (
            ("cpu_worker_percent", "CPU of the worker", SKY, 1.0),
            ("cpu_other_percent", "of others", ORANGE, 1.0),
        ),
    ),
    Panel("GPU GB", (("gpu_process_memory", "GPU memory of the worker", GREEN, 1e-9),)),
    Panel("GPU W", (("gpu_power_w", "GPU power", VERMILION, 1.0),)),
    Panel("GPU MHz", (("gpu_sm_mhz", "GPU clock", PURPLE, 1.0),)),
)


def timeline_plots(cells: list[Cell]) -> list[Plot]:
    """Steps and telemetry of the first cells that have them; cells without the files are passed over."""
    return [
        plot
        for plot in (
            _timeline(
                cells,
                STEPS,
                lambda cell: _frame(cell, "steps.parquet", "start_s"),
                name="steps",
                title="Steps over time",
                alt="requests in the batch and waiting, and KV blocks used",
                caption="Time from the first step of the measured window.",
            ),
            _timeline(
                cells,
                TELEMETRY,
                lambda cell: _frame(cell, "telemetry.parquet", "t_s"),
                name="telemetry",
                title="The machine over time",
                alt="memory, CPU use and, on a GPU, power",
                caption="Sampled by the supervising process, not by the measured one.",
            ),
        )
        if plot is not None
    ]


def _frame(cell: Cell, file: str, clock: str) -> pd.DataFrame | None:
    """A parquet file of the cell's first ok block, with `seconds` counted from its first row."""
    for row in cell.ok:
        folder = record_folder(row)
        if folder is None or not (folder / file).is_file():
            continue
        import pandas as pd

        try:
            frame = pd.read_parquet(folder / file)
        except (OSError, ValueError):  # pyarrow's own errors derive from these
            continue
        if clock in frame and len(frame) >= 2:
            frame = frame.sort_values(clock)
            return frame.assign(seconds=frame[clock] - frame[clock].iloc[0])
    return None


def _timeline(
    cells: list[Cell],
    panels: tuple[Panel, ...],
    read: Callable[[Cell], pd.DataFrame | None],
    *,
    name: str,
    title: str,
    alt: str,
    caption: str,
) -> Plot | None:
    able = [cell for cell in cells if cell.ok]
    drawn: list[tuple[Cell, pd.DataFrame]] = []
    for cell in able:
        if len(drawn) == MAX_TIMELINES:
            break
        frame = read(cell)
        if frame is not None:
            drawn.append((cell, frame))
    used = [
        panel for panel in panels if any(_has(frame, key) for _, frame in drawn for key, *_ in panel.series)
    ]
    if not used:
        return None
    figure, grid = canvas(
        len(drawn), len(used), height=0.8 + 1.25 * len(drawn), squeeze=False, sharex=True, sharey="col"
    )
    for axes, (cell, frame) in zip(grid, drawn, strict=True):
        axes[0].set_title(short(cell.label, 60), loc="left", fontsize=9, fontweight="bold")
        for ax, panel in zip(axes, used, strict=True):
            _lines(ax, frame, panel)
            ax.set_ylabel(panel.title, fontsize=8.5)
            ax.margins(y=0.12)
            ax.set_ylim(bottom=0)
            ax.grid(True)
    for ax in grid[-1]:
        ax.set_xlabel("seconds")
    entries = {line.get_label(): line for axes in grid for ax in axes for line in ax.get_lines()}
    legend_below(figure, [(line, str(label)) for label, line in entries.items()])
    missing = len(able) - len(drawn)
    note = (
        f" Shown: {len(drawn)} of {count(len(able), 'finished cell')}, first block of each."
        if missing
        else " First block of each cell."
    )
    shared = " All rows share their axes." if len(drawn) > 1 else ""
    full_alt = f"Lines over time, a row a cell for {count(len(drawn), 'cell')}: {alt}."
    return Plot(name, title, full_alt, caption + shared + note, png(figure))


def _has(frame: pd.DataFrame, key: str) -> bool:
    return key in frame and bool(frame[key].notna().any())


def _lines(ax: Any, frame: pd.DataFrame, panel: Panel) -> None:
    for key, label, colour, scale in panel.series:
        if not _has(frame, key):
            continue
        points = frame[["seconds", key]].dropna()
        if len(points) > MAX_POINTS:
            # The greatest of each bin: a peak must not vanish by thinning.
            bins = (points["seconds"].rank(method="first") * MAX_POINTS / (len(points) + 1)).astype(int)
            points = points.groupby(bins).agg({"seconds": "first", key: "max"})
        ax.plot(
            points["seconds"],
            points[key].astype(float) * scale,
            color=colour,
            lw=1.2,
            label=label,
            drawstyle="steps-post",
        )
