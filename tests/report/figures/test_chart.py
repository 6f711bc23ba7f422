"""Figures: true to the records, the same twice, and one definition for the file and for the
page."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minivllm.analysis.cell import Cell
from minivllm.analysis.cells import gather
from minivllm.analysis.rows import read_rows
from minivllm.bench.records.figures import Breakdown, Memory
from minivllm.bench.records.storage import write_record
from minivllm.report.figures import chart as chart_module
from minivllm.report.figures import live, render
from minivllm.report.figures.cell_styles import CellStyles
from minivllm.report.figures.chart import Chart, Panel, Series, keys
from minivllm.report.figures.distributions import distributions
from minivllm.report.figures.palette import BETTER, INK, NEUTRAL, ON_DARK, PALETTE, UNDECIDED, WORSE
from minivllm.report.figures.parts import breakdown, memory
from minivllm.report.figures.plots import latency, throughput
from minivllm.report.figures.render import finish, svg
from minivllm.report.figures.roofline import roofline
from minivllm.report.figures.scatter import point_series, thinning, trade_off
from minivllm.report.figures.style import (
    WIDE,
    canvas,
    legend_below,
    patch,
    plain_ticks,
    row_labels,
    short,
)
from minivllm.report.figures.timelines import timeline_plots
from tests.report.synthetic import counted, make_record, write


def chart(**panel: Any) -> Chart:
    series = [
        Series(
            "a line",
            "#0072B2",
            [1.0, 2.0, 3.0],
            [1.0, 4.0, 9.0],
            "line",
            names=["one", "two", "three"],
        ),
        Series(
            "points",
            "#E69F00",
            [1.0, 2.0],
            [2.0, 3.0],
            low=[0.5, 1.5],
            high=[1.5, 2.5],
            names=["p", "q"],
        ),
        Series("steps", "#009E73", [1.0, 3.0], [5.0, 6.0], "steps", dashed=True),
        Series("band", "#cfcfcf", [1.2, 1.4], [], "band"),
    ]
    return Chart(
        "c",
        "A chart",
        "What is seen.",
        "How to read it.",
        [("", [Panel("T", "x", "y", series, **panel)])],
    )


def panels(plot: Any) -> list[dict[str, Any]]:
    """Every panel that the page's script is given."""
    return [panel for item in plot.live for panel in item["panels"]]


def sources(plot: Any) -> list[dict[str, Any]]:
    """The data of every series that the page's script is given, but for bands."""
    series = (one for panel in panels(plot) for one in panel["series"])
    return [one for one in series if one["kind"] != "band"]


@pytest.mark.parametrize("panel", [{}, {"log_x": True, "log_y": True}, {"rows": ["r0", "r1"]}])
def test_the_page_is_given_what_the_file_shows(panel: dict[str, Any]) -> None:
    plot = finish(chart(**panel))
    assert plot.png[1:4] == b"PNG" and len(plot.live) == 1
    line, points, steps = sources(plot)
    assert (line["x"], line["y"], line["names"]) == ([1, 2, 3], [1, 4, 9], ["one", "two", "three"])
    assert (points["low"], points["high"]) == ([0.5, 1.5], [1.5, 2.5])
    assert steps["label"] == "steps" and "names" not in steps
    (shown,) = panels(plot)
    assert shown["rows"] == [*panel.get("rows", ())] and shown["x"]["log"] == ("log_x" in panel)
    assert [key["label"] for key in plot.legend] == ["a line", "points", "steps", "band"]


