"""One figure against another, a point a cell, and the line of those that none beats in both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minivllm.report.cells import Cell, name_columns, spoken
from minivllm.report.chart import MAX_CURVES, Chart, Panel, Series, finish
from minivllm.report.format import MISSING, count, listing, sig
from minivllm.report.plots import THROUGHPUT, latency_unit
from minivllm.report.style import LIGHT, MARKERS, PALETTE, Plot, colours, short

TTFT, ITL = "metrics.ttft_ms.p50", "metrics.itl_ms.p50"
WIDE = 30  # a logarithmic axis where the greatest is so many times the least


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (speed, loss) that no other beats in one without losing in the other, slowest first."""
    best, found = float("inf"), []
    for index in sorted(range(len(points)), key=lambda i: (-points[i][0], points[i][1])):
        if points[index][1] < best:
            best = points[index][1]
            found.append(index)
    return found[::-1]


def point_series(
    cells: Sequence[Cell],
    place: Callable[[Cell], tuple[float, float] | None],
    name: Callable[[Cell], str],
    full: Callable[[Cell], bool] = lambda cell: True,
) -> list[Series]:
    """A point a cell: coloured by the first column that varies, shaped by the second, hollow where not `full`.

    Arms of an ablation, which are known by their names alone, have a colour and a shape each.
    """
    if name_columns(list(cells)) == ["arm"] and len(cells) <= MAX_CURVES:
        n = len(PALETTE)
        return [
            Series(
                cell.label,
                PALETTE[i % n],
                [at[0]],
                [at[1]],
                marker=MARKERS[i // n],
                hollow=not full(cell),
                names=[name(cell)],
            )
            for i, cell in enumerate(cells)
            if (at := place(cell)) is not None
        ]
    tints, legend, title = colours(list(cells))
    shapes: dict[str, str] = {}
    second = next((column for column in cells[0].varying if column != title), "") if legend else ""
    if second:
        values = list(dict.fromkeys(cell.varying[second] for cell in cells))
        if len(values) <= len(MARKERS) and len(values) * len(legend) <= MAX_CURVES:
            shapes = dict(zip(values, MARKERS, strict=False))
    groups: dict[tuple[str, str, str, bool], list[Cell]] = {}
    for cell, tint in zip(cells, tints, strict=True):
        label = f"{title}={cell.varying[title]}" if legend else ""
        marker = shapes.get(cell.varying.get(second, ""), "o")
        if shapes and cell.varying[second] != MISSING:
            label += f" · {spoken(second, cell.varying[second])}"
        groups.setdefault((label, tint, marker, not full(cell)), []).append(cell)
    found = []
    for (label, tint, marker, hollow), members in groups.items():
        placed = [(cell, at) for cell in members if (at := place(cell)) is not None]
        if placed:
            xs, ys = zip(*(at for _, at in placed), strict=True)
            names = [name(cell) for cell, _ in placed]
            found.append(Series(label, tint, xs, ys, marker=marker, hollow=hollow, names=names))
    return found


def trade_off(cells: list[Cell]) -> Plot | None:
    """Throughput against latency, with the cells that no other beats in both."""
    drawn = [c for c in cells if c.mean(THROUGHPUT) is not None and any(c.mean(k) for k in (TTFT, ITL))]
    if len(drawn) < 2:
        return None
    panels, best = [], []
    for key, title in ((TTFT, "TTFT p50"), (ITL, "ITL p50")):
        known = [cell for cell in drawn if cell.mean(key)]
        if not known:
            continue
        latencies = [cell.mean(key) or 0.0 for cell in known]
        scale, unit = latency_unit(cells, key.removesuffix(".p50"))
        points = [
            (cell.mean(THROUGHPUT) or 0.0, ms * scale) for cell, ms in zip(known, latencies, strict=True)
        ]
        edge = frontier(points)
        best += [known[i].label for i in edge if known[i].label not in best]
        line = Series("", LIGHT, [points[i][1] for i in edge], [points[i][0] for i in edge], "line")

        def place(cell: Cell, key: str = key, scale: float = scale) -> tuple[float, float] | None:
            latency = cell.mean(key)
            return (latency * scale, cell.mean(THROUGHPUT) or 0.0) if latency else None

        drawn_points = point_series(known, place, _words, chosen(known, edge))
        logarithmic = max(latencies) > WIDE * min(latencies)
        panels.append(
            Panel(
                f"{title}: up and to the left is better",
                f"{title}, {unit}" + (" (log scale)" if logarithmic else ""),
                "output tokens/s",
                [line, *drawn_points],
                log_x=logarithmic,
                named=not any(series.label for series in drawn_points),
            )
        )
    alt = (
        "Scatter of output tokens per second against median TTFT and median ITL, "
        f"{count(len(drawn), 'cell')}. Beaten by none in speed and latency at once: {listing(best, 6)}."
    )
    caption = (
        "A point a cell, means over blocks. The line joins the cells that no other beats in throughput and latency "
        "at once, drawn full."
    )
    return finish(Chart("latency_throughput", "Latency against throughput", alt, caption, [("", panels)]))


def chosen(cells: Sequence[Cell], indices: Sequence[int]) -> Callable[[Cell], bool]:
    """Whether a cell is among those of the indices."""
    kept = {id(cells[i]) for i in indices}
    return lambda cell: id(cell) in kept


def _words(cell: Cell) -> str:
    """What the pointer shows of a cell."""
    figures = [
        f"{sig(value)} {unit}"
        for key, unit in ((THROUGHPUT, "tok/s"), (TTFT, "ms TTFT"), (ITL, "ms ITL"))
        if (value := cell.mean(key)) is not None
    ]
    return f"{short(cell.label, 60)}: {', '.join(figures)}"
