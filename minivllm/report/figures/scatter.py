"""One figure against another, a point a cell, and the line of those that none beats in both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minivllm.analysis.cell import Cell
from minivllm.analysis.format import count, listing, sig
from minivllm.report.figures.cell_styles import CellStyles
from minivllm.report.figures.chart import Chart, Panel, Series
from minivllm.report.figures.palette import LIGHT
from minivllm.report.figures.plots import THROUGHPUT, latency_unit
from minivllm.report.figures.style import short

MAX_POINTS = 2000  # of a panel: more lie upon one another and only grow the page
TTFT, ITL = "metrics.ttft_ms.p50", "metrics.itl_ms.p50"
WIDE = 30  # a logarithmic axis where the greatest is so many times the least


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (speed, loss) that no other beats in one without losing in the other,
    slowest first."""
    best, indices = float("inf"), []
    for index in sorted(range(len(points)), key=lambda i: (-points[i][0], points[i][1])):
        if points[index][1] < best:
            best = points[index][1]
            indices.append(index)
    return indices[::-1]


def point_series(
    cells: Sequence[Cell],
    styles: CellStyles,
    place: Callable[[Cell], tuple[float, float] | None],
    name: Callable[[Cell], str],
    full: Callable[[Cell], bool] = lambda cell: True,
) -> list[Series]:
    """A point a cell in its style, hollow where not `full`; cells of the same style are one series.

    Of thousands some are left out, see `thinning`, but for those that are full among others.
    """
    step, mixed = _step(cells), not all(map(full, cells))
    cells = [cell for i, cell in enumerate(cells) if i % step == 0 or (mixed and full(cell))]
    groups: dict[tuple[str, str, str, bool], list[tuple[Cell, tuple[float, float]]]] = {}
    for cell in cells:
        if (at := place(cell)) is not None:
            style = styles[cell.label]
            key = style.legend, style.colour, style.marker, not full(cell)
            groups.setdefault(key, []).append((cell, at))
    series = []
    for (label, tint, marker, hollow), members in groups.items():
        xs, ys = zip(*(at for _, at in members), strict=True)
        names = [name(cell) for cell, _ in members]
        series.append(Series(label, tint, xs, ys, marker=marker, hollow=hollow, names=names))
    return series


def thinning(cells: Sequence[Cell]) -> str:
    """A sentence on the points that `point_series` leaves out; empty where there are none."""
    step = _step(cells)
    return f" Drawn: one cell of {step} of {len(cells):,}, and those on a line." if step > 1 else ""


def _step(cells: Sequence[Cell]) -> int:
    return -(-len(cells) // MAX_POINTS)


def trade_off(cells: list[Cell], styles: CellStyles) -> Chart | None:
    """Throughput against latency, with the cells that no other beats in both."""
    drawn = [
        c for c in cells if c.mean(THROUGHPUT) is not None and any(c.mean(k) for k in (TTFT, ITL))
    ]
    if len(drawn) < 2:
        return None
    panels: list[Panel] = []
    best: dict[str, None] = {}  # labels, in order
    for key, title in ((TTFT, "TTFT p50"), (ITL, "ITL p50")):
        known = [cell for cell in drawn if cell.mean(key)]
        if not known:
            continue
        scale, unit = latency_unit(cells, key.removesuffix(".p50"))
        points = [((cell.mean(key) or 0.0) * scale, cell.mean(THROUGHPUT) or 0.0) for cell in known]
        edge = frontier([(speed, latency) for latency, speed in points])
        edge = edge[:: -(-len(edge) // MAX_POINTS)]
        best.update(dict.fromkeys(known[i].label for i in edge))
        series = frontier_series(known, points, edge, styles, _words)
        latencies = [latency for latency, _ in points]
        logarithmic = max(latencies) > WIDE * min(latencies)
        panels.append(
            Panel(
                f"{title}: up and to the left is better",
                f"{title}, {unit}" + (" (log scale)" if logarithmic else ""),
                "output tokens/s",
                series,
                log_x=logarithmic,
                named=not any(one.label for one in series),
            )
        )
    alt = (
        "Scatter of output tokens per second against median TTFT and median ITL, "
        f"{count(len(drawn), 'cell')}. Beaten by none in speed and latency at once: "
        f"{listing([*best], 6)}."
    )
    caption = (
        "A point a cell, means over blocks. The line joins the cells that no other beats in "
        f"throughput and latency at once, drawn full.{styles.note}{thinning(drawn)}"
    )
    title = "What does throughput cost in latency?"
    return Chart("latency_throughput", title, alt, caption, [("", panels)])


def frontier_series(
    cells: Sequence[Cell],
    points: Sequence[tuple[float, float]],
    edge: Sequence[int],
    styles: CellStyles,
    name: Callable[[Cell], str],
) -> list[Series]:
    """The line through those of the cells' points that are on the edge, and all points, which are
    full there; see `point_series`."""
    line = Series("", LIGHT, [points[i][0] for i in edge], [points[i][1] for i in edge], "line")
    places, kept = dict(zip(map(id, cells), points, strict=True)), {id(cells[i]) for i in edge}
    drawn = point_series(
        cells, styles, lambda cell: places[id(cell)], name, lambda cell: id(cell) in kept
    )
    return [line, *drawn]


def _words(cell: Cell) -> str:
    """What the pointer shows of a cell."""
    figures = [
        f"{sig(value)} {unit}"
        for key, unit in ((THROUGHPUT, "tok/s"), (TTFT, "ms TTFT"), (ITL, "ms ITL"))
        if (value := cell.mean(key)) is not None
    ]
    return f"{short(cell.label, 60)}: {', '.join(figures)}"
