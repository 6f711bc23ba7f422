"""The roofline plot: what the machine was measured to allow, and what decode and prefill steps
reached of it."""

from __future__ import annotations

import math

from minivllm.analysis.cell import DEVICE, Cell
from minivllm.analysis.format import count, listing, show, sig
from minivllm.analysis.rows import number
from minivllm.report.figures.cell_styles import CellStyles
from minivllm.report.figures.chart import Chart, Panel, Series
from minivllm.report.figures.palette import GREY, INK
from minivllm.report.figures.scatter import point_series, thinning
from minivllm.report.figures.style import short

# a colour, and whether dashed
ROOF_STYLES = ((INK, False), (INK, True), (GREY, False), (GREY, True))
GIGA = 1e-9
KINDS = (("decode", "Decode steps"), ("prefill", "Prefill steps"))


def roofline(cells: list[Cell], styles: CellStyles) -> Chart | None:
    """Operations a second against operations a byte, under the measured rooflines; None where
    nothing was counted."""
    cell_places = {kind: [(cell, _place(cell, kind)) for cell in cells] for kind, _ in KINDS}
    drawn = {kind: [cell for cell, at in placed if at] for kind, placed in cell_places.items()}
    rooflines = _rooflines([cell for placed in drawn.values() for cell in placed])
    if not any(drawn.values()) or not rooflines:
        return None
    places = [at for placed in cell_places.values() for _, at in placed if at]
    left, right = min(x for x, _ in places) / 3, max(x for x, _ in places) * 3
    lines = _lines(rooflines, left, right)
    panels = []
    for kind, title in KINDS:
        if drawn[kind]:
            points = point_series(
                drawn[kind],
                styles,
                lambda cell, k=kind: _place(cell, k),  # type: ignore[misc]
                lambda cell, k=kind: _words(cell, k),  # type: ignore[misc]
            )
            panels.append(
                Panel(
                    title,
                    "FLOP a byte (log scale)",
                    "GFLOP/s (log scale)",
                    [*lines, *points],
                    True,
                    True,
                )
            )
    uses = [
        f"{what} {sig(100 * max(known))} % of the measured {limit}"
        for key, what, limit in (
            ("roofline.mbu", "decode steps reach up to", "bandwidth"),
            ("roofline.mfu", "prefill steps up to", "matrix rate"),
        )
        if (known := [value for cell in cells if (value := cell.mean(key)) is not None])
    ]
    alt = (
        "Rooflines with points for "
        f"{count(len({id(cell) for placed in drawn.values() for cell in placed}), 'cell')}: "
        f"{listing(uses)}."
    )
    caption = (
        "The slope is the measured bandwidth, the flat part the measured matrix rate. A point "
        "on the slope is limited by memory, one on the flat part by arithmetic; the distance "
        f"below the roofline is what is left to gain.{styles.note}{thinning(cells)}"
    )
    if any(cell.first("roofline.fits_cache") for cell in cells):
        caption += (
            " Where the streamed bytes fit the last-level cache, points may lie above the slope."
        )
    if len(rooflines) > len(ROOF_STYLES):
        caption += (
            f" Rooflines of {len(ROOF_STYLES)} of {len(rooflines)} machines and dtypes are drawn."
        )
    return Chart(
        "roofline", "How far is it from the hardware's limit?", alt, caption, [("", panels)]
    )


def _lines(rooflines: dict[str, tuple[float, float]], left: float, right: float) -> list[Series]:
    """The measured limits, from the least intensity that is drawn to the greatest."""
    lines = []
    for (name, (bandwidth, rate)), (colour, dashed) in zip(
        rooflines.items(), ROOF_STYLES, strict=False
    ):
        ridge = rate / bandwidth
        xs = sorted({left, min(max(ridge, left), right), max(right, 2 * ridge)})
        ys = [min(rate, x * bandwidth) * GIGA for x in xs]
        words = f"{name}: {sig(bandwidth * GIGA)} GB/s and {sig(rate * GIGA)} GFLOP/s"
        label = f"measured roofline: {name}"
        lines.append(Series(label, colour, xs, ys, "line", dashed=dashed, names=[words] * len(xs)))
    return lines


def _place(cell: Cell, kind: str) -> tuple[float, float] | None:
    """Intensity in FLOP a byte, and GFLOP/s, of a kind of step."""
    flops, moved, seconds = (
        cell.mean(f"roofline.{kind}_{part}") for part in ("flops", "bytes", "s")
    )
    return (flops / moved, flops / seconds * GIGA) if flops and moved and seconds else None


def _rooflines(cells: list[Cell]) -> dict[str, tuple[float, float]]:
    """Bandwidth (bytes/s) and matrix rate (FLOP/s) by device and dtype, means over the records."""
    limits: dict[str, list[tuple[float, float]]] = {}
    for row in {id(row): row for cell in cells for row in cell.ok}.values():
        bandwidth, rate = (
            number(row.get(f"roofline.{key}"))
            for key in ("bandwidth_bytes_per_s", "matrix_flops_per_s")
        )
        if bandwidth and rate:
            name = f"{show(row.get(DEVICE))}, {show(row.get('roofline.matrix_dtype'))}"
            limits.setdefault(name, []).append((bandwidth, rate))
    return {
        name: (
            math.fsum(b for b, _ in known) / len(known),
            math.fsum(r for _, r in known) / len(known),
        )
        for name, known in limits.items()
    }


def _words(cell: Cell, kind: str) -> str:
    """What the pointer shows of a cell."""
    x, y = _place(cell, kind) or (0.0, 0.0)
    key, limit = (
        ("roofline.mbu", "bandwidth") if kind == "decode" else ("roofline.mfu", "matrix rate")
    )
    share = cell.mean(key)
    used = "" if share is None else f", {sig(100 * share)} % of the {limit}"
    return f"{short(cell.label, 60)}: {sig(y)} GFLOP/s at {sig(x)} FLOP a byte{used}"