@pytest.mark.parametrize("rows", [(), ("one", "two")])
def test_on_a_phone_panels_stand_below_one_another(
    rows: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(
        "minivllm.report.figures.render.paint",
        lambda figure: drawn.append(figure) or np.zeros((1, 1, 4), np.uint8),
    )
    series = [Series("a", "#0072B2", [0.0, 1.0], [0.0, 1.0], "line", names=["p", "q"])]
    long = "KL, nats a token: down and to the left is better"
    panels = [Panel(title, "x", "y", series) for title in ("T", "U", long)]
    finish(Chart("c", "A chart", "", "", [(name, panels) for name in rows or [""]]))
    if not rows:  # whole, in lines that a phone has room for
        title = drawn[1].axes[2].get_title("left")
        assert title.replace("\n", " ") == long and max(map(len, title.split("\n"))) <= 42
    wide, narrow = ([ax.get_position() for ax in figure.axes] for figure in drawn)
    assert len(wide) == len(narrow) == 3 * max(1, len(rows))
    assert len({round(box.x0, 2) for box in wide}) == 3 and len({box.x0 for box in narrow}) == 1
    assert drawn[1].get_figwidth() < 0.5 * drawn[0].get_figwidth()


def test_a_line_that_begins_with_a_gap_is_within_its_axes() -> None:
    series = [Series("a", "#0072B2", [0.0, 1.0, 2.0], [math.nan, 3.0, 4.0], "steps")]
    (item,) = live.items(Chart("c", "A chart", "", "", [("", [Panel("T", "x", "y", series)])]))
    (panel,) = item["panels"]
    assert panel["x"]["range"][1] >= 2 and panel["y"]["range"][1] >= 4
    assert panel["series"][0]["y"] == [None, 3, 4] and json.loads(json.dumps(item)) == item


@pytest.mark.parametrize(
    ("values", "logarithmic", "beyond", "ends"),
    [
        ([2.0, 4.0], False, 1.1, [0, 4.4]),
        ([2.0, 4.0], False, None, [1.88, 4.12]),
        ([3.0], False, None, [2.5, 3.5]),
        ([0.0, 1.0, 100.0], True, None, [100**-0.06, 100**1.06]),
        ([5.0], True, None, [2.5, 10]),
        ([], False, 1.1, [0, 1.1]),
    ],
)
def test_an_axis_has_room_for_all_it_shows(
    values: list[float], logarithmic: bool, beyond: float | None, ends: list[float]
) -> None:
    assert live._range(values, logarithmic, beyond) == pytest.approx(ends)


def test_the_same_chart_is_the_same_bytes() -> None:
    first, second = finish(chart()), finish(chart())
    assert first.png == second.png and json.dumps(first.live) == json.dumps(second.live)


def test_rows_that_share_an_axis_are_drawn_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(
        "minivllm.report.figures.render.paint",
        lambda figure: drawn.append(figure) or np.zeros((1, 1, 4), np.uint8),
    )
    rows = [
        (
            name,
            [
                Panel(
                    "tokens",
                    "seconds",
                    "tokens",
                    [Series("t", "#0072B2", [0.0, top], [0.0, top], "steps")],
                )
            ],
        )
        for name, top in (("short", 1.0), ("long", 50.0))
    ]
    finish(Chart("steps", "Steps", "Two rows.", "Lines.", rows))
    for ax, long in zip(drawn[0].axes, (1.0, 50.0), strict=True):
        assert ax.get_xlim()[0] == ax.get_ylim()[0] == 0
        assert (
            long <= ax.get_xlim()[1] <= 1.2 * long and ax.get_ylim()[1] >= 50
        )  # a short one is not squeezed


def test_a_panel_without_data_is_said_in_the_file_and_left_out_of_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(
        "minivllm.report.figures.render.paint",
        lambda figure: drawn.append(figure) or np.zeros((1, 1, 4), np.uint8),
    )

    def line(unit: str, xs: list[float]) -> Series:
        return Series(unit, "#0072B2", xs, xs, "steps")

    panels = [
        Panel(
            unit, "seconds", unit, [Series("window", INK, [1.0, 2.0], [], "band"), line(unit, xs)]
        )
        for unit, xs in (("tokens", [1.0, 2.0]), ("blocks", []))
    ]
    plot = finish(Chart("steps", "Steps", "One row.", "Lines.", [("a cell", panels)]))
    assert [[text.get_text() for text in ax.texts] for ax in drawn[0].axes] == [
        [],
        ["not recorded"],
    ]
    page = json.dumps(plot.live)
    assert '"tokens"' in page and '"blocks"' not in page


def test_what_is_packed_is_unpacked() -> None:
    packed = live.charts([("c", [{"title": "T", "panels": [1, 2]}])])
    assert json.loads(gzip.decompress(base64.b64decode(packed)))["figures"] == [["c", [[1, 2]]]]
    assert live.charts([("c", [{"title": "T", "panels": [1, 2]}])]) == packed
    assert b"uPlot" in gzip.decompress(base64.b64decode(live.library()))


def cells_of(tmp_path: Path, *records: Any) -> list[Cell]:
    return gather(read_rows(write(tmp_path / "runs", list(records), parquet=False))[0])


def described(draw: Any, cells: list[Cell]) -> Any:
    """The description of a figure of these cells."""
    return draw(cells, CellStyles(cells))


def figure_of(draw: Any, cells: list[Cell]) -> Any:
    """What the page of these cells shows: of a chart, which can be drawn, what its script draws, of
    a drawing the wide picture."""
    found = described(draw, cells)
    if found is None:
        return None
    figure = render.draw(found, WIDE)
    if isinstance(found, Chart):
        shown = {"live": live.items(found), "legend": keys(found)}
    else:
        shown = {"wide": svg(figure, found.name)}
    return SimpleNamespace(caption=found.caption, **shown)


def points_of(cells: list[Cell], styles: CellStyles) -> list[Series]:
    return point_series(cells, styles, lambda cell: (1.0, 2.0), lambda cell: cell.label)


def test_distributions_are_of_the_requests(tmp_path: Path) -> None:
    record = make_record()
    record.metrics.ttft_ms.p50 = 60.0  # so that milliseconds are the unit
    rows = [{"ttft_ms": 10.0 * (i + 1), "token_times_s": [1.0, 1.1, 1.3]} for i in range(11)] + [
        {"ttft_ms": None, "token_times_s": [5.0]}
    ]
    write_record(tmp_path / "runs" / "s" / "r", record, requests=rows)
    plot = figure_of(distributions, gather(read_rows(tmp_path / "runs")[0]))
    assert plot is not None
    ttft, itl = sources(plot)
    # least, median, greatest of 11, each with both ends of its step
    assert ttft["x"] == [10.0 * (1 + at // 2) for at in range(22)]
    assert ttft["y"] == pytest.approx([100 / 11 * ((at + 1) // 2) for at in range(22)], rel=1e-3)
    assert itl["x"][0] == pytest.approx(100, rel=1e-3) and itl["x"][-1] == pytest.approx(
        200, rel=1e-3
    )
    assert figure_of(distributions, cells_of(tmp_path / "none", make_record())) is None


@pytest.mark.parametrize("blocks", [5, 7])
def test_distributions_say_how_many_blocks_they_are_of(blocks: int, tmp_path: Path) -> None:
    rows = [{"ttft_ms": 10.0 * (i + 1), "token_times_s": [1.0, 1.1]} for i in range(3)]
    for block in range(blocks):
        record = make_record(block=block, run_id=f"r{block}")
        write_record(tmp_path / "runs" / "s" / record.run_id, record, requests=rows)
    plot = figure_of(distributions, gather(read_rows(tmp_path / "runs")[0]))
    assert plot is not None
    assert ("Of 7 blocks the first 5." in plot.caption) == (blocks == 7)


def test_roofline_by_hand(tmp_path: Path) -> None:
    """20 GB/s and 1 TFLOP/s: the ridge is at 50 FLOP a byte. Decode: 10 GFLOP over 10 GB in 1 s."""
    plot = figure_of(roofline, cells_of(tmp_path, make_record(roofline=counted())))
    assert plot is not None
    roof, decode, again, prefill = sources(plot)
    assert (decode["x"], decode["y"]) == ([1], [10]) and "50.0 % of the bandwidth" in decode[
        "names"
    ][0]
    assert (prefill["x"], prefill["y"]) == (
        [100],
        [500],
    ) and "50.0 % of the matrix rate" in prefill["names"][0]
    assert roof == again and 50 in roof["x"] and roof["y"][roof["x"].index(50)] == 1000
    assert roof["y"][0] == pytest.approx(20 * roof["x"][0], rel=1e-3)
    assert (
        figure_of(roofline, cells_of(tmp_path / "none", make_record())) is None
    )  # an older record counts fewer things


def test_roofs_of_two_dtypes_can_be_told_apart(tmp_path: Path) -> None:
    other = replace(counted(), matrix_dtype="float32", matrix_flops_per_s=2e11)
    records = make_record(roofline=counted()), make_record("int8", index=1, roofline=other)
    plot = figure_of(roofline, cells_of(tmp_path, *records))
    assert plot is not None
    rooflines = [entry for entry in plot.legend if entry["label"].startswith("measured roofline")]
    assert len({(entry["colour"], entry["dashed"]) for entry in rooflines}) == 2


def test_marks_lie_within_their_axes() -> None:
    """Also where values are close together and far from zero, which an axis begins at."""
    _, ax = canvas()
    panel = Panel("T", "x", "y", [Series("points", INK, [4.55, 4.59], [1266.0, 1270.0])])
    for series in panel.series:
        chart_module._series(ax, series)
    chart_module._axes(ax, panel, bottom=True)
    for end, largest in ((ax.get_xlim(), 4.59), (ax.get_ylim(), 1270.0)):
        assert end[0] == 0 and end[1] >= 1.04 * largest


@pytest.mark.parametrize(("least", "below"), [(0.0, True), (1.0, False)])
def test_a_mark_at_zero_is_whole(least: float, below: bool) -> None:
    _, ax = canvas()
    panel = Panel("T", "x", "y", [Series("points", INK, [1.0, 2.0], [least, 100.0])])
    chart_module._series(ax, panel.series[0])
    chart_module._axes(ax, panel, bottom=True)
    (item,) = live.items(Chart("c", "", "", "", [("", [panel])]))
    start = item["panels"][0]["y"]["range"][0]
    assert [bool(ax.get_ylim()[0] < 0), start < 0] == [below, below]


def test_a_long_label_loses_its_groups_and_then_its_middle() -> None:
    assert short("quant.lm_head=True quant=int8 runtime.cpu_kernels=off #1") == (
        "lm_head=True quant=int8 cpu_kernels=off #1"
    )
    assert short("quant.lm_head=True quant=int8") == "quant.lm_head=True quant=int8"
    cells = [f"minivllm · prefix_caching={on} · encoder_cache_tokens=16384" for on in (0, 1)]
    assert [short(cell) for cell in cells] == [
        f"minivllm · prefix_c…={on} · encoder_…=16384" for on in (0, 1)
    ]
    labels = [
        f"without prefix_caching+chunked_prefill+fused_{part}" for part in ("attention", "sampling")
    ]
    cut = [short(label) for label in labels]
    assert [len(label) for label in cut] == [44, 44] and cut[0] != cut[1]
    assert cut[0].startswith("without prefix_cach") and cut[0].endswith("fused_attention")


def test_a_long_label_beside_a_row_has_two_lines_where_rows_are_high_enough() -> None:
    long = "prefix caching · chunked prefill · continuous batching · CUDA graphs"
    assert row_labels([long, "short"]) == [
        "prefix caching · chunked prefill\ncontinuous batching · CUDA graphs",
        "short",
    ]
    assert row_labels([long] * 17) == [short(long)] * 17
    assert row_labels(["x" * 60]) == [short("x" * 60)]  # nowhere to break


def test_drawings_follow_the_readers_colour_scheme(tmp_path: Path) -> None:
    plot = figure_of(breakdown, cells_of(tmp_path, make_record()))
    assert plot is not None
    text = plot.wide.decode()
    body = re.sub(r":root \{[^}]*\}", "", text)
    assert "prefers-color-scheme: dark" in text and f"var(--c{INK[1:]})" in body
    assert not any(colour in body for colour in ON_DARK)


def test_on_a_gpu_the_breakdown_says_what_forward_is(tmp_path: Path) -> None:
    record = make_record()
    for device, message in ((None, False), (10**9, True)):
        record.memory.device_peak_allocated = device
        plot = figure_of(breakdown, cells_of(tmp_path / str(message), record))
        assert plot is not None and ("forward is the time to launch" in plot.caption) is message


def test_steps_without_parts_are_not_said_to_take_nothing(tmp_path: Path) -> None:
    records = [make_record("fp16"), make_record("int8", index=1), make_record("nf4", index=2)]
    records[1].breakdown = Breakdown(10, forward_ms=300.0)
    records[2].breakdown = Breakdown()
    plot = figure_of(breakdown, cells_of(tmp_path, *records))
    assert plot is not None and plot.wide.count(b">not told apart<") == 1
    assert "2 of 3 cells: the others failed or show no steps" in plot.caption
    plot = figure_of(breakdown, cells_of(tmp_path / "simulated", records[1]))
    assert plot is not None and "Phases of a step are not told apart." in plot.caption
    assert not any(words in plot.wide for words in (b"not told apart", b"Without", b"emit"))


def test_a_lone_bar_is_not_drawn(tmp_path: Path) -> None:
    assert figure_of(throughput, cells_of(tmp_path / "one", make_record())) is None
    assert (
        figure_of(
            throughput, cells_of(tmp_path / "two", make_record(), make_record("int8", index=1))
        )
        is not None
    )


def test_a_hosts_pool_is_no_part_of_what_the_process_takes(tmp_path: Path) -> None:
    on_host = make_record("fp16")
    on_host.memory = Memory(weights=10**9, kv_pool=11 * 10**9, host_rss_peak=25 * 10**8)
    unknown = make_record("int8", index=1, memory=Memory(host_rss_peak=4 * 10**9))
    plot = figure_of(memory, cells_of(tmp_path / "host", on_host, unknown))
    assert plot is not None and "KV pool, set aside" in plot.wide.decode()
    assert b">1.00 of 2.50<" in plot.wide and ">– of 4.00<" in plot.wide.decode()
    assert "Outline: the pool" in plot.caption
    nothing = make_record("nf4", index=2, memory=Memory())
    plot = figure_of(memory, cells_of(tmp_path / "simulated", on_host, nothing))
    assert (
        plot is not None and b">not recorded<" in plot.wide and ">– of 0<" not in plot.wide.decode()
    )
    on_device = make_record("fp16")
    on_device.memory = Memory(weights=10**9, kv_pool=11 * 10**9, device_process=13 * 10**9)
    plot = figure_of(memory, cells_of(tmp_path / "device", on_device))
    assert plot is not None and b">1.00 of 13.0<" in plot.wide and "Outline" not in plot.caption


def test_points_are_named_by_both_columns_that_vary(tmp_path: Path) -> None:
    records = [
        make_record(q, b, run_id=f"{q}{b}")
        for q in ("fp16", "nf4")
        for b in ("sequential", "continuous")
    ]
    cells = cells_of(tmp_path, *records)
    series = points_of(cells, CellStyles(cells))
    assert "quant=fp16 · sequential" in [s.label for s in series]
    assert len({(s.colour, s.marker) for s in series}) == 4


def test_a_cell_has_one_colour_in_every_figure(tmp_path: Path) -> None:
    """Whichever cells a figure has; and none that says better, worse or undecided."""
    names = ("fp16", "int8", "nf4")
    records = [
        make_record(q, b, run_id=f"{q}{b}") for q in names for b in ("sequential", "continuous")
    ]
    for record in records:
        record.roofline = counted()
    cells = cells_of(tmp_path, *records)
    styles = CellStyles(cells)
    assert [styles[cell.label].colour for cell in cells] == [
        c for c in PALETTE[:3] for _ in range(2)
    ]
    assert [styles[cell.label].dashed for cell in cells] == [False, True] * 3
    for some in (cells, cells[2:], cells[4:]):
        expected = {styles[cell.label].colour for cell in some}
        assert {series.colour for series in points_of(some, styles)} == expected
        rooflines = roofline(some, styles)
        assert (
            rooflines is not None and {key["colour"] for key in keys(rooflines)} - {INK} == expected
        )
    assert not {BETTER, WORSE, UNDECIDED, NEUTRAL} & set(PALETTE)
    bars = figure_of(throughput, cells)
    assert all(colour.lower() in bars.wide.decode() for colour in PALETTE[:3])


def test_cells_that_no_two_columns_tell_apart_have_a_look_each(tmp_path: Path) -> None:
    records = [
        make_record(q, run_id=f"{q}{n}", cell_id=f"{q}{n}")
        for q in ("fp16", "nf4")
        for n in range(4)
    ]
    for index, record in enumerate(records):
        record.config["batching"]["max_num_seqs"] = 8 << index % 2
        record.config["cache"]["block_size"] = 16 << index // 2 % 2
    cells = cells_of(tmp_path, *records)
    styles = CellStyles(cells)
    assert len({(look.colour, look.marker) for look in styles.values()}) == len(cells) == 8


def test_long_names_of_the_same_knobs_are_told_by_their_values(tmp_path: Path) -> None:
    """Cut in their middle they would be alike."""
    records = [make_record(run_id=f"r{n}", cell_id=f"r{n}") for n in range(8)]
    for index, record in enumerate(records):
        record.config["batching"] |= {
            "max_num_seqs": 8 << index % 2,
            "max_num_batched_tokens": 64 << index // 4,
        }
        record.config["cache"]["block_size"] = 16 << index // 2 % 2
    cells = cells_of(tmp_path, *records)
    plot = figure_of(throughput, cells)
    names = [look.name for look in CellStyles(cells).values()]
    assert names[:2] == ["64 · 8 · 16", "64 · 16 · 16"] and len(set(names)) == 8
    knobs = "batching.max_num_batched_tokens · batching.max_num_seqs · cache.block_size"
    assert f"Cells are named by {knobs}." in plot.caption
    assert all(f">{name}<" in plot.wide.decode() for name in names)


def test_a_latency_has_one_unit_on_a_page(tmp_path: Path) -> None:
    """That of its medians, however long the tail that one figure shows."""
    record = make_record()
    record.metrics.ttft_ms.p50, record.metrics.ttft_ms.p99 = 900.0, 20_000.0
    requests = [{"ttft_ms": 900.0 * (i + 1), "token_times_s": [1.0, 1.1]} for i in range(20)]
    write_record(tmp_path / "runs" / "s" / "r", record, requests=requests)
    cells = gather(read_rows(tmp_path / "runs")[0])
    drawn = (figure_of(latency, cells), figure_of(distributions, cells))
    assert drawn[0] is not None and b">ms (shorter is better)<" in drawn[0].wide
    assert drawn[1] is not None and "TTFT, ms" in json.dumps(drawn[1].live)
    record.metrics.ttft_ms.p50 = 12_000.0
    write_record(tmp_path / "slow" / "s" / "r", record, requests=requests)
    slow = figure_of(distributions, gather(read_rows(tmp_path / "slow")[0]))
    assert slow is not None and "TTFT, s" in json.dumps(slow.live)


def test_a_bare_number_is_named_with_its_knob(tmp_path: Path) -> None:
    records = [
        make_record(q, run_id=f"{q}{n}", cell_id=f"{q}{n}") for q in ("fp16", "nf4") for n in (1, 2)
    ]
    for index, record in enumerate(records):
        record.config["batching"]["max_num_seqs"] = 8 << index % 2
    cells = cells_of(tmp_path, *records)
    series = points_of(cells, CellStyles(cells))
    assert [s.label for s in series][:2] == [
        "quant=fp16 · max_num_seqs=8",
        "quant=fp16 · max_num_seqs=16",
    ]


@pytest.mark.parametrize(
    ("columns", "low", "high", "written"),
    [
        (1, 1, 300, "20"),
        (3, 1, 300, "100"),
        (3, 128, 32_000, "10,000"),
        (3, 20, 90, "50"),
        (3, 0.01, 10, "0.1"),
        (3, 0.04, 20, "0.1"),
        (1, 0.05, 9, "0.2"),
        (1, 300, 4e5, "100,000"),
        (1, 300, 4e6, "1,000,000"),
    ],
)
def test_the_figures_of_a_logarithmic_axis_never_lie_on_one_another(
    columns: int, low: float, high: float, written: str
) -> None:
    drawn, axes = canvas(1, columns, 3.5, squeeze=False)
    for ax in axes[0]:
        ax.plot([low, high], [low, high])
        ax.set_xscale("log"), ax.set_yscale("log")
        plain_ticks(ax.xaxis), plain_ticks(ax.yaxis)
    drawn.canvas.draw()
    for axis in (axes[0][0].xaxis, axes[0][0].yaxis):
        begin, end = axis.get_view_interval()
        labels = [
            tick.label1
            for tick in axis.get_major_ticks() + axis.get_minor_ticks()
            if tick.label1.get_text() and begin <= tick.get_loc() <= end
        ]
        boxes = [label.get_window_extent() for label in labels]
        assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]
        assert written in {label.get_text() for label in labels}
        if axis.axis_name == "x":
            assert max(box.y1 for box in boxes) - min(box.y1 for box in boxes) < 1


@pytest.mark.parametrize(("low", "high"), [(0.89, 1.13), (0.995, 1.004), (100.0, 190.0)])
def test_a_logarithmic_axis_of_a_small_range_has_figures_on_either_side(
    low: float, high: float
) -> None:
    figure, ax = canvas()
    ax.set_xscale("log")
    plain_ticks(ax.xaxis)
    ax.plot([low, high], [0, 1])
    figure.canvas.draw()
    written = [
        float(tick.label1.get_text())
        for tick in ax.xaxis.get_major_ticks() + ax.xaxis.get_minor_ticks()
        if tick.label1.get_text() and low <= tick.get_loc() <= high
    ]
    assert 3 <= len(written) <= 8 and len(set(written)) == len(written)
    assert min(written) < (low + high) / 2 < max(written)


def test_the_figures_of_an_axis_have_separated_thousands_as_tables_do() -> None:
    figure, ax = canvas()
    ax.plot([0.0, 0.5], [-40000, 40000])
    figure.canvas.draw()
    assert "0.1" in {tick.get_text() for tick in ax.get_xticklabels()}
    assert {"\N{MINUS SIGN}40,000", "0", "20,000"} <= {
        tick.get_text() for tick in ax.get_yticklabels()
    }


def test_figures_over_time_are_named_by_what_they_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, telemetry = described(
        timeline_plots, gather(read_rows(write(tmp_path, [make_record()]))[0])
    )
    assert steps.title == "How did tokens, requests and KV blocks change over time?"
    assert (
        telemetry.title == "How did memory and CPU use change over time?"
    )  # a CPU has no power and no clock here
    assert telemetry.alt.endswith(
        "a row a cell for 1 cell: memory of the worker, CPU of the worker and CPU of others."
    )


def test_of_many_cells_a_few_timelines_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [make_record(cell_id=f"c{i}", arm=f"a{i}", run_id=f"r{i}") for i in range(5)]
    cells = gather(read_rows(write(tmp_path, records))[0])
    assert all(len(chart.rows) == 5 for chart in described(timeline_plots, cells))
    monkeypatch.setattr("minivllm.report.figures.timelines.MANY", 4)
    assert all(len(chart.rows) == 3 for chart in described(timeline_plots, cells))


def test_the_measured_window_is_marked_where_the_machine_was_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases = ["loading", "probing", "measuring", "measuring", "done"]
    samples = [{"t_s": 7.0 + i, "rss": 1e9, "phase": phase} for i, phase in enumerate(phases)]
    write_record(tmp_path / "s" / "r", make_record(), telemetry=samples)
    (telemetry,) = described(timeline_plots, gather(read_rows(tmp_path)[0]))
    bands = [
        s for _, panels in telemetry.rows for p in panels for s in p.series if s.kind == "band"
    ]
    assert [(list(band.x), band.label) for band in bands] == [([2.0, 3.0], "measured window")]


def test_nothing_is_painted_behind_a_figure() -> None:
    """The shadows at the edges of its card, which say that there is more, lie there."""
    figure, _ = canvas()
    assert b"fill: var(--cffffff)" not in svg(figure, "empty")


def test_a_legend_below_a_figure_reads_line_after_line() -> None:
    figure, _ = canvas()
    names = [f"the name of entry {i}" for i in range(5)]
    legend_below(figure, [(patch(INK), name) for name in names])
    figure.draw_without_rendering()
    places = [(text.get_window_extent(), text.get_text()) for text in figure.legends[0].get_texts()]
    lines = sorted({round(box.y0) for box, _ in places}, reverse=True)
    read = [
        [name for box, name in sorted(places, key=lambda p: p[0].x0) if round(box.y0) == y]
        for y in lines
    ]
    assert read == [names[:3], names[3:]]


def test_of_thousands_of_points_some_are_drawn_and_those_on_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minivllm.report.figures.scatter.MAX_POINTS", 3)
    records = [
        make_record(cell_id=f"c{i}", arm=f"arm {i}", run_id=f"r{i}", index=i) for i in range(10)
    ]
    cells = cells_of(tmp_path, *records)
    styles = CellStyles(cells)
    best = cells[9].label
    series = point_series(
        cells, styles, lambda c: (1, 2), lambda c: c.label, lambda c: c.label == best
    )
    names = [name for one in series for name in one.names]
    assert sorted(names) == sorted([*(cells[i].label for i in (0, 4, 8)), best])
    assert (
        thinning(cells) == " Drawn: one cell of 4 of 10, and those on a line."
        and thinning(cells[:3]) == ""
    )


def test_a_line_of_thousands_of_points_is_thinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minivllm.report.figures.scatter.MAX_POINTS", 4)
    records = [make_record(cell_id=f"c{i}", arm=f"arm {i}", run_id=f"r{i}") for i in range(30)]
    for i, record in enumerate(records):  # none beats another in both
        record.metrics.output_tokens_per_s = 10.0 + i
        record.metrics.ttft_ms.p50 = record.metrics.itl_ms.p50 = 100.0 + i
    plot = figure_of(trade_off, cells_of(tmp_path, *records))
    drawn = sources(plot)
    assert drawn and all(len(source["x"]) <= 2 * 4 for source in drawn)


def test_an_outlier_does_not_squeeze_the_other_latencies(tmp_path: Path) -> None:
    record = make_record()
    record.metrics.ttft_ms.p50 = 60.0
    rows = [{"ttft_ms": 10.0 + i / 100, "token_times_s": [1.0, 1.1]} for i in range(1000)]
    rows[0]["ttft_ms"] = 9000.0
    write_record(tmp_path / "runs" / "s" / "r", record, requests=rows)
    plot = figure_of(distributions, gather(read_rows(tmp_path / "runs")[0]))
    ttft, itl = sources(plot)
    assert max(ttft["x"]) < 20 and 99 < max(ttft["y"]) < 100 and max(itl["y"]) == 100
    assert "TTFT ends at 19.9 ms; the slowest was 9,000 ms" in plot.caption
