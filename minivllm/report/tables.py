"""The main table, as columns of one definition: for the page, CSV, Markdown and the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm.analysis.cell import Cell, Summary, like_for_like
from minivllm.analysis.cells import name_columns, names_of
from minivllm.analysis.format import MISSING, sig
from minivllm.analysis.interleaving import apart
from minivllm.analysis.ranking import keeps_up
from minivllm.analysis.rows import number
from minivllm.bench.metrics.glossary import unit_of
from minivllm.report.spreadsheet import csv_table, markdown_table
from minivllm.report.terminal import rich_table

if TYPE_CHECKING:
    from rich.table import Table

MAX_LINES = 1000  # of table.md, which is for a README; table.csv has all
DRIFT = (
    "The cells were measured one after another, so that what changed on the machine in between is "
    "in *× first*."
)
STYLES = {"ok": "green", "mixed": "yellow", "failed": "red"}  # of a status in the terminal


# How a table shows a unit of the record, and by what it multiplies for that.
SHOWN = {
    "bytes": ("GB", 1e-9),
    "share": ("%", 100.0),
    "tokens/s": ("tok/s", 1.0),
    "nats/token": ("nats", 1.0),
    "jobs/h": ("/h", 1.0),
    "bits/byte": ("", 1.0),
    "1": ("", 1.0),
}


@dataclass(frozen=True)
class Column:
    """A measured column: where it comes from, and how it is named. Its unit is the record's."""

    key: str  # field of the record
    title: str
    unit_here: str | None = None  # in place of the record's, whose numbers are then as recorded
    digits: int = 3
    terminal: bool = False  # also in the terminal's summary and table.md
    bar: bool = False  # drawn as a bar behind the number on the page
    per: str | None = None  # field that the key is divided by; a percentage is shown
    whole: bool = False  # a count, written without decimals

    @property
    def unit(self) -> str:
        """Unit of the numbers that are shown."""
        recorded = unit_of(self.key)
        return SHOWN.get(recorded, (recorded,))[0] if self.unit_here is None else self.unit_here

    @property
    def scale(self) -> float:
        """What recorded numbers are multiplied by."""
        if self.per or self.unit_here is None:
            return 100.0 if self.per else SHOWN.get(unit_of(self.key), ("", 1.0))[1]
        return 1.0

    @property
    def heading(self) -> str:
        """Title and unit in one line."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def summary(self, cell: Cell) -> Summary | None:
        """Mean and range over the cell's ok blocks, in the record's unit; None where no block has
        it."""
        stat = cell.summary(self.key)
        if stat is None or self.per is None:
            return stat
        whole = cell.mean(self.per)
        return (
            Summary(stat.mean / whole, stat.low / whole, stat.high / whole, stat.n)
            if whole
            else None
        )

    def mean(self, cell: Cell) -> float | None:
        """Mean over the cell's ok blocks."""
        stat = self.summary(cell)
        return stat.mean if stat else None


MBU = Column("roofline.mbu", "MBU")
COLUMNS = (
    Column("metrics.output_tokens_per_s", "Output", terminal=True, bar=True),
    Column("metrics.ttft_ms.p50", "TTFT p50", terminal=True),
    Column("metrics.ttft_ms.p99", "TTFT p99"),
    Column("metrics.itl_ms.p50", "ITL p50", terminal=True),
    Column("memory.weights", "Weights", terminal=True),
    Column("memory.kv_pool", "KV pool"),
    Column("memory.device_peak_allocated", "Device peak"),
    Column("memory.host_rss_peak", "Host peak", terminal=True),
    Column("energy.joules_per_output_token", "Energy"),
    MBU,
    Column("roofline.share", "Roofline"),
)
# Shown where a price or an objective was set, a model thinks, or there are several devices.
COST = Column("cost.per_million_output_tokens", "Cost", "per million tokens", terminal=True)
WHERE_ASKED = (
    Column("metrics.attainment.all", "SLO met", terminal=True),
    Column("metrics.goodput_tokens_per_s", "Good output"),
    Column("metrics.ttfo_ms.p50", "TTFO p50"),
    Column("devices.output_tokens_per_s", "Output per device"),
    COST,
)
# Shown where cells differ in a knob that changes nothing else.
OF_KNOBS = {"model.packed_cache": Column("cold.load_s", "Load", terminal=True)}
WINDOW = Column("metrics.duration_s", "Window")  # of the page
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
    "quality.perplexity",
    "quality.bits_per_byte",
    "quality.kl_mean",
    "quality.kl_p99",
    "quality.top1_agreement",
    "quality.prefix_mean",
    "quality.prefix_min",
    "cold.load_s",
    "cold.compile_s",
    "cold.first_batch_s",
)


