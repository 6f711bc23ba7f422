"""The report: one self-contained page, its figures, and the table as CSV and Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from minivllm.bench.records.reading import uncollected
from minivllm.report import results
from minivllm.report import sections as words
from minivllm.report.figures.distributions import distributions
from minivllm.report.figures.opening import NAME as OPENING
from minivllm.report.figures.parts import breakdown, memory
from minivllm.report.figures.plots import latency, throughput
from minivllm.report.figures.render import Described, Plot, finish, finish_opening
from minivllm.report.figures.roofline import roofline
from minivllm.report.figures.scatter import trade_off
from minivllm.report.figures.timelines import timeline_plots
from minivllm.report.html import (
    Front,
    Section,
    make_folder,
    page,
    write_bytes,
    write_or_remove,
)
from minivllm.report.inputs import ReportInputs
from minivllm.report.notices import notices
from minivllm.report.provenance import provenance, records_csv
from minivllm.report.spreadsheet import filled
from minivllm.report.studies.base import Study
from minivllm.report.studies.listed import STUDIES, Finding, findings, leading
from minivllm.report.tables import csv_text, markdown_text
from minivllm.report.verdict import picture, verdict, with_others
from minivllm.report.view.recording import recordings

FIGURES = (
    "throughput",
    "latency",
    "memory",
    "latency_throughput",
    "distributions",
    "breakdown",
    "roofline",
    "steps",
    "telemetry",
)


def write_report(
    inputs: ReportInputs, out_dir: Path, studies: Sequence[Study[Any]] = STUDIES
) -> Path:
    """Write index.html, table.csv, table.md, records.csv and a PNG a figure from records alone.

    With quality there is a precision.md, too, of an ablation an effects.md, and of preset=scaling a
    scaling.md.

    Args:
        inputs: what was read of the records; failed ones are enough for a report.
        out_dir: where to write; files of an earlier report there are replaced, others left alone.
        studies: the sections that studies add.

    Returns:
        The path of index.html.

    Raises:
        BadInput: nothing can be written there.
    """
    make_folder(out_dir)
    with uncollected():  # of thousands of records, which are all kept
        return _write(inputs, out_dir, studies)


def _write(inputs: ReportInputs, out_dir: Path, studies: Sequence[Study[Any]]) -> Path:
    cells, known = inputs.cells, findings(inputs, studies)
    described = {
        one.study.name: [
            figure for figure in one.study.figures(one.result, inputs) if figure is not None
        ]
        for one in known
    }
    general = figures(inputs)
    begun = inputs.pool.begin(finish, [*chain(*described.values(), general)])
    front = _front(inputs, known)
    files = dict.fromkeys((name for study in studies for name in study.file_names), "")
    for study, result in known:
        files.update(study.files(result, inputs))
    files["records.csv"] = records_csv(cells)
    for name, text in files.items():
        write_or_remove(out_dir / name, text.encode())
    write_bytes(out_dir / "table.csv", csv_text(cells, inputs.columns).encode())
    write_bytes(out_dir / "table.md", markdown_text(cells, inputs.columns).encode())
    finished = iter(begun.results())
    own = {name: [*islice(finished, len(drawn))] for name, drawn in described.items()}
    plots = {plot.name: plot for plot in chain(*own.values(), finished)}
    if front.picture is not None:
        plots[OPENING] = front.picture
    figure_names = {OPENING, *FIGURES, *(name for study in studies for name in study.figure_names)}
    for name in figure_names | {*plots}:
        write_or_remove(out_dir / f"{name}.png", plots[name].png if name in plots else b"")
    index = out_dir / "index.html"
    parts = sections(inputs, known, own, plots, out_dir)
    write_bytes(index, page(front, parts, plots).encode())
    return index


def figures(inputs: ReportInputs) -> list[Described]:
    """Descriptions of the figures of any report for which the records hold data."""
    cells, styles = inputs.cells, inputs.styles
    single = (trade_off, distributions, roofline, throughput, latency, memory, breakdown)
    plots: list[Described] = [one for draw in single if (one := draw(cells, styles)) is not None]
    return plots + timeline_plots(cells, styles)


def _front(inputs: ReportInputs, known: Sequence[Finding]) -> Front:
    """The question and the conclusion: the leading study's, else a sweep's."""
    cells, lead = inputs.cells, leading(known, inputs)
    question = lead.study.question(lead.result, inputs) if lead else ""
    title, names = words.heading(inputs.rows, cells, question)
    conclusion = (
        lead.study.conclusion(lead.result, inputs) if lead else verdict(cells, inputs.knobs)
    )
    headed = with_others(conclusion, cells)
    drawn = (lead.study.picture(lead.result, inputs) if lead else None) or picture(cells)
    shown = None if drawn is None else finish_opening(drawn)
    return Front(title, names, headed, shown, words.newest(inputs.rows), notices(cells))


def sections(
    inputs: ReportInputs,
    known: Sequence[Finding],
    own: Mapping[str, list[Plot]],
    plots: Mapping[str, Plot],
    out_dir: Path,
) -> list[Section]:
    """The parts of the page in reading order; `own` are the figures of each study, `plots` all
    figures by name."""
    first, below = [
        [
            _without_empty_columns(
                Section(
                    study.name,
                    study.title,
                    study.section(result, inputs, own[study.name], out_dir),
                    study.template,
                )
            )
            for study, result in known
            if study.leads_page(result, inputs) == leads
        ]
        for leads in (True, False)
    ]
    return [
        *first,
        *_results(inputs, out_dir),
        *below,
        *_figures(inputs, plots),
        Section("recorded", "What happened in each step?", recordings(inputs.rows, out_dir)),
        *_trust(inputs, out_dir),
    ]


def _without_empty_columns(section: Section) -> Section:
    """The section of a study; its tables, where it has the usual template, without columns that
    have no entry."""
    if section.template != Study.template:
        return section
    tables = [
        {**table, "headings": headings, "rows": rows}
        for table in section.data.get("tables", ())
        for headings, rows in [filled(table["headings"], table["rows"])]
    ]
    return replace(section, data={**section.data, "tables": tables})


def _results(inputs: ReportInputs, out_dir: Path) -> list[Section]:
    """What was measured, and the main table."""
    rows, cells = inputs.rows, inputs.cells
    facts = {"facts": words.requested(rows, cells), "commands": words.commands(rows)}
    title = f"Results: how fast is {'each' if len(cells) > 1 else 'it'}?"
    return [
        Section("subject", "What was measured?", facts),
        Section("results", title, results.section(cells, out_dir, inputs.columns)),
    ]


def _figures(inputs: ReportInputs, plots: Mapping[str, Plot]) -> list[Section]:
    """The figures of any report, by their question."""
    each = "each" if len(inputs.cells) > 1 else "it"
    groups = {
        ("speed", "What is the price of speed?"): (
            "latency_throughput",
            "throughput",
            "latency",
            "distributions",
        ),
        ("time", "What happened over time?"): ("steps", "telemetry"),
        ("limits", "Where does the time go, and what is the limit?"): ("breakdown", "roofline"),
        ("memory", f"How much memory does {each} take?"): ("memory",),
    }
    return [
        Section(name, title, [plots[one] for one in names_in_group if one in plots], "figures")
        for (name, title), names_in_group in groups.items()
    ]


def _trust(inputs: ReportInputs, out_dir: Path) -> list[Section]:
    """What failed, whether the figures can be trusted, where they come from, and what they mean."""
    from minivllm.bench.metrics.glossary import glossary

    rows, cells = inputs.rows, inputs.cells
    failures, unshown = words.failures(cells, out_dir)
    remarks = words.validity(cells)
    failed = {"failures": failures, "unshown": unshown}
    validity = {"remarks": remarks, "unreadable": inputs.unreadable, "damaged": inputs.damaged}
    doubts = validity if any(validity.values()) else None
    return [
        Section("failures", "What failed?", failed if failures else None),
        Section("validity", "Validity: can the figures be trusted?", doubts),
        Section("liveness", "Did each knob do its work?", words.liveness(cells, inputs.knobs)),
        Section("provenance", "Where do the figures come from?", provenance(rows, cells, out_dir)),
        Section("glossary", "Glossary: what does each metric mean?", glossary()),
    ]
