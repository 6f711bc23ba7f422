"""A chart becomes a figure: a file that matplotlib draws, and what the page's script draws."""

from __future__ import annotations

from minivllm.report.figures.chart import Chart, drawn, keys
from minivllm.report.figures.live import items
from minivllm.report.figures.style import NARROW, WIDE, Plot


def finish(chart: Chart) -> Plot:
    """The chart as a file and for the page."""
    words = (chart.name, chart.title, chart.alt, chart.caption)
    wide, narrow = (drawn(chart, sheet) for sheet in (WIDE, NARROW))
    return Plot(*words, wide, narrow=narrow, live=items(chart), legend=keys(chart))
