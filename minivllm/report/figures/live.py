"""Charts for the page: their panels as JSON, which the page's script draws with uPlot, the library
of the live view; both are packed into the page.

Colours of text and lines are those of the light page; the page's own script puts the reader's in
their place.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from minivllm.report.figures.chart import BEYOND_X, BEYOND_Y, Chart, Panel, Series
from minivllm.report.figures.palette import GRID, INK

LIBRARY = Path(__file__).parents[1] / "view" / "vendor" / "uPlot.iife.min.js"
# pixels, of a panel by itself and of one among those that share an axis
HEIGHT, ROW_HEIGHT = 320, 170
MARGIN = 0.06  # of an axis that does not begin at zero, on either side, as a share of its range
DIGITS = 5  # significant; more are not seen and only grow the page


def items(chart: Chart) -> list[dict[str, Any]]:
    """One entry a panel, or a titled row of panels over one x axis: its title and its `panels`."""
    found = []
    for title, panels in chart.rows:
        if title:
            shown = [_panel(panel, ROW_HEIGHT) for panel in panels if not panel.empty]
            ends = [panel["x"]["range"] for panel in shown]
            for panel in shown:
                panel["x"]["range"] = [min(low for low, _ in ends), max(high for _, high in ends)]
                panel["x"]["label"] = panel["x"]["label"] if panel is shown[-1] else ""
            found.append({"title": title, "panels": shown})
        else:
            found += [{"title": panel.title, "panels": [_panel(panel, HEIGHT)]} for panel in panels]
    return found


def _panel(panel: Panel, height: int) -> dict[str, Any]:
    xs = [x for one in panel.series for x in (*one.x, *one.low, *one.high)]
    ys = [y for one in panel.series if one.kind != "band" for y in one.y]
    x_range = _range(xs, panel.log_x, BEYOND_X if panel.x_from_zero else None)
    if panel.rows:
        y_range = [-0.6, len(panel.rows) - 0.4]
    else:
        y_range = _range(ys, panel.log_y, BEYOND_Y if panel.y_from_zero else None, panel.foot)
    return {
        "x": {"label": panel.x_label, "log": panel.log_x, "range": x_range},
        "y": {"label": panel.y_label, "log": panel.log_y, "range": y_range},
        "rows": [*panel.rows],
        "height": max(height, 90 + 30 * len(panel.rows)) if panel.rows else height,
        "series": [_series(series) for series in panel.series],
    }


def _range(
    values: Iterable[float], logarithmic: bool, beyond: float | None, foot: float = 0.0
) -> list[float]:
    """Both ends of an axis; one from zero ends `beyond` times the greatest value, and begins a
    `foot`, a share of that, below zero."""
    # lines are broken off at NaN, of which nothing is the greatest
    known = [v for v in values if math.isfinite(v) and (v > 0 or not logarithmic)]
    low, high = min(known, default=1.0), max(known, default=1.0)
    if logarithmic:
        factor = (high / low) ** MARGIN if high > low else 2.0
        return [low / factor, high * factor]
    if beyond is not None:
        end = beyond * (high or 1.0)
        return [-foot * end, end]
    margin = MARGIN * (high - low) or 0.5
    return [low - margin, high + margin]


def _series(series: Series) -> dict[str, Any]:
    """What is drawn of one series, and the names that the pointer shows: of points and lines."""
    data: dict[str, Any] = {"label": series.label, "kind": series.kind, "colour": series.colour}
    data |= {"x": _short(series.x), "y": _short(series.y)}
    if series.low:
        data |= {"low": _short(series.low), "high": _short(series.high)}
    if series.kind in ("points", "line"):
        data["names"] = [*series.names]
    data |= {"marker": series.marker} if series.kind == "points" else {}
    return data | {key: True for key in ("dashed", "hollow") if getattr(series, key)}


def _short(values: Iterable[float]) -> list[float | None]:
    return [float(f"{v:.{DIGITS}g}") if math.isfinite(v) else None for v in values]


@cache
def library() -> str:
    """uPlot's script, packed for the page."""
    return packed(LIBRARY.read_bytes())


def charts(plots: Iterable[tuple[str, list[dict[str, Any]]]]) -> str:
    """The panels of figures, given as their names and `items`, packed for the page."""
    figures = [[name, [item["panels"] for item in entries]] for name, entries in plots]
    return packed(json.dumps({"ink": INK, "grid": GRID, "figures": figures}).encode())


def packed(data: bytes) -> str:
    """Bytes as base64 of gzip; the same content gives the same text."""
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()
