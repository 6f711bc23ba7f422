"""How latencies are distributed: the share of requests, and of gaps between tokens, that were no slower."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from minivllm.report.cells import Cell
from minivllm.report.chart import MAX_CURVES, Chart, Panel, Series, curve_styles, finish
from minivllm.report.format import count, sig
from minivllm.report.parquet import frames
from minivllm.report.plots import latency_unit
from minivllm.report.scatter import WIDE
from minivllm.report.style import Plot, short

if TYPE_CHECKING:
    import numpy as np

MAX_BLOCKS = 5  # of a cell that are pooled
POINTS = 160  # of one curve


def distributions(cells: list[Cell]) -> Plot | None:
    """Cumulative shares of TTFT and ITL over the requests of all blocks, a curve a cell; None without requests."""
    able = [cell for cell in cells if cell.ok]
    samples: list[tuple[Cell, list[np.ndarray]]] = []
    for cell in able:
        if len(samples) == MAX_CURVES:
            break
        found = _samples(cell)
        if len(found[0]) > 1:
            samples.append((cell, found))
    if not samples:
        return None
    styles = curve_styles([cell for cell, _ in samples])
    panels = []
    for index, name in enumerate(("TTFT", "ITL")):
        known = [data[index] for _, data in samples if len(data[index]) > 1]
        if not known:
            continue
        scale, unit = latency_unit(cells, f"metrics.{name.lower()}_ms")
        least = min(float(values[len(values) // 2]) for values in known)
        logarithmic = max(float(values[-1]) for values in known) > WIDE * max(least, 1e-3)
        series = [
            _curve(cell, data[index] * scale, colour, dashed, unit, logarithmic)
            for (cell, data), (_, colour, dashed) in zip(samples, styles, strict=True)
            if len(data[index]) > 1
        ]
        title = {"TTFT": "TTFT (time to first token)", "ITL": "ITL (between tokens)"}[name]
        label = f"{name}, {unit}" + (" (log scale)" if logarithmic else "")
        panels.append(Panel(title, label, "% that were no slower", series, log_x=logarithmic))
    missing = len(able) - len(samples)
    alt = (
        f"Cumulative distributions of TTFT and of the gaps between tokens, a curve for each of "
        f"{count(len(samples), 'cell')}: further left is faster, steeper is steadier."
    )
    caption = (
        "Requests and gaps of a cell's blocks pooled. Where a curve crosses 50 % is the median; a curve that bends to the "
        "right at its top has a tail of slow ones."
    )
    blocks = max(len(cell.timed) for cell, _ in samples)
    caption += f" Of {count(blocks, 'block')} the first {MAX_BLOCKS}." if blocks > MAX_BLOCKS else ""
    caption += f" Shown: {len(samples)} of {count(len(able), 'finished cell')}." if missing else ""
    return finish(Chart("distributions", "How latencies are distributed", alt, caption, [("", panels)]))


def _samples(cell: Cell) -> list[np.ndarray]:
    """TTFT and ITL in milliseconds, ascending."""
    import numpy as np

    ttft, gaps = [np.empty(0)], [np.empty(0)]
    for frame in islice(frames(cell, "requests.parquet", ["ttft_ms", "token_times_s"]), MAX_BLOCKS):
        if "ttft_ms" not in frame:
            continue
        done = frame["ttft_ms"].notna()
        ttft.append(frame.loc[done, "ttft_ms"].to_numpy(dtype=float))
        if "token_times_s" in frame:
            gaps += [token_gaps(np.asarray(times, dtype=float)) for times in frame.loc[done, "token_times_s"]]
    return [np.sort(np.concatenate(parts)) for parts in (ttft, gaps)]


def token_gaps(times_s: np.ndarray) -> np.ndarray:
    """ITL samples of one request in milliseconds, as `bench.metrics.ITL` defines them, from its tokens' times."""
    import numpy as np

    arrivals, together = np.unique(times_s, return_counts=True)
    if len(arrivals) < 2:
        return np.zeros(0)
    shared = np.repeat(np.diff(arrivals) / together[1:], together[1:])
    return 1e3 * np.concatenate([np.zeros(int(together[0]) - 1), shared])


def _curve(cell: Cell, values: np.ndarray, colour: str, dashed: bool, unit: str, logarithmic: bool) -> Series:
    import numpy as np

    shares = np.linspace(0, 100, min(POINTS, len(values)))
    at = np.percentile(values, shares)
    kept = at > 0 if logarithmic else np.ones(len(at), dtype=bool)
    names = [
        f"{short(cell.label, 60)}: {share:.0f} % within {sig(x)} {unit}"
        for x, share in zip(at[kept], shares[kept], strict=True)
    ]
    return Series(
        short(cell.label, 60), colour, list(at[kept]), list(shares[kept]), "line", dashed=dashed, names=names
    )
