"""How latencies are distributed: the share of requests, and of gaps between tokens, that were no
slower."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from minivllm.analysis.cell import Cell
from minivllm.analysis.format import count, sig
from minivllm.bench.metrics.latency import token_gaps
from minivllm.report.figures.cell_styles import MAX_STYLES, CellStyle, CellStyles
from minivllm.report.figures.chart import Chart, Panel, Series
from minivllm.report.figures.plots import latency_unit
from minivllm.report.figures.scatter import WIDE
from minivllm.report.figures.style import short

if TYPE_CHECKING:
    import numpy as np

MAX_BLOCKS = 5  # of a cell that are pooled
POINTS = 160  # of one curve
TAIL = 99.5  # % of the samples of each curve that an axis shows whatever they are
OUTLYING = 2  # times that figure: the slowest is beyond the axis


def distributions(cells: list[Cell], styles: CellStyles) -> Chart | None:
    """Cumulative shares of TTFT and ITL over the requests of all blocks, a curve a cell; None
    without requests."""
    able = [cell for cell in cells if cell.ok]
    samples: list[tuple[Cell, list[np.ndarray]]] = []
    for cell in able:
        if len(samples) == MAX_STYLES:
            break
        parts = _samples(cell)
        if len(parts[0]) > 1:
            samples.append((cell, parts))
    if not samples:
        return None
    panels, ends = [], []
    for index, name in enumerate(("TTFT", "ITL")):
        known = [data[index] for _, data in samples if len(data[index]) > 1]
        if not known:
            continue
        scale, unit = latency_unit(cells, f"metrics.{name.lower()}_ms")
        longest_shown, slowest = _shown_range(known)
        least = min(float(values[len(values) // 2]) for values in known)
        logarithmic = longest_shown > WIDE * max(least, 1e-3)
        series = [
            _curve(cell, styles[cell.label], data[index], longest_shown, (scale, unit), logarithmic)
            for cell, data in samples
            if len(data[index]) > 1
        ]
        title = {"TTFT": "TTFT (time to first token)", "ITL": "ITL (between tokens)"}[name]
        label = f"{name}, {unit}" + (" (log scale)" if logarithmic else "")
        if slowest > longest_shown:
            ends.append(
                f"{name} ends at {sig(longest_shown * scale)} {unit}; the slowest was "
                f"{sig(slowest * scale)} {unit}"
            )
        panels.append(Panel(title, label, "% that were no slower", series, log_x=logarithmic))
    missing = len(able) - len(samples)
    alt = (
        f"Cumulative distributions of TTFT and of the gaps between tokens, a curve for each of "
        f"{count(len(samples), 'cell')}: further left is faster, steeper is steadier."
    )
    caption = (
        "Requests and gaps of a cell's blocks pooled. Where a curve crosses 50 % is the median; "
        f"a curve that bends to the right at its top has a tail of slow ones.{styles.note}"
    )
    if ends:
        caption += f" An axis ends where {TAIL} % of the slowest curve lie: {', and '.join(ends)}."
    blocks = max(len(cell.timed) for cell, _ in samples)
    caption += (
        f" Of {count(blocks, 'block')} the first {MAX_BLOCKS}." if blocks > MAX_BLOCKS else ""
    )
    caption += f" Shown: {len(samples)} of {count(len(able), 'finished cell')}." if missing else ""
    return Chart("distributions", "How are latencies distributed?", alt, caption, [("", panels)])


def _samples(cell: Cell) -> list[np.ndarray]:
    """TTFT and ITL in milliseconds, ascending."""
    import numpy as np

    ttft, gaps = [np.empty(0)], [np.empty(0)]
    for frame in islice(cell.frames("requests.parquet", ["ttft_ms", "token_times_s"]), MAX_BLOCKS):
        if "ttft_ms" not in frame:
            continue
        done = frame["ttft_ms"].notna()
        ttft.append(frame.loc[done, "ttft_ms"].to_numpy(dtype=float))
        if "token_times_s" in frame:
            gaps += [
                np.array(token_gaps(np.asarray(times, dtype=float).tolist()))
                for times in frame.loc[done, "token_times_s"]
            ]
    return [np.sort(np.concatenate(parts)) for parts in (ttft, gaps)]


def _shown_range(known: list[np.ndarray]) -> tuple[float, float]:
    """Where the axis ends, and the slowest sample: a few outliers must not squeeze all else into
    its left end."""
    import numpy as np

    slowest = max(float(values[-1]) for values in known)
    tail = max(float(np.percentile(values, TAIL, method="lower")) for values in known)
    return (tail if slowest > OUTLYING * tail else slowest), slowest


def _curve(
    cell: Cell,
    style: CellStyle,
    samples: np.ndarray,
    longest_shown: float,
    unit: tuple[float, str],
    logarithmic: bool,
) -> Series:
    """The steps of ascending samples in milliseconds as far as the axis reaches: from each sample
    on the share of those that are no slower than it."""
    import numpy as np

    within = max(1, int(np.searchsorted(samples, longest_shown, side="right")))
    ranks = np.linspace(0, within - 1, min(POINTS, within)).round().astype(int)
    # Both ends of each step: a line through these can say what the pointer is at.
    at = np.repeat(samples[ranks], 2) * unit[0]
    reached = 100 * (ranks + 1) / len(samples)
    shares = np.stack([np.concatenate([[0.0], reached[:-1]]), reached], 1).ravel()
    kept = at > 0 if logarithmic else np.ones(len(at), dtype=bool)
    names = [
        f"{short(cell.label, 60)}: {share:.0f} % within {sig(x)} {unit[1]}"
        for x, share in zip(at[kept], shares[kept], strict=True)
    ]
    points = list(at[kept]), list(shares[kept])
    legend = style.legend or style.name
    return Series(
        short(legend, 60), style.colour, *points, "line", dashed=style.dashed, names=names
    )
