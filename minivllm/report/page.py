"""The report: one self-contained page, its figures, and the table as CSV and Markdown."""

from __future__ import annotations

from pathlib import Path

from minivllm.analysis.cells import Cell
from minivllm.bench.records.reading import uncollected
from minivllm.report import results
from minivllm.report import sections as words
from minivllm.report.banner import banners
from minivllm.report.figures.distributions import distributions
from minivllm.report.figures.looks import Looks
from minivllm.report.figures.parts import breakdown, memory
from minivllm.report.figures.plots import latency, throughput
from minivllm.report.figures.roofline import roofline
from minivllm.report.figures.scatter import trade_off
from minivllm.report.figures.style import Plot
from minivllm.report.figures.timelines import timeline_plots
from minivllm.report.html import Front, Section, page
from minivllm.report.material import Material, read
from minivllm.report.studies import ablation, capacity, precision, scaling, tuning
from minivllm.report.studies.simulation import simulation_check
from minivllm.report.tables import csv_text, markdown_text
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
    with uncollected():  # of thousands of records, which are all kept
        return _write(material, out_dir)


def _write(material: Material, out_dir: Path) -> Path:
    cells = material.cells
    ladders = scaling.ladders(cells)
    drawn = [
        *ablation.figures(material.analysis),
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
    write_bytes(out_dir / "table.csv", csv_text(cells, material.columns).encode())
    write_bytes(out_dir / "table.md", markdown_text(cells, material.columns).encode())
    optional = {
        "precision.md": precision.markdown_text(cells),
        "effects.md": ablation.markdown(material.analysis),
        "scaling.md": scaling.markdown_text(ladders),
        "records.csv": words.records_csv(cells),
    }
    for name, text in optional.items():
        if text:
            write_bytes(out_dir / name, text.encode())
        else:
            (out_dir / name).unlink(missing_ok=True)
    index = out_dir / "index.html"
    title, names = words.heading(material.rows, cells, _study(material))
    front = Front(title, names, _verdict(material), words.newest(material.rows), banners(cells))
    write_bytes(index, page(front, sections(material, plots, out_dir), plots).encode())
    return index


def figures(cells: list[Cell]) -> list[Plot]:
    """Every figure for which the records hold data."""
    looks = Looks(cells)
    single = (precision.pareto, trade_off, distributions, roofline, throughput, latency, memory, breakdown)
    found = [plot for draw in single if (plot := draw(cells, looks)) is not None]
    return found + timeline_plots(cells, looks)


def sections(material: Material, plots: dict[str, Plot], out_dir: Path) -> list[Section]:
    """The parts of the page in reading order."""
    from minivllm.bench.metrics.glossary import glossary

    rows, cells = material.rows, material.cells

    def some(*names: str) -> list[Plot]:
        return [plots[name] for name in names if name in plots]

    failures, unshown = words.failures(cells, out_dir)
    remarks = words.validity(cells)
    # Of more than the page has room for it has those that did nothing.
    knobs = sorted(material.knobs, key=lambda item: item.verdict != "not live")
    each = "each" if len(cells) > 1 else "it"
    return [
        Section(
            "worth",
            "What is each optimisation worth?",
            ablation.section(material.analysis, cells, some("forest", "waterfall"), out_dir),
        ),
        Section(
            "tuning",
            "What did the search find?",
            tuning.section(material.tuning, some("tuning", "tuning_values"), out_dir),
        ),
        Section(
            "capacity",
            "What rate can it serve?",
            capacity.section(material.searches, some("capacity")),
        ),
        Section(
            "scaling",
            "How does the cost grow with the work?",
            scaling.section(scaling.ladders(cells), some("scaling")),
        ),
        Section(
            "asked",
            "What was measured?",
            {"facts": words.asked(rows, cells), "commands": words.commands(rows)},
        ),
        Section(
            "results", f"Results: how fast is {each}?", results.section(cells, out_dir, material.columns)
        ),
        Section(
            "precision", "What does each cost in quality?", precision.section(cells, plots.get("precision"))
        ),
        Section("simulation", "How well does the simulation predict?", simulation_check(cells)),
        Section(
            "speed",
            "What is the price of speed?",
            some("latency_throughput", "throughput", "latency", "distributions"),
            "figures",
        ),
        Section("time", "What happened over time?", some("steps", "telemetry"), "figures"),
        Section(
            "limits",
            "Where does the time go, and what is the limit?",
            some("breakdown", "roofline"),
            "figures",
        ),
        Section("memory", f"How much memory does {each} take?", some("memory"), "figures"),
        Section("failures", "What failed?", {"failures": failures, "unshown": unshown}),
        Section(
            "validity",
            "Validity: can the figures be trusted?",
            {"remarks": remarks, "unreadable": material.unreadable, "damaged": material.damaged},
        ),
        Section(
            "liveness",
            "Did each knob do its work?",
            {
                "knobs": knobs[: words.MAX_ROWS],
                "baseline": cells[0].label,
                "unshown": words.unshown(knobs, "the records"),
            }
            if knobs
            else None,
        ),
        Section("provenance", "Where do the figures come from?", words.provenance(rows, cells, out_dir)),
        Section("glossary", "Glossary: what does each metric mean?", glossary()),
    ]


def _study(material: Material) -> str:
    """The question of a page that is no plain sweep's, see `heading`."""
    if material.analysis is not None:
        return ""
    if material.tuning is not None:
        return "Which {knobs} are best for {model}?" if material.cells[0].varying else ""
    if material.searches:
        return "What rate of requests can {model} serve?"
    return "How does the cost of {model} grow with the work?" if scaling.ladders(material.cells) else ""


def _verdict(material: Material) -> Verdict:
    """What was asked for is answered first."""
    if material.analysis is not None:
        return ablation.verdict(material.analysis, material.cells)
    if material.tuning is not None:
        return tuning.verdict(material.tuning, material.cells)
    if material.searches:
        return capacity.verdict(material.searches, material.cells)
    if ladders := scaling.ladders(material.cells):
        return scaling.verdict(ladders, material.cells)
    return verdict(material.cells, material.knobs)
