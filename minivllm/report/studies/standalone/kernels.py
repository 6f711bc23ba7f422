"""A record of task=kernels for people: a table, what it comes to, and each kernel under the
measured roofline."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from minivllm import redaction
from minivllm.analysis.format import MISSING, count, sig
from minivllm.analysis.rows import Row
from minivllm.bench.records.reading import flatten
from minivllm.bench.records.record import KERNELS_VERSION
from minivllm.bench.records.storage import KERNELS
from minivllm.errors import BadInput
from minivllm.platform.untrusted import read_object
from minivllm.report.figures.chart import Chart, Panel, Series
from minivllm.report.figures.opening import ForestRow, forest
from minivllm.report.figures.palette import INK, MARKERS, PALETTE
from minivllm.report.figures.render import Described, Plot
from minivllm.report.html import Conclusion, make_folder
from minivllm.report.inputs import ReportInputs
from minivllm.report.provenance import facts
from minivllm.report.sections import MAX_ROWS
from minivllm.report.spreadsheet import csv_table, markdown_table, markdown_text
from minivllm.report.studies.base import Study
from minivllm.report.studies.standalone.kernel_findings import (
    answer,
    case_name,
    findings,
    shares_by_kernel,
)
from minivllm.report.studies.standalone.page import write_alone
from minivllm.report.terminal import bare_table

if TYPE_CHECKING:
    from rich.table import Table

MICRO, GIGA = 1e6, 1e-9
HEADINGS = (
    *(
        "kernel",
        "on",
        "rows",
        "ours",
        "reference",
        "time (µs)",
        "reference (µs)",
        "× reference",
        "floor (µs)",
    ),
    *("% of floor", "bound", "inputs from", "difference", "output"),
)
ESTIMATED = HEADINGS[5:8]
BELOW = {"ours": "reference", "bound": "inputs from"}  # columns of the page that stand below others
LEFT = {"kernel", "on", "ours", "reference", "bound", "inputs from", "output"}
CSV_FIELDS = (
    *(
        "part_of",
        "kernel",
        "part",
        "rows",
        "implementation",
        "reference",
        "bytes",
        "operations",
        "copies",
    ),
    *("seconds", "reference_seconds", "speedup", "floor_s", "bound", "of_floor", "from_memory"),
    *("difference", "tolerance", "ok", "error"),
)
ESTIMATES = ("seconds", "reference_seconds", "speedup")  # each a median with an interval


def read(folder: Path) -> dict[str, Any]:
    """The record of a run of task=kernels.

    Raises:
        BadInput: it cannot be read, or is none.
    """
    path = folder / KERNELS
    record = read_object(path, str(path))
    if record.get("kind") != "kernels":
        raise BadInput(f"{path} is no record of task=kernels")
    if record.get("schema_version") != KERNELS_VERSION:
        raise BadInput(
            f"{path} has schema_version {record.get('schema_version')!r:.20}, and "
            f"{KERNELS_VERSION} is read here"
        )
    rows = record.get("rows")
    parts = [
        *(record.get(key) for key in ("config", "limits", "provenance")),
        *(rows if isinstance(rows, list) else [None]),
    ]
    if not all(isinstance(part, dict) for part in parts):
        raise BadInput(f"{path} is damaged: it needs config, limits, provenance and a list of rows")
    return redaction.clean({**record, "config": redaction.shown(record["config"])})


class KernelsStudy(Study[dict[str, Any]]):
    """How far each kernel is from the measured limit; it finds nothing in records of requests."""

    name = "kernels"
    title = "How far is each kernel from the limit?"
    template = "kernels"
    figure_names = ("kernels",)
    file_names = ("kernels.md", "kernels.csv")

    def find(self, inputs: ReportInputs) -> None:
        return None

    def question(self, result: dict[str, Any], inputs: ReportInputs) -> str:
        """Names the model."""
        return (
            f"How fast are the kernels of {(result['config'].get('choices') or {}).get('model')}?"
        )

    def statements(self, result: dict[str, Any], inputs: ReportInputs) -> list[str]:
        return findings(result)

    def tables(self, result: dict[str, Any], inputs: ReportInputs) -> list[Table]:
        return [table(result)]

    def files(self, result: dict[str, Any], inputs: ReportInputs) -> dict[str, str]:
        """kernels.md and kernels.csv."""
        return {"kernels.md": markdown(result), "kernels.csv": csv_text(result)}

    def conclusion(self, result: dict[str, Any], inputs: ReportInputs) -> Conclusion:
        """How near each kernel comes to the limit."""
        lines = findings(result)
        return Conclusion(answer(result) or lines.pop(0), lines)

    def picture(self, result: dict[str, Any], inputs: ReportInputs) -> Chart | None:
        """A row a kernel: the median of its shares of the limit, and from the least to the most."""
        rows = [
            ForestRow(kernel, median(shares), min(shares), max(shares))
            for kernel, shares in shares_by_kernel(result).items()
        ]
        caption = "The median over the cases of a kernel; a line: from the least to the greatest."
        return forest(self.title, rows, "% of the measured limit", caption, even=100.0)

    def figures(self, result: dict[str, Any], inputs: ReportInputs) -> list[Described | None]:
        return [figure(result)]

    def section(
        self, result: dict[str, Any], inputs: ReportInputs, plots: list[Plot], out_dir: Path
    ) -> dict[str, Any]:
        """The section as plain data for its template."""
        shown = [heading for heading in HEADINGS if heading not in BELOW.values()]
        return {
            "headings": [(heading, BELOW.get(heading, "")) for heading in shown],
            "left": LEFT,
            "rows": [_entries(row, shown) for row in result["rows"][:MAX_ROWS]],
            "plots": plots,
        }


def write(record: dict[str, Any], out_dir: Path) -> Path:
    """index.html, kernels.md, kernels.csv and kernels.png below a folder, which is returned.

    Raises:
        BadInput: nothing can be written there.
    """
    make_folder(out_dir)  # before the work
    row = flatten({key: record.get(key) for key in ("provenance", "schema_version")})
    limits = [
        ("Measured limits", _limits(record)),
        *(("Note", str(note)) for note in _notes(record)),
    ]
    subject = "What was measured?", [*limits, *facts([row])]
    write_alone(
        KernelsStudy(), record, ReportInputs([row]), out_dir, names=_title(record), subject=subject
    )
    return out_dir


def _entries(row: Row, shown: list[str]) -> list[tuple[str, str]]:
    """What the page's table has in a row, and what stands below it: of an estimate its interval, of
    others see BELOW."""
    texts = dict(zip(HEADINGS, cells(row), strict=True))
    entries = []
    for heading in shown:
        text, _, ends = (
            texts[heading].partition(" (") if heading in ESTIMATED else (texts[heading], "", "")
        )
        entries.append(
            (text, texts[BELOW[heading]] if heading in BELOW else ends.removesuffix(")"))
        )
    return entries


def _notes(record: dict[str, Any]) -> list[Any]:
    return list(record["limits"].get("notes", ()))


def cells(row: Row) -> list[str]:
    """One row of the table, under HEADINGS."""
    if "error" in row:
        return [row["kernel"], *[MISSING] * (len(HEADINGS) - 2), f"failed: {row['error']}"]
    floor, share, difference = row["floor_s"], row["of_floor"], row["difference"]
    if row["reference"] is None:
        verdict = MISSING
    else:
        verdict = "WRONG" if not row["ok"] else "close" if difference else "equal"
    return [
        row["kernel"],
        row["part"],
        str(row["rows"]),
        row["implementation"],
        row["reference"] or MISSING,
        estimate(row["seconds"], MICRO),
        estimate(row["reference_seconds"], MICRO),
        estimate(row["speedup"]),
        sig(None if floor is None else floor * MICRO),
        sig(None if share is None else 100 * share),
        row["bound"] or MISSING,
        "memory" if row["from_memory"] else "cache",
        MISSING if difference is None else sig(difference, 2),
        verdict,
    ]


def estimate(value: dict[str, Any] | None, scale: float = 1.0) -> str:
    """A median, with its interval where there is one."""
    if value is None:
        return MISSING
    text = sig(value["median"] * scale)
    if value["low"] is None:
        return text
    return f"{text} ({sig(value['low'] * scale)} to {sig(value['high'] * scale)})"


def _group(row: Row) -> str:
    """What is drawn in one style: products of one format, or one part of the record."""
    return str(
        row["kernel"].removeprefix("linear ")
        if row["kernel"].startswith("linear ")
        else row["part_of"]
    )


def table(record: dict[str, Any]) -> Table:
    """The terminal's: what a line has room for. Intervals are in the files."""
    from rich.markup import escape
    from rich.table import Column

    headings = ("kernel", "on", "rows", "µs", "ref. µs", "×", "% limit", "bound", "output")
    rich_table = bare_table(
        *(
            Column(
                heading,
                justify="left" if heading in LEFT else "right",
                overflow="fold",
                min_width=5,
            )
            for heading in headings
        )
    )
    rich_table.title = _title(record)
    rich_table.caption = "medians; % of the longer of bytes / bandwidth and operations / rate"
    for row in record["rows"]:
        texts = dict(zip(HEADINGS, cells(row), strict=True))
        if "error" not in row:
            medians = ("seconds", "reference_seconds", "speedup")
            texts.update(
                (heading, sig(row[key] and row[key]["median"] * scale))
                for heading, key, scale in zip(
                    HEADINGS[5:8], medians, (MICRO, MICRO, 1.0), strict=True
                )
            )
        shown = (*HEADINGS[:3], *HEADINGS[5:8], "% of floor", "bound", "output")
        rich_table.add_row(*(escape(texts[heading]) for heading in shown))
    return rich_table


