"""The report: one self-contained page, its figures, and the table as CSV and Markdown."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from minivllm.report import precision, sections
from minivllm.report.cells import Cell, gather
from minivllm.report.format import sig
from minivllm.report.liveness import liveness
from minivllm.report.plots import comparison_plots
from minivllm.report.rows import Row, distinct, read_rows
from minivllm.report.simulation import simulation_check
from minivllm.report.style import Plot
from minivllm.report.tables import csv_text, markdown_text
from minivllm.report.timelines import timeline_plots
from minivllm.report.verdict import verdict
from minivllm.report.writing import write_bytes

FIGURES = (
    "precision",
    "throughput",
    "latency",
    "memory",
    "latency_throughput",
    "breakdown",
    "steps",
    "telemetry",
)


def build_report(source: Path | list[Path], out_dir: Path) -> Path:
    """Write index.html, table.csv, table.md and a PNG a figure from records alone; precision.md with quality.

    Args:
        source: a record folder, a sweep's folder, or several of them.
        out_dir: where to write; files of an earlier report there are replaced, others left alone.

    Returns:
        The path of index.html.

    Raises:
        BadInput: there is no record at all. Failed records are enough for a report.
    """
    rows, unreadable = read_rows(source)
    cells = gather(rows)
    plots = comparison_plots(cells) + timeline_plots(cells)
    if (pareto := precision.pareto(cells)) is not None:
        plots.insert(0, pareto)
    out_dir.mkdir(parents=True, exist_ok=True)
    for plot in plots:
        write_bytes(out_dir / f"{plot.name}.png", plot.png)
    for name in set(FIGURES) - {plot.name for plot in plots}:
        (out_dir / f"{name}.png").unlink(missing_ok=True)  # of an earlier report
    write_bytes(out_dir / "table.csv", csv_text(cells).encode())
    write_bytes(out_dir / "table.md", markdown_text(cells).encode())
    if quality := precision.markdown_text(cells):
        write_bytes(out_dir / "precision.md", quality.encode())
    else:
        (out_dir / "precision.md").unlink(missing_ok=True)
    index = out_dir / "index.html"
    write_bytes(index, page(rows, cells, plots, out_dir, unreadable).encode())
    return index


def page(rows: list[Row], cells: list[Cell], plots: list[Plot], out_dir: Path, unreadable: list[str]) -> str:
    """The page as HTML; `out_dir` is where it will lie, for its links to the records."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from minivllm.bench.glossary import glossary

    environment = Environment(
        loader=PackageLoader("minivllm.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sig"] = sig
    environment.filters["data_uri"] = lambda data: "data:image/png;base64," + base64.b64encode(data).decode()
    failures, unshown_failures = sections.failures(cells, out_dir)
    title, names = sections.heading(rows, cells)
    context: dict[str, Any] = {
        "title": title,
        "names": names,
        "weights": distinct(rows, "weights"),
        "verdict": verdict(cells),
        "asked": sections.asked(rows, cells),
        "commands": sections.commands(rows),
        "constants": sections.constants(cells),
        "knobs": sections.knobs(cells),
        "table": sections.main_table(cells, out_dir),
        "blocks": max(len(cell.ok) for cell in cells),
        "simulation": simulation_check(cells),
        "plots": plots,
        "precision": precision.section(cells),
        "failures": failures,
        "unshown_failures": unshown_failures,
        "unreadable": unreadable,
        "validity": sections.validity(cells),
        "liveness": liveness(cells),
        "baseline": cells[0].label,
        "provenance": sections.provenance(rows),
        "records": sections.every_record(cells, out_dir),
        "glossary": glossary(),
    }
    return environment.get_template("index.html.j2").render(context)