def text(cell: Cell, column: Column) -> str:
    """The cell's figure in the column's unit, or a dash."""
    value = column.mean(cell)
    if value is None:
        return MISSING
    return f"{value:,.0f}" if column.whole else sig(value * column.scale, column.digits)


def spread_text(cell: Cell, column: Column) -> str:
    """Least and greatest block; empty with fewer than two, or where they read the same."""
    stat = column.summary(cell)
    if stat is None or not stat.spread:
        return ""
    low, high = (sig(value * column.scale, column.digits) for value in (stat.low, stat.high))
    return f"{low}–{high}" if low != high else ""


def entries(cell: Cell, columns: Sequence[Column]) -> list[dict[str, Any]]:
    """A cell's figures for a table of the page: as written, as sorted, and their range over
    blocks."""
    return [
        {"text": text(cell, column), "sort": column.mean(cell), "spread": spread_text(cell, column)}
        for column in columns
    ]


def page_row(
    cell: Cell, names: list[str], columns: Sequence[Column], href: str | None
) -> dict[str, Any]:
    """A cell's row of a table of the page, whose figures lead to their records."""
    return {
        "names": names_of(cell, names),
        "status": cell.marked_status,
        "tone": cell.tone,
        "href": href,
        "figures": entries(cell, columns),
    }


def lines_of(
    cells: Sequence[Cell],
    names: list[str],
    columns: Sequence[Column],
    status: Callable[[Cell], str] = lambda cell: cell.marked_status,
) -> list[list[str]]:
    """A line for each cell: its names, its status, its figures."""
    return [
        [*names_of(cell, names), status(cell), *(text(cell, column) for column in columns)]
        for cell in cells
    ]


def terminal_table(
    names: list[str],
    columns: Sequence[Column],
    lines: Iterable[Sequence[str]],
    further: Sequence[str] = (),
) -> Table:
    """Lines of cells for the terminal; `further` are headings after those of the columns."""
    from rich.markup import escape

    heads = [(column.title, column.unit) for column in columns]
    table = rich_table(names, heads + [(head, "") for head in further])
    for line in lines:
        table.add_row(*map(escape, line))
    return table


def filled_columns(cells: Sequence[Cell], columns: Sequence[Column]) -> list[Column]:
    """Columns of which some cell has a figure."""
    return [column for column in columns if any(column.mean(cell) is not None for cell in cells)]


def main_columns(cells: list[Cell], columns: Sequence[Column] = COLUMNS) -> list[Column]:
    """Columns of the main table that hold at least one figure, with those of what was set or
    varied; all-empty ones are explained beside the table instead."""
    rows = [row for cell in cells for row in cell.rows]
    of_knobs = [column for knob, column in OF_KNOBS.items() if cells and knob in cells[0].varying]
    return [
        column
        for column in (*columns, *WHERE_ASKED, *of_knobs)
        # The first condition alone decides of most columns, and costs little.
        if any(row.get(column.key) is not None for row in rows)
        and any(cell.mean(column.key) is not None for cell in cells)
    ]


def searched(cells: list[Cell]) -> bool:
    """Whether these are the trials of one search."""
    # Older records do not say which way was better.
    goal = [f"config.sweep.{part}" for part in ("objective", "direction")]
    return len({cell.sweep for cell in cells}) == 1 and any(
        all(map(cell.first, goal)) for cell in cells
    )