def _title(record: dict[str, Any]) -> str:
    device = (record["provenance"].get("device") or {}).get("name")
    model = (record["config"].get("choices") or {}).get("model")
    return f"kernels on {device}, shapes of {model}"


def markdown(record: dict[str, Any]) -> str:
    """Limits, what the rows come to, and the table."""
    lines = [f"# {markdown_text(_title(record))}", ""]
    lines += [
        f"Measured limits: {_limits(record)} Medians with 95 % intervals.",
        "",
        *(f"* {markdown_text(line)}" for line in findings(record)),
        *(f"* note: {markdown_text(str(note))}" for note in _notes(record)),
        "",
        markdown_table((), HEADINGS, map(cells, record["rows"]), LEFT),
    ]
    return "\n".join(lines)


def _limits(record: dict[str, Any]) -> str:
    limits = record["limits"]
    bandwidth, rate = limits.get("bandwidth_bytes_per_s"), limits.get("matrix_flops_per_s")
    narrow = limits.get("int8_ops_per_s")
    beside = f" and {sig(narrow * GIGA)} GOP/s in int8" if narrow else ""
    return (
        f"{sig(bandwidth and bandwidth * GIGA)} GB/s, {sig(rate and rate * GIGA)} GFLOP/s in "
        f"{limits.get('matrix_dtype')}{beside}. "
        f"Last cache: {sig(limits['cache_bytes'] / (1 << 20))} MiB."
    )


