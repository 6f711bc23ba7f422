"""Charts for the page: Bokeh's models as JSON, which its script, packed into the page, turns into
figures.

Colours of text and lines are those of the light page; the page's own script puts the reader's in
their place.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import Any

from minivllm.report.figures.chart import BEYOND_X, BEYOND_Y, Chart, Panel, Series
from minivllm.report.figures.palette import GRID, INK, PAPER

MARKERS = {
    "o": "circle",
    "s": "square",
    "D": "diamond",
    "^": "triangle",
    "v": "inverted_triangle",
    "P": "plus",
    "X": "x",
}
# pixels, of a panel by itself and of one among those that share an axis
HEIGHT, ROW_HEIGHT = 320, 170
FONT = "system-ui, sans-serif"
WIDEST_LABEL = 44  # characters of an axis's label in one line, which a telephone has room for
LEAST_PLAIN = 1e-3  # smaller figures of a logarithmic axis are written as powers
DIGITS = 5  # significant; more are not seen and only grow the page


def items(chart: Chart) -> list[dict[str, Any]]:
    """One embeddable item a panel, or a titled row of panels over one x axis: its title and Bokeh's
    JSON."""
    from bokeh.embed import json_item
    from bokeh.layouts import column

    models = []
    for title, panels in chart.rows:
        if title:
            figures = [_figure(panel, ROW_HEIGHT) for panel in panels if not panel.empty]
            for figure in figures[1:]:
                figure.x_range = figures[0].x_range
            for figure in figures[:-1]:
                figure.xaxis.axis_label = None
            model: Any = column(*figures, sizing_mode="stretch_width")
            models.append((title, model))
        else:
            models += [(panel.title, _figure(panel, HEIGHT)) for panel in panels]
    return [{"title": title, "item": _stable(json_item(model))} for title, model in models]


def _stable(item: Any) -> Any:
    """The item with its ids counted from one, so that the same records give the same page."""
    numbers: dict[str, str] = {}
    text = re.sub(
        r'"p\d+"',
        lambda match: numbers.setdefault(match[0], f'"p{len(numbers) + 1}"'),
        json.dumps(item),
    )
    return json.loads(text)


def _figure(panel: Panel, height: int) -> Any:
    from bokeh.models import HoverTool
    from bokeh.plotting import figure

    plot = figure(
        height=max(height, 90 + 30 * len(panel.rows)) if panel.rows else height,
        sizing_mode="stretch_width",
        x_axis_type="log" if panel.log_x else "linear",
        y_axis_type="log" if panel.log_y else "linear",
        tools="pan,box_zoom,reset",
        active_drag=None,  # a finger that scrolls the page must not move the figure
        toolbar_location=None if panel.rows else "above",
        toolbar_inner=True,
        background_fill_color=PAPER,
        border_fill_color=PAPER,
        outline_line_color=None,
    )
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    for axis, label in ((plot.xaxis, panel.x_label), (plot.yaxis, panel.y_label)):
        axis.axis_label, axis.axis_label_text_font_style = fill(label, WIDEST_LABEL), "normal"
        axis.axis_label_text_color = axis.major_label_text_color = INK
        axis.axis_line_color = axis.major_tick_line_color = GRID
        axis.minor_tick_line_color = None
        axis.axis_label_text_font = axis.major_label_text_font = FONT
    plot.grid.grid_line_color = GRID
    _ranges(plot, panel)
    hovers = [_renderer(plot, series) for series in panel.series]
    named = [renderer for renderer in hovers if renderer is not None]
    if named:
        plot.add_tools(HoverTool(renderers=named, tooltips="@name", mode="mouse", visible=False))
    return plot


def _ranges(plot: Any, panel: Panel) -> None:
    from bokeh.models import FixedTicker, NumeralTickFormatter, Range1d

    # Lines are broken off at NaN, of which nothing is the greatest.
    xs = [
        x
        for series in panel.series
        for x in (*series.x, *series.low, *series.high)
        if math.isfinite(x)
    ]
    ys = [
        y for series in panel.series if series.kind != "band" for y in series.y if math.isfinite(y)
    ]
    for logarithmic, values, axis in ((panel.log_x, xs, plot.xaxis), (panel.log_y, ys, plot.yaxis)):
        # On other axes Bokeh's own write 40,000 as 40000, and small figures better.
        if (
            min(values, default=0.0) >= LEAST_PLAIN
            if logarithmic
            else max(values, default=0.0) >= 1000
        ):
            axis.formatter = NumeralTickFormatter(format="0,0.[000]")
        # Below two decades Bokeh's own are evenly spaced: crowded at the upper end, and none at the
        # lower.
        if logarithmic and values and 10 <= max(values) / min(values) < 100:
            axis.ticker = FixedTicker(ticks=decades(min(values), max(values)))
    if not panel.log_x and panel.x_from_zero:
        plot.x_range = Range1d(start=0, end=BEYOND_X * (max(xs, default=0.0) or 1.0))
    if panel.rows:
        plot.y_range = Range1d(start=len(panel.rows) - 0.4, end=-0.6)
        plot.yaxis.ticker = list(range(len(panel.rows)))
        plot.yaxis.major_label_overrides = dict(enumerate(panel.rows))
        plot.ygrid.grid_line_color = None
    elif not panel.log_y and panel.y_from_zero:
        top = BEYOND_Y * (max(ys, default=0.0) or 1.0)
        plot.y_range = Range1d(start=-panel.foot * top, end=top)


def decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 of every power of ten around `low` to `high`, which are above 0."""
    powers = range(math.floor(math.log10(low)) - 1, math.floor(math.log10(high)) + 2)
    return [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]


