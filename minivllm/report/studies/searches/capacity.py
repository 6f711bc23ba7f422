"""What a search for capacity found: the share of requests that met their objectives, by rate."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from minivllm.analysis.capacity import TASK, Capacity
from minivllm.analysis.capacity_runs import CapacityRun, from_records
from minivllm.analysis.cell import Cell
from minivllm.analysis.format import count, listing, sig
from minivllm.analysis.rows import Row, record_folder
from minivllm.report.figures.chart import Chart, Panel, Series
from minivllm.report.figures.opening import LoadLine, LoadPoint, over_loads
from minivllm.report.figures.palette import (
    BETTER,
    FAINT,
    INK,
    SLATE,
    UNDECIDED,
    WORSE,
)
from minivllm.report.figures.render import Described, Plot
from minivllm.report.html import Conclusion
from minivllm.report.inputs import ReportInputs
from minivllm.report.studies.base import Study
from minivllm.report.verdict import remarks

TONES = {"holds": "ok", "fails": "failed", "undecided": "mixed"}
COLOURS = {"holds": BETTER, "fails": WORSE, "undecided": UNDECIDED}


def find(rows: list[Row]) -> list[CapacityRun]:
    """The searches that these records are of."""
    folders = [
        folder
        for row in rows
        if row.get("config.task._target_") == TASK and (folder := record_folder(row)) is not None
    ]
    return from_records(folders)


class CapacityStudy(Study[list[CapacityRun]]):
    """What rate of requests can be served."""

    name = "capacity"
    title = "What rate can it serve?"
    page_title = "What rate of requests can {model} serve?"
    leads = True
    template = "capacity"
    figure_names = ("capacity",)

    def find(self, inputs: ReportInputs) -> list[CapacityRun] | None:
        return find(inputs.rows) or None

    def conclusion(self, result: list[CapacityRun], inputs: ReportInputs) -> Conclusion:
        return verdict(result, inputs.cells)

    def picture(self, result: list[CapacityRun], inputs: ReportInputs) -> Chart | None:
        """The share of requests that met their objectives by the rate, a line a search."""
        lines = [
            LoadLine.numbered(
                index,
                name if len(result) > 1 else "",
                [
                    LoadPoint(probe.rate, 100 * probe.share, *(100 * end for end in ends))
                    for probe in search.capacity.probes
                    for ends in [probe.interval(search.capacity.criterion)]
                ],
            )
            for index, (name, search) in enumerate(_named(result))
        ]
        first = result[0].capacity
        goal = 100 * first.criterion.attainment
        return over_loads(
            "At which rates are the objectives met?",
            [("", "% that met them", lines)],
            f"rate of arrival, {first.unit}",
            f"Dashed: the {sig(goal)} % that are wanted.",
            even=goal,
            span="its interval",
        )

    def figures(self, result: list[CapacityRun], inputs: ReportInputs) -> list[Described | None]:
        return [figure(result)]

    def section(
        self, result: list[CapacityRun], inputs: ReportInputs, plots: list[Plot], out_dir: Path
    ) -> dict[str, Any]:
        return section(result, plots)


def verdict(searches: list[CapacityRun], cells: list[Cell]) -> Conclusion:
    """The capacity that was found; of several searches each has a line of its own."""
    sentences = [
        f"{name}: {search.capacity.sentence()}."
        if len(searches) > 1
        else f"{_capital(search.capacity.sentence())}."
        for name, search in _named(searches)
    ]
    if len(searches) > 1:
        sentences.insert(0, f"Capacity of {len(searches)} searches.")
    return Conclusion(sentences[0], [*sentences[1:], *remarks(cells)])


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def section(searches: list[CapacityRun], plots: list[Plot]) -> dict[str, Any]:
    """The section as plain data for its template."""
    return {
        "searches": [
            {
                "name": name if len(searches) > 1 else "",
                "sentence": _capital(search.capacity.sentence()),
                "objectives": listing(
                    [
                        f"{part.removesuffix('_ms').upper()} ≤ {sig(ms)} ms"
                        for part, ms in search.limits.items()
                    ]
                ),
                "unit": search.capacity.unit,
                "left_out": search.left_out and count(search.left_out, "record"),
                "rows": _rows(search.capacity),
            }
            for name, search in _named(searches)
        ],
        "plots": plots,
    }


def _rows(capacity: Capacity) -> list[dict[str, Any]]:
    return [
        {
            "rate": f"{row['rate']:g}",
            "share": sig(100 * row["share"]),
            "interval": f"{sig(100 * row['low'])} to {sig(100 * row['high'])}",
            "requests": count(row["requests"], "request"),
            "blocks": row["blocks"],
            "verdict": row["verdict"],
            "tone": TONES[row["verdict"]],
        }
        for row in capacity.rows()
    ]


def _named(searches: list[CapacityRun]) -> list[tuple[str, CapacityRun]]:
    """Each by what was measured; where that is the same by its sweep too, and where that is the
    same by a number."""
    counts = Counter(search.cell for search in searches)
    names = [s.cell if counts[s.cell] == 1 else f"{s.cell} ({s.sweep})" for s in searches]
    totals, seen = Counter(names), Counter[str]()
    for i, name in enumerate(names):
        seen[name] += 1
        names[i] = name if totals[name] == 1 else f"{name} #{seen[name]}"
    return list(zip(names, searches, strict=True))


def figure(searches: list[CapacityRun]) -> Chart:
    """Share against rate, with its interval and the share that is wanted; a row a search."""
    named = _named(searches)
    panels = [
        (name if len(searches) > 1 else "", [_panel(search.capacity, len(searches) > 1)])
        for name, search in named
    ]
    sentences = [
        f"{panel[0]}: " * bool(panel[0]) + s.capacity.sentence()
        for panel, s in zip(panels, searches, strict=True)
    ]
    rates = sum(len(search.capacity.probes) for search in searches)
    alt = (
        f"Share of requests that met their objectives against the rate, {count(rates, 'rate')}: "
        f"{'; '.join(sentences)}."
    )
    caption = (
        "A rate holds where the whole interval lies above the dashed line, and fails where all "
        "of it lies below."
    )
    return Chart("capacity", "At which rates are the objectives met?", alt, caption, panels)


def _panel(capacity: Capacity, several: bool) -> Panel:
    """Of several, which share their axes, none may end these at what it has itself."""
    rates = [probe.rate for probe in capacity.probes]
    ends = [probe.interval(capacity.criterion) for probe in capacity.probes]
    goal = 100 * capacity.criterion.attainment
    series = [
        Series("wanted", INK, [0.0, max(rates)], [goal, goal], "line", dashed=True),
        Series("share", SLATE, rates, [100 * probe.share for probe in capacity.probes], "line"),
    ]
    for label, side in (("interval", 0), ("", 1)):
        series.append(Series(label, FAINT, rates, [100 * end[side] for end in ends], "line"))
    for verdict, colour in COLOURS.items():
        members = [
            probe for probe in capacity.probes if probe.verdict(capacity.criterion) == verdict
        ]
        if members:
            shares = [100 * probe.share for probe in members]
            names = [
                f"{probe.rate:g}: {sig(share)} % of {count(probe.num_requests, 'request')} met "
                f"them, {verdict}"
                for probe, share in zip(members, shares, strict=True)
            ]
            series.append(Series(verdict, colour, [p.rate for p in members], shares, names=names))
    labels = (
        f"rate of arrival, {capacity.unit}",
        "% that met" if several else "% that met their objectives",
    )
    return Panel("", *labels, series, x_from_zero=not several, y_from_zero=not several)