def speedups(cells: list[Cell]) -> list[float | None]:
    """Output tokens/s of each cell against the first's; None where the two are not like for like,
    or the load sets it.

    Empty where no other cell can be held against the first, or that is no baseline but a search's
    first guess: such a column is left out, on the page as in the terminal.
    """
    if searched(cells):
        return []
    if not cells or keeps_up(cells[0]):
        return []
    ratios = [_speedup(cell, cells[0]) for cell in cells]
    return ratios if any(ratio is not None for ratio in ratios[1:]) else []


def _speedup(cell: Cell, base: Cell) -> float | None:
    if not like_for_like(cell, base) or keeps_up(cell):
        return None
    mine, theirs = cell.mean(COLUMNS[0].key), base.mean(COLUMNS[0].key)
    return mine / theirs if mine is not None and theirs else None


def drifted(cells: Sequence[Cell], ratios: Sequence[float | None]) -> bool:
    """Whether any of the `speedups` is of cells that did not take turns."""
    known = (cell for cell, ratio in zip(cells, ratios, strict=False) if ratio is not None)
    return any(apart(cell, cells[0]) for cell in known if cell is not cells[0])


def csv_text(cells: list[Cell], columns: Sequence[Column] = COLUMNS) -> str:
    """All cells in the records' own units: mean, least and greatest over the ok blocks of every
    field."""
    shown = (*columns, *main_columns(cells, ()))
    keys = list(dict.fromkeys([*(c.key for c in COLUMNS), *CSV_ONLY, *(c.key for c in shown)]))
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
    rows = []
    for cell in cells:
        line: list[object] = [
            cell.label,
            cell.sweep,
            cell.arm,
            cell.cell_id,
            *cell.varying.values(),
            cell.status,
        ]
        line += [cell.tried, len(cell.timed), cell.first("weights"), cell.first("workload_hash")]
        line.append(cell.first("energy.reason"))
        for key in ("error.type", "error.message"):
            line.append(next((row[key] for row in cell.failed if row.get(key)), None))
        if len(cell.ok) == 1:  # then the three are the same
            line += [value for key in keys for value in [number(cell.ok[0].get(key))] * 3]
        else:
            stats = [cell.summary(key) for key in keys]
            line += [value for stat in stats for value in (stat[:3] if stat else [None] * 3)]
        rows.append(line)
    return csv_table(head, rows)


def markdown_text(cells: list[Cell], columns: Sequence[Column] = COLUMNS) -> str:
    """A compact table for a README: a row a cell."""
    columns = [column for column in main_columns(cells, columns) if column.terminal]
    names = name_columns(cells)
    ratios = speedups(cells)
    head = ["blocks", *(column.heading for column in columns)]
    if ratios:
        head.insert(2, "× first")
    lines = []
    for index, cell in enumerate(cells[:MAX_LINES]):
        figures = [text(cell, column) for column in columns]
        if ratios:
            figures.insert(1, sig(ratios[index]))
        lines.append([*names_of(cell, names), cell.marked_status, cell.blocks, *figures])
    rest = len(cells) - len(lines)
    more = f"\n{rest:,} further cells are in table.csv.\n" if rest else ""
    more += f"\n{DRIFT}\n" if drifted(cells, ratios) else ""
    return markdown_table([*names, "status"], head, lines) + more


def summary_table(cells: list[Cell], columns: Sequence[Column] = COLUMNS) -> Table:
    """The main columns for the terminal; a row a cell."""
    from rich.text import Text

    columns = [column for column in main_columns(cells, columns) if column.terminal]
    names = name_columns(cells)
    ratios = speedups(cells)
    heads = [(column.title, column.unit) for column in columns]
    if ratios:
        heads.insert(1, ("× first", ""))
    table = rich_table(names, heads)
    for index, cell in enumerate(cells):
        status = Text(cell.marked_status, style=STYLES[cell.tone])
        figures = [text(cell, column) for column in columns]
        if ratios:
            figures.insert(1, sig(ratios[index]))
        table.add_row(
            *(Text(part) for part in names_of(cell, names)),
            status,
            *(Text(figure) for figure in figures),
        )
    return table
