"""What a search for capacity found: the share of requests that met their objectives, by rate."""

from __future__ import annotations

from typing import Any

from minivllm.bench.capacity import TASK, Capacity, from_records, objectives
from minivllm.report.chart import Chart, Panel, Series, finish
from minivllm.report.format import count, listing, sig
from minivllm.report.rows import Row, below, record_folder
from minivllm.report.style import BLUE, FAINT, GREEN, INK, ORANGE, VERMILION, Plot

TONES = {"holds": "ok", "fails": "failed", "undecided": "mixed"}
COLOURS = {"holds": GREEN, "fails": VERMILION, "undecided": ORANGE}


def find(rows: list[Row]) -> Capacity | None:
    """The search that these records are of; None where they are of none."""
    folders = [
        folder
        for row in rows
        if row.get("config.task._target_") == TASK and (folder := record_folder(row)) is not None
    ]
    return from_records(folders) if folders else None


def section(found: Capacity | None, rows: list[Row], plots: list[Plot]) -> dict[str, Any] | None:
    """The section as plain data for its template."""
    if found is None:
        return None
    limits = objectives(below(rows[0], "config.measure.slo"))
    return {
        "sentence": found.sentence(),
        "objectives": listing(
            [f"{name.removesuffix('_ms').upper()} ≤ {sig(ms)} ms" for name, ms in limits.items()]
        ),
        "rows": [
            {
                "rate": f"{row['rate']:g}",
                "share": sig(100 * row["share"]),
                "interval": f"{sig(100 * row['low'])} to {sig(100 * row['high'])}",
                "requests": count(row["requests"], "request"),
                "blocks": row["blocks"],
                "verdict": row["verdict"],
                "tone": TONES[row["verdict"]],
            }
            for row in found.rows()
        ],
        "plots": plots,
    }


def figure(found: Capacity | None) -> Plot | None:
    """Share against rate, with its interval and the share that is wanted."""
    if found is None:
        return None
    rates = [probe.rate for probe in found.probes]
    ends = [probe.interval(found.criterion.confidence) for probe in found.probes]
    wanted = 100 * found.criterion.attainment
    series = [
        Series("wanted", INK, [0.0, max(rates)], [wanted, wanted], "line", dashed=True),
        Series("", BLUE, rates, [100 * probe.share for probe in found.probes], "line"),
    ]
    for label, side in (("interval", 0), ("", 1)):
        series.append(Series(label, FAINT, rates, [100 * end[side] for end in ends], "line"))
    for verdict, colour in COLOURS.items():
        members = [probe for probe in found.probes if probe.verdict(found.criterion) == verdict]
        if members:
            shares = [100 * probe.share for probe in members]
            names = [
                f"{probe.rate:g}: {sig(share)} % of {count(probe.num_requests, 'request')} met them, {verdict}"
                for probe, share in zip(members, shares, strict=True)
            ]
            series.append(Series(verdict, colour, [p.rate for p in members], shares, names=names))
    panel = Panel("", "rate of arrival", "% that met their objectives", series)
    alt = f"Share of requests that met their objectives against the rate, {count(len(rates), 'rate')}: {found.sentence()}."
    caption = "A rate holds where the whole interval lies above the dashed line, and fails where all of it lies below."
    return finish(Chart("capacity", "Objectives met by rate", alt, caption, [("", [panel])]))
