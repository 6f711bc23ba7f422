"""The main table, as columns of one definition: for the page, CSV, Markdown and the terminal."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minivllm.report.cells import Cell, gather, like_for_like
from minivllm.report.format import MISSING, sig
from minivllm.report.rows import rows_of

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table


@dataclass(frozen=True)
class Column:
    """A measured column: where it comes from, how it is scaled and named."""

    key: str  # field of the record
    title: str
    unit: str
    scale: float = 1.0
    digits: int = 3
    terminal: bool = False  # also in the terminal's summary and table.md
    bar: bool = False  # drawn as a bar behind the number on the page


COLUMNS = (
    Column("metrics.output_tokens_per_s", "Output", "tok/s", terminal=True, bar=True),
    Column("metrics.ttft_ms.p50", "TTFT p50", "ms", terminal=True),
    Column("metrics.ttft_ms.p99", "TTFT p99", "ms"),
    Column("metrics.itl_ms.p50", "ITL p50", "ms", terminal=True),
    Column("memory.weights", "Weights", "GB", 1e-9, terminal=True),
    Column("memory.kv_pool", "KV pool", "GB", 1e-9),
    Column("memory.device_peak_allocated", "Device peak", "GB", 1e-9),
    Column("memory.host_rss_peak", "Host peak", "GB", 1e-9, terminal=True),
    Column("energy.joules_per_output_token", "Energy", "J/token"),
    Column("roofline.mbu", "MBU", "%", 100.0),
)
# Further fields of table.csv: what a script wants and a person would drown in.
CSV_ONLY = (
    "metrics.total_tokens_per_s",
    "metrics.requests_per_s",
    "metrics.goodput_requests_per_s",
    "metrics.steady.output_tokens_per_s",
    "metrics.duration_s",
    "metrics.num_requests",
    "metrics.ttft_ms.p90",
    "metrics.itl_ms.p90",
    "metrics.itl_ms.p99",
    "metrics.tpot_ms.p50",
    "metrics.e2e_ms.p50",
    "metrics.e2e_ms.p99",
    "metrics.queue_ms.p50",
    "memory.weights_16bit",
    "memory.kv_waste",
    "memory.device_peak_reserved",
    "memory.device_process",
    "energy.joules",
    "energy.mean_watts",
    "cost.per_million_output_tokens",
    "roofline.mfu",
    "cold.load_s",
    "cold.compile_s",
    "cold.first_batch_s",
)


def text(cell: Cell, column: Column) -> str:
    """The cell's figure in the column's unit, or a dash."""
    value = cell.mean(column.key)
    return MISSING if value is None else sig(value * column.scale, column.digits)


def spread_text(cell: Cell, column: Column) -> str:
    """Least and greatest block; empty with fewer than two, or where they read the same."""
    stat = cell.stat(column.key)
    if stat is None or not stat.spread:
        return ""
    low, high = (sig(value * column.scale, column.digits) for value in (stat.low, stat.high))
    return f"{low}–{high}" if low != high else ""


def used_columns(cells: list[Cell]) -> list[Column]:
    """Columns that hold at least one figure; all-empty ones are explained beside the table instead."""
    return [column for column in COLUMNS if any(cell.mean(column.key) is not None for cell in cells)]


def speedup(cell: Cell, base: Cell) -> float | None:
    """Output tokens/s against the baseline's; None where the work or the device is not the same."""
    if not like_for_like(cell, base):
        return None
    mine, theirs = cell.mean(COLUMNS[0].key), base.mean(COLUMNS[0].key)
    return mine / theirs if mine is not None and theirs else None


def csv_text(cells: list[Cell]) -> str:
    """All cells in the records' own units: mean, least and greatest over the ok blocks of every field."""
    keys = [column.key for column in COLUMNS] + list(CSV_ONLY)
    names = list(cells[0].varying) if cells else []
    head = [
        "label",
        "sweep",
        "arm",
        "cell_id",
        *names,
        "status",
        "blocks",
        "blocks_ok",
        "weights_kind",
        "workload_hash",
    ]
    head += ["energy.reason", "error.type", "error.message"]
    for key in keys:
        head += [key, f"{key}.min", f"{key}.max"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    for cell in cells:
        line: list[object] = [
            cell.label,
            cell.sweep,
            cell.arm,
            cell.cell_id,
            *cell.varying.values(),
            cell.status,
        ]
        line += [len(cell.rows), len(cell.ok), cell.first("weights"), cell.first("workload_hash")]
        line.append(cell.first("energy.reason"))
        for key in ("error.type", "error.message"):
            line.append(next((row[key] for row in cell.failed if row.get(key)), None))
        for key in keys:
            stat = cell.stat(key)
            line += [stat.mean, stat.low, stat.high] if stat else [None, None, None]
        writer.writerow(["" if value is None else value for value in line])
    return out.getvalue()


def markdown_text(cells: list[Cell]) -> str:
    """A compact table for a README: a row a cell."""
    columns = [column for column in used_columns(cells) if column.terminal]
    names = list(cells[0].varying) if cells and cells[0].varying else ["cell"]
    compare = len(cells) > 1 and bool(columns)
    head = [*names, "status", "blocks"] + [f"{c.title} ({c.unit})" for c in columns]
    if compare:
        head.insert(len(names) + 3, "× first")
    align = [":--"] * (len(names) + 1) + ["--:"] * (len(head) - len(names) - 1)
    lines = [head, align]
    for cell in cells:
        name = list(cell.varying.values()) if cell.varying else [cell.label]
        figures = [text(cell, column) for column in columns]
        if compare:
            figures.insert(1, sig(speedup(cell, cells[0])))
        lines.append([*name, cell.status_text, f"{len(cell.ok)}/{len(cell.rows)}", *figures])
    return "".join("| " + " | ".join(_escaped(part) for part in line) + " |\n" for line in lines)


def _escaped(part: str) -> str:
    return " ".join(part.replace("|", "\\|").split())


def summary_table(frame: pd.DataFrame) -> Table:
    """The main columns for the terminal, from a frame of `load_records`; a row a cell."""
    from rich.table import Table
    from rich.text import Text

    cells = gather(rows_of(frame))
    columns = [column for column in used_columns(cells) if column.terminal]
    names = list(cells[0].varying) if cells and cells[0].varying else ["cell"]
    table = Table(header_style="bold", show_edge=False, pad_edge=False)
    for title in names:
        # Figures never wrap, so in a narrow terminal names would be squeezed to a letter a line.
        table.add_column(title, overflow="fold", min_width=max(10, len(title)))
    table.add_column("status", min_width=7)
    for index, column in enumerate(columns):
        table.add_column(f"{column.title}\n{column.unit}", justify="right", no_wrap=True)
        if index == 0 and len(cells) > 1:
            table.add_column("× first\n", justify="right", no_wrap=True)
    for cell in cells:
        name = list(cell.varying.values()) if cell.varying else [cell.label]
        status = Text(cell.status_text, style="green" if not cell.failed else "yellow" if cell.ok else "red")
        figures = [text(cell, column) for column in columns]
        if len(cells) > 1 and columns:
            figures.insert(1, sig(speedup(cell, cells[0])))
        table.add_row(*(Text(part) for part in name), status, *(Text(figure) for figure in figures))
    return table