def _renderer(plot: Any, series: Series) -> Any:
    """Draw one series; returns what the pointer asks, if it has names."""
    from bokeh.models import ColumnDataSource
    from bokeh.models.annotations import BoxAnnotation

    if series.kind == "band":
        plot.add_layout(
            BoxAnnotation(
                left=series.x[0],
                right=series.x[1],
                fill_color=series.colour,
                fill_alpha=0.35,
                line_color=None,
                name=series.label,
            )
        )
        return None
    data: dict[str, list[Any]] = {"x": _short(series.x), "y": _short(series.y)}
    data["name"] = list(series.names) or [series.label] * len(data["x"])
    if series.low:
        data |= {"low": _short(series.low), "high": _short(series.high)}
    source = ColumnDataSource(data)
    style: dict[str, Any] = {"source": source, "name": series.label}
    if series.kind == "points":
        if series.low:
            plot.segment("low", "y", "high", "y", line_color=series.colour, line_width=2, **style)
        return plot.scatter(
            "x",
            "y",
            size=9,
            marker=MARKERS.get(series.marker, "circle"),
            line_color=series.colour,
            fill_color=None if series.hollow else series.colour,
            **style,
        )
    dash = "dashed" if series.dashed else "solid"
    if series.kind == "steps":
        plot.step(
            "x",
            "y",
            mode="after",
            line_color=series.colour,
            line_dash=dash,
            line_width=1.4,
            **style,
        )
        return None
    line = plot.line("x", "y", line_color=series.colour, line_dash=dash, line_width=1.8, **style)
    return line if series.names or series.label else None


def _short(values: Any) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values]


@cache
def library() -> str:
    """Bokeh's script as its installed package has it, packed for the page."""
    import bokeh

    script = Path(bokeh.__file__).parent / "server" / "static" / "js" / "bokeh.min.js"
    return packed(script.read_bytes())


def packed(data: bytes | list[Any]) -> str:
    """Bytes, or JSON of plain data, as base64 of gzip; the same content gives the same text."""
    raw = data if isinstance(data, bytes) else json.dumps(data, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(raw, 9, mtime=0)).decode()
