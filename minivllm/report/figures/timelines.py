"""Figures over time: what was in the batch and the cache at each step, and what the machine did
meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minivllm.analysis.cell import Cell
from minivllm.analysis.format import count, listing
from minivllm.report.figures.cell_styles import CellStyles
from minivllm.report.figures.chart import Chart, Panel, Series
from minivllm.report.figures.palette import CLAY, FAINT, LIGHT, PLUM, SLATE, TAUPE, TEAL
from minivllm.report.figures.style import short

if TYPE_CHECKING:
    import pandas as pd

MAX_TIMELINES = 8
MANY, SAMPLE = 100, 3  # of so many cells a few show what a step is like
MAX_POINTS = 400  # a line; more than pixels would only grow the page


@dataclass(frozen=True)
class Line:
    """A line of a panel: a field of the table, scaled. No two of a figure have the same style."""

    field: str
    name: str
    colour: str
    dashed: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class Track:
    """One panel of a row: what it is of, the unit, and the lines in it."""

    noun: str
    unit: str
    lines: tuple[Line, ...]


STEPS = (
    Track(
        "tokens",
        "tokens a step",
        (
            Line("num_prefill_tokens", "prompt tokens", CLAY),
            Line("num_decode_tokens", "decode tokens", SLATE, dashed=True),
        ),
    ),
    Track(
        "requests",
        "requests",
        (
            Line("num_requests", "requests in the batch", TEAL),
            Line("waiting", "waiting", PLUM, dashed=True),
        ),
    ),
    Track(
        "KV blocks",
        "KV blocks",
        (
            Line("kv_blocks_used", "KV blocks used", TAUPE),
            Line("kv_blocks_total", "KV blocks in the pool", FAINT, dashed=True),
        ),
    ),
)
TELEMETRY = (
    Track("power", "GPU W", (Line("gpu_power_w", "GPU power", CLAY),)),
    Track(
        "memory",
        "GB",
        (
            Line("rss", "memory of the worker", SLATE, scale=1e-9),
            Line("rss_besides", "outside loading and window", FAINT, scale=1e-9),
            Line("gpu_process_memory", "GPU memory of the worker", TAUPE, True, 1e-9),
        ),
    ),
    Track(
        "CPU use",
        "CPU % of a core",
        (
            Line("cpu_worker_percent", "CPU of the worker", TEAL),
            Line("cpu_other_percent", "CPU of others", PLUM, dashed=True),
        ),
    ),
    Track("clock", "GPU MHz", (Line("gpu_sm_mhz", "GPU clock", CLAY, dashed=True),)),
)
COUNTED = ("loading", "measuring")  # phases of which memory.host_rss_peak is the greatest
GAPS = ("rss", "rss_besides")  # lines that are broken off where they have no value
# drawn only where some cell uses a quarter of it, or it would flatten the rest
CEILING = "kv_blocks_total"


def timeline_plots(cells: list[Cell], styles: CellStyles) -> list[Chart]:
    """Steps and telemetry of the first cells that have them; cells without the files are passed
    over."""
    plots = (
        _timeline(
            cells,
            styles,
            STEPS,
            "steps.parquet",
            "start_s",
            name="steps",
            caption="Time from the first step of the measured window. A thinned line shows the "
            "greatest of each bin.",
        ),
        _timeline(
            cells,
            styles,
            TELEMETRY,
            "telemetry.parquet",
            "t_s",
            name="telemetry",
            caption="Sampled by the supervising process, not by the measured one. Before the "
            "measured window the model is loaded, the machine's limits are probed and the engine "
            "is warmed up; after it the record is written. The host's peak of a record is that "
            "of loading and of the window; memory at other times is drawn faint.",
        ),
    )
    return [plot for plot in plots if plot is not None]


def _frame(cell: Cell, file: str, clock: str, tracks: tuple[Track, ...]) -> pd.DataFrame | None:
    """The table of the cell's first block that has one, with `seconds` counted from its first
    row."""
    drawn = [line.field for track in tracks for line in track.lines]
    for frame in cell.frames(file, [clock, "phase", "num_tokens", *drawn], [clock]):
        if len(frame) < 2:
            continue
        frame = frame.sort_values(clock)
        if {"num_tokens", "num_prefill_tokens"} <= set(frame):
            frame = frame.assign(
                num_decode_tokens=frame["num_tokens"] - frame["num_prefill_tokens"]
            )
        if {"rss", "phase"} <= set(frame):
            frame = _split_memory(frame)
        return frame.assign(seconds=frame[clock] - frame[clock].iloc[0])
    return None


def _split_memory(frame: pd.DataFrame) -> pd.DataFrame:
    """What counts in the record's peak, and the rest."""
    counts = frame["phase"].isin(COUNTED)
    return frame.assign(rss=frame["rss"].where(counts), rss_besides=frame["rss"].where(~counts))


