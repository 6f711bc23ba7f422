"""The picture beside the answer of a page."""

from __future__ import annotations

import pytest

from minivllm.report.figures.opening import (
    MOST_ROWS,
    ForestRow,
    LoadLine,
    LoadPoint,
    forest,
    over_loads,
)
from minivllm.report.figures.palette import BLUE
from minivllm.report.figures.render import draw, finish_opening
from minivllm.report.figures.style import NARROW, WIDE, Sheet
from minivllm.report.figures.timelines import STEPS, TELEMETRY


def test_a_row_has_its_mark_its_interval_and_its_words() -> None:
    rows = [ForestRow("a", 1.5, 1.2, 1.8, label="faster"), ForestRow("b", 0.9, words="0.9×")]
    chart = forest("Which?", rows, "ratio", "A caption.", even=1.0)
    assert chart is not None
    (panel,) = chart.rows[0][1]
    even, first, second = panel.series
    assert (even.x, panel.rows) == ([1.0, 1.0], ["a", "b"])
    assert (first.x, first.low, first.high, first.names) == ([1.5], [1.2], [1.8], ["1.50"])
    assert (second.low, second.names, second.y) == ([0.9], ["0.9×"], [1.0])
    assert chart.alt == "Which? a: 1.50; b: 0.9×."


def test_what_a_line_through_a_mark_is_is_said_where_there_is_one() -> None:
    for low, high, said in ((1.0, 2.0, True), (None, None, False)):
        row, point = ForestRow("a", 1.5, low, high), LoadPoint(1.0, 1.5, low, high)
        lines = [LoadLine("nf4", BLUE, [point])]
        drawn = (
            forest("Which?", [row], "ratio", "", span="95 % interval"),
            over_loads("Which?", [("", "speed", lines)], "requests", "", span="95 % interval"),
        )
        words = [chart.caption for chart in drawn if chart is not None]
        ends = [f"A line through a {noun}: 95 % interval." for noun in ("mark", "point")]
        assert words == (ends if said else ["", ""])


@pytest.mark.parametrize("sheet", [WIDE, NARROW], ids=["wide", "narrow"])
def test_no_line_crosses_the_words_of_a_row(sheet: Sheet) -> None:
    rows = [ForestRow("a name above the dashed line", 0.9), ForestRow("b", 1.1)]
    chart = forest("Which?", rows, "ratio", "A caption.", even=1.0)
    assert chart is not None
    words = [text for ax in draw(chart, sheet).axes for text in ax.texts if text.get_text()]
    assert len(words) == (4 if sheet.narrow else 2)
    assert all(text.get_bbox_patch() is not None for text in words)


def test_a_first_screen_has_so_many_rows() -> None:
    rows = [ForestRow(str(at), float(at)) for at in range(1, 30)]
    chart = forest("Which?", rows, "ratio", "A caption.")
    assert chart is not None and len(chart.rows[0][1][0].rows) == MOST_ROWS
    assert chart.caption.endswith(f"The first {MOST_ROWS} of 29.")
    assert chart.rows[0][1][0].log_x is False
    assert forest("Which?", [], "ratio", "A caption.") is None


def test_what_wins_at_its_load_is_full() -> None:
    points = [LoadPoint(1.0, 2.0, 1.5, 2.5), LoadPoint(8.0, 1.0)]
    lines = [LoadLine("nf4", BLUE, points, wins=frozenset({1.0}))]
    chart = over_loads("Which?", [("", "speed", lines)], "requests", "A caption.", even=1.0)
    assert chart is not None and chart.caption.endswith("Full: the best there.")
    _, line, whisker, full, hollow = chart.rows[0][1][0].series
    assert (line.label, line.kind) == ("nf4", "line")
    assert (whisker.x, whisker.y) == ([1.0, 1.0], [1.5, 2.5])
    assert (full.x, full.hollow, hollow.x, hollow.hollow) == ([1.0], False, [8.0], True)
    assert over_loads("Which?", [("", "speed", [])], "requests", "A caption.") is None


@pytest.mark.usefixtures("painted_anew")
@pytest.mark.parametrize("name", ["short", "a name of a cell that has no room beside its row"])
def test_it_is_seen_at_once_without_scripts(name: str) -> None:
    chart = forest("Which?", [ForestRow(name, 1.0), ForestRow("b", 2.0)], "ratio", "A caption.")
    assert chart is not None
    plot = finish_opening(chart)
    assert plot.live == [] and plot.wide.startswith(b"<svg") and plot.narrow.startswith(b"<svg")
    assert plot.png.startswith(b"\x89PNG") and name.encode() in plot.wide


@pytest.mark.parametrize("tracks", [STEPS, TELEMETRY], ids=["steps", "telemetry"])
def test_no_two_lines_over_time_look_alike(tracks: tuple[object, ...]) -> None:
    looks = [(line.colour, line.dashed) for track in tracks for line in track.lines]  # type: ignore[attr-defined]
    assert len({*looks}) == len(looks)
