"""The report: one self-contained page, its figures, and the table as CSV and Markdown."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.report import capacity, precision, results, scaling, tuning, worth
from minivllm.report import sections as words
from minivllm.report.banner import banners
from minivllm.report.cells import Cell
from minivllm.report.distributions import distributions
from minivllm.report.format import sig
from minivllm.report.liveness import liveness
from minivllm.report.material import Material, read
from minivllm.report.plots import comparison_plots
from minivllm.report.roofs import roofline
from minivllm.report.scatter import trade_off
from minivllm.report.simulation import simulation_check
from minivllm.report.style import ON_DARK, Plot
from minivllm.report.tables import csv_text, markdown_text
from minivllm.report.timelines import timeline_plots
from minivllm.report.verdict import Verdict, verdict
from minivllm.report.writing import make_folder, write_bytes

FIGURES = (
    "forest",
    "waterfall",
    "tuning",
    "tuning_values",
    "capacity",
    "scaling",
    "precision",
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


@dataclass(frozen=True)
class Section:
    """One part of the page: what its template shows as `data`. A section of no data is left out."""

    id: str
    title: str
    data: Any
    template: str = ""  # name of its file in templates/sections; the id if it is empty

    def __post_init__(self) -> None:
        object.__setattr__(self, "template", self.template or self.id)


def build_report(source: Path | list[Path], out_dir: Path) -> Path:
    """Write index.html, table.csv, table.md and a PNG a figure from records alone.

    With quality there is a precision.md, too, of an ablation an effects.md, and of preset=scaling a scaling.md.

    Args:
        source: a record folder, a sweep's folder, or several of them.
        out_dir: where to write; files of an earlier report there are replaced, others left alone.

    Returns:
        The path of index.html.

    Raises:
        BadInput: there is no record at all, or nothing can be written there. Failed records are enough for a report.
    """
    return write_report(read(source), out_dir)


def write_report(material: Material, out_dir: Path) -> Path:
    """`build_report` of what is read already."""
    make_folder(out_dir)
    cells = material.cells
    ladders = scaling.ladders(cells)
    drawn = [
        *worth.figures(material.analysis),
        *tuning.figures(material.tuning),
        capacity.figure(material.searches),
        scaling.figure(ladders),
        *figures(cells),
    ]
    plots = {plot.name: plot for plot in drawn if plot is not None}
    for plot in plots.values():
        write_bytes(out_dir / f"{plot.name}.png", plot.png)
    for name in set(FIGURES) - set(plots):
        (out_dir / f"{name}.png").unlink(missing_ok=True)  # of an earlier report
    write_bytes(out_dir / "table.csv", csv_text(cells).encode())
    write_bytes(out_dir / "table.md", markdown_text(cells).encode())
    optional = {
        "precision.md": precision.markdown_text(cells),
        "effects.md": worth.markdown(material.analysis),
        "scaling.md": scaling.markdown_text(ladders),
    }
    for name, text in optional.items():
        if text:
            write_bytes(out_dir / name, text.encode())
        else:
            (out_dir / name).unlink(missing_ok=True)
    index = out_dir / "index.html"
    write_bytes(index, page(material, plots, sections(material, plots, out_dir)).encode())
    return index


def figures(cells: list[Cell]) -> list[Plot]:
    """Every figure for which the records hold data."""
    single = (precision.pareto, trade_off, distributions, roofline)
    found = [plot for draw in single if (plot := draw(cells)) is not None]
    return found + comparison_plots(cells) + timeline_plots(cells)


def sections(material: Material, plots: dict[str, Plot], out_dir: Path) -> list[Section]:
    """The parts of the page in reading order."""
    from minivllm.bench.glossary import glossary

    rows, cells = material.rows, material.cells

    def some(*names: str) -> list[Plot]:
        return [plots[name] for name in names if name in plots]

    failures, unshown = words.failures(cells, out_dir)
    remarks, knobs = words.validity(cells), liveness(cells)
    found = [
        Section(
            "worth",
            "What each optimisation is worth",
            worth.section(material.analysis, cells, some("forest", "waterfall"), out_dir),
        ),
        Section(
            "tuning",
            "What the search found",
            tuning.section(material.tuning, some("tuning", "tuning_values"), out_dir),
        ),
        Section(
            "capacity",
            "What rate it can serve",
            capacity.section(material.searches, some("capacity")),
        ),
        Section(
            "scaling", "Cost as the work grows", scaling.section(scaling.ladders(cells), some("scaling"))
        ),
        Section(
            "asked", "What was asked", {"facts": words.asked(rows, cells), "commands": words.commands(rows)}
        ),
        Section("results", "Results", results.section(cells, out_dir)),
        Section(
            "precision", "What each cell costs in quality", precision.section(cells, plots.get("precision"))
        ),
        Section("simulation", "Simulation against measurement", simulation_check(cells)),
        Section(
            "speed",
            "Throughput and latency",
            some("latency_throughput", "throughput", "latency", "distributions"),
            "figures",
        ),
        Section("time", "Over time", some("steps", "telemetry"), "figures"),
        Section(
            "limits",
            "Where the time goes, and the hardware's limit",
            some("breakdown", "roofline"),
            "figures",
        ),
        Section("memory", "Memory", some("memory"), "figures"),
        Section("failures", "Failures", {"failures": failures, "unshown": unshown}),
        Section(
            "validity",
            "Validity",
            {"remarks": remarks, "unreadable": material.unreadable, "damaged": material.damaged},
        ),
        Section(
            "liveness",
            "Did each knob do its work?",
            {"knobs": knobs, "baseline": cells[0].label} if knobs else None,
        ),
        Section("provenance", "Provenance", words.provenance(rows, cells, out_dir)),
        Section("glossary", "Glossary", glossary()),
    ]
    return [section for section in found if section.data]


def page(material: Material, plots: dict[str, Plot], parts: list[Section]) -> str:
    """The page as HTML, of parts that know where it will lie, for their links to the records."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup, escape

    from minivllm.report.live import library, packed

    environment = Environment(
        loader=PackageLoader("minivllm.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sig"] = sig
    environment.filters["code"] = lambda text: Markup(
        re.sub("`(.+?)`", r"<code>\1</code>", str(escape(text)))
    )
    environment.filters["foldable"] = lambda name: Markup(str(escape(name)).replace(".", ".<wbr>"))
    environment.filters["themed"] = lambda colour: f"var(--c{colour[1:]})" if colour in ON_DARK else colour
    environment.filters["svg_uri"] = lambda data: (
        "data:image/svg+xml;base64," + base64.b64encode(data).decode()
    )
    title, names = words.heading(material.rows, material.cells)
    live = [[plot.name, [item["item"] for item in plot.live]] for plot in plots.values() if plot.live]
    context: dict[str, Any] = {
        "title": title,
        "names": names,
        "banners": banners(material.cells),
        "verdict": _verdict(material),
        "sections": parts,
        "on_dark": ON_DARK,
        "charts": packed(live) if live else "",
        "library": library() if live else "",
    }
    return environment.get_template("index.html.j2").render(context)


def _verdict(material: Material) -> Verdict:
    """What was asked for is answered first."""
    if material.analysis is not None:
        return worth.verdict(material.analysis, material.cells)
    if material.tuning is not None:
        return tuning.verdict(material.tuning, material.cells)
    if material.searches:
        return capacity.verdict(material.searches, material.cells)
    if ladders := scaling.ladders(material.cells):
        return scaling.verdict(ladders, material.cells)
    return verdict(material.cells)