def _timeline(
    cells: list[Cell],
    styles: CellStyles,
    tracks: tuple[Track, ...],
    file: str,
    clock: str,
    *,
    name: str,
    caption: str,
) -> Chart | None:
    able = [cell for cell in cells if cell.ok]
    drawn = _drawn(able, MAX_TIMELINES if len(cells) <= MANY else SAMPLE, tracks, file, clock)
    full = any(
        _has(f, CEILING) and 4 * f["kv_blocks_used"].max() > f[CEILING].max() for _, f in drawn
    )
    shown = [
        (track, lines)
        for track in tracks
        if (
            lines := [
                line
                for line in track.lines
                if (full or line.field != CEILING)
                and any(_has(frame, line.field) for _, frame in drawn)
            ]
        )
    ]
    if not shown:
        return None
    rows = [
        (
            short(styles[cell.label].name, 60),
            [
                Panel(
                    track.unit,
                    "seconds",
                    track.unit,
                    [*_window(frame), *(_line(frame, line) for line in lines)],
                )
                for track, lines in shown
            ],
        )
        for cell, frame in drawn
    ]
    missing = len(able) - len(drawn)
    note = (
        f" Shown: {len(drawn)} of {count(len(able), 'finished cell')}, first block of each."
        if missing
        else " First block of each cell."
    )
    title = f"How did {listing([track.noun for track, _ in shown])} change over time?"
    labels = listing([line.name for _, lines in shown for line in lines], 8)
    alt = f"Lines over time, a row a cell for {count(len(drawn), 'cell')}: {labels}."
    return Chart(name, title, alt, caption + note + styles.note, rows)


def _drawn(
    able: list[Cell], limit: int, tracks: tuple[Track, ...], file: str, clock: str
) -> list[tuple[Cell, pd.DataFrame]]:
    """The first cells whose tables have any of the lines, with these tables."""
    drawn: list[tuple[Cell, pd.DataFrame]] = []
    for cell in able:
        if len(drawn) == limit:
            break
        frame = _frame(cell, file, clock, tracks)
        if frame is not None and any(
            _has(frame, line.field) for track in tracks for line in track.lines
        ):
            drawn.append((cell, frame))
    return drawn


def _has(frame: pd.DataFrame, key: str) -> bool:
    return key in frame and bool(frame[key].notna().any())


def _window(frame: pd.DataFrame) -> list[Series]:
    """The time in which requests were measured, where the table has more than that."""
    if (
        "phase" not in frame
        or not (measuring := frame["phase"] == "measuring").any()
        or measuring.all()
    ):
        return []
    seconds = frame["seconds"][measuring]
    return [Series("measured window", LIGHT, [seconds.iloc[0], seconds.iloc[-1]], [], "band")]


def _line(frame: pd.DataFrame, line: Line) -> Series:
    key = line.field
    if not _has(frame, key):
        return Series(line.name, line.colour, [], [], "steps", dashed=line.dashed)
    points = frame[["seconds", key]]
    if key not in GAPS:
        points = points.dropna()
    if len(points) > MAX_POINTS:
        # The greatest of each bin: a peak must not vanish by thinning.
        bins = (points["seconds"] * MAX_POINTS / (points["seconds"].iloc[-1] or 1.0)).astype(int)
        points = points.groupby(bins).agg({"seconds": "first", key: "max"})
    values = list(points[key].astype(float) * line.scale)
    return Series(
        line.name, line.colour, list(points["seconds"]), values, "steps", dashed=line.dashed
    )