def csv_text(record: dict[str, Any]) -> str:
    """All numbers, in SI units; an estimate is three columns."""
    columns = [
        name
        for field in CSV_FIELDS
        for name in (
            [f"{field}.{end}" for end in ("median", "low", "high")]
            if field in ESTIMATES
            else [field]
        )
    ]
    rows = []
    for row in record["rows"]:
        flat = dict(row)
        for field in ESTIMATES:
            flat.update({f"{field}.{key}": value for key, value in (row.get(field) or {}).items()})
        rows.append([flat.get(name) for name in columns])
    return csv_table(columns, rows)


def figure(record: dict[str, Any]) -> Chart | None:
    """Share of the limit against operations a byte, the reference hollow; None where no limit is
    known.

    What does no matrix product has no place on that axis and stands at its left end.
    """
    rows = [row for row in record["rows"] if row.get("of_floor")]
    if not rows:
        return None
    intensities = {id(row): row["operations"] / row["bytes"] for row in rows}
    known = [value for value in intensities.values() if value] or [1.0]
    left = min(known) / 4
    series = [Series("limit", INK, [left, max(known)], [100.0, 100.0], "line", dashed=True)]
    for i, group in enumerate(dict.fromkeys(map(_group, rows))):
        members = [row for row in rows if _group(row) == group]
        colour, marker = PALETTE[i % len(PALETTE)], MARKERS[i // len(PALETTE) % len(MARKERS)]
        xs = [intensities[id(row)] or left for row in members]
        ys = [100 * row["of_floor"] for row in members]
        names = [
            f"{case_name(row)}: {sig(y)} % of the limit" for row, y in zip(members, ys, strict=True)
        ]
        series.append(Series(group, colour, xs, ys, marker=marker, names=names))
        beside = [(x, row) for x, row in zip(xs, members, strict=True) if row["reference_seconds"]]
        if beside:
            shares = [
                100 * row["floor_s"] / row["reference_seconds"]["median"] for _, row in beside
            ]
            series.append(
                Series("", colour, [x for x, _ in beside], shares, marker=marker, hollow=True)
            )
    title = "Full: this project's kernels; hollow: the reference"
    panel = Panel(
        title, "operations a byte (log scale)", "% of the limit (log scale)", series, True, True
    )
    alt = (
        f"Share of the measured limit against operations a byte, {count(len(rows), 'case')}. "
        + " ".join(findings(record)[:1])
    )
    caption = (
        "Full: this project's kernels; hollow: the reference. The limit of a case is the longer "
        "of bytes / bandwidth and operations / matrix rate. Steps without a matrix product "
        "stand at the left end."
    )
    return Chart("kernels", "How far is each kernel from the limit?", alt, caption, [("", [panel])])
