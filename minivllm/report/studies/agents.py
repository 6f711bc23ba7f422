"""What jobs of agents take, and what prefix caches of several sizes give them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minivllm.analysis.cell import Cell, like_for_like
from minivllm.analysis.cells import name_columns, names_of
from minivllm.analysis.format import MISSING, count, interval, ratio, sig
from minivllm.analysis.interleaving import apart, caveat, interval_text, relative
from minivllm.analysis.rows import number
from minivllm.analysis.statistics import Estimate
from minivllm.report.figures.chart import Chart, Panel, Series
from minivllm.report.figures.opening import ForestRow, LoadLine, LoadPoint, forest, over_loads
from minivllm.report.figures.palette import FAINT, PALETTE, SLATE
from minivllm.report.figures.render import Described
from minivllm.report.html import Conclusion
from minivllm.report.inputs import ReportInputs
from minivllm.report.sections import MAX_ROWS
from minivllm.report.spreadsheet import markdown_table
from minivllm.report.studies.base import PageTable, Study
from minivllm.report.tables import Column, filled_columns, terminal_table, text
from minivllm.report.verdict import remarks

if TYPE_CHECKING:
    from rich.table import Table

BLOCKS, BLOCK_SIZE = "config.cache.num_blocks", "config.cache.block_size"
HIT, OPTIMAL, LIVE = "jobs.hit_rate", "jobs.optimal_hit_rate", "jobs.live_tokens"
LATENCY = "jobs.latency_s.mean"
POINT = 0.01  # of the hit rate that a cache may lose and still be large enough
COLUMNS = (
    Column("jobs.num_jobs", "Jobs", whole=True),
    Column(LATENCY, "Job latency", terminal=True),
    Column("jobs.jobs_per_hour", "Jobs", terminal=True),
    Column("jobs.jobs_per_hour_per_user", "Jobs of a user"),
    Column(HIT, "Hit rate", terminal=True),
    Column(OPTIMAL, "Optimal", terminal=True),
    Column(LIVE, "Live", whole=True, terminal=True),
    Column("jobs.client_lag_ms.mean", "Client lag"),
    Column("jobs.joules_per_job", "Energy", "J/job", terminal=True),
    Column("jobs.cost_per_job", "Cost", "per job", terminal=True),
    Column("jobs.token_cost_per_job", "Cost by tokens", "per job", terminal=True),
)

TERMINAL = tuple(column for column in COLUMNS if column.terminal)


@dataclass(frozen=True)
class CacheSizes:
    """Cells that differ in the size of their cache alone, the smallest first."""

    name: str  # what tells it from other ladders; "" where there is one
    cells: tuple[Cell, ...]

    @property
    def best(self) -> float:
        """The hit rate of the best of them."""
        return max(cell.mean(HIT) or 0.0 for cell in self.cells)

    def loss(self, cell: Cell) -> float:
        """By how much a cell's hit rate is below that of the best."""
        return self.best - (cell.mean(HIT) or 0.0)

    def cliff(self) -> tuple[Cell | None, Cell | None]:
        """The smallest cache from which on all lose no more than a point, and the largest that
        loses more."""
        reached = None
        for cell in reversed(self.cells):
            if self.loss(cell) > POINT:
                return reached, cell
            reached = cell
        return reached, None


class AgentsStudy(Study[list[Cell]]):
    """What agents' jobs take; it finds the cells whose workload has sessions."""

    name = "agents"
    title = "What do the agents' jobs take, and what does the prefix cache give them?"
    page_title = "What do agents' jobs take on {model}?"
    figure_names = ("agents",)
    file_names = ("agents.md",)

    def find(self, inputs: ReportInputs) -> list[Cell] | None:
        """Cells whose records tell of jobs."""
        return [cell for cell in inputs.cells if cell.mean("jobs.sessions") is not None] or None

    def leads_page(self, result: list[Cell], inputs: ReportInputs) -> bool:
        """Where it has something to say."""
        return bool(self.statements(result, inputs))

    def conclusion(self, result: list[Cell], inputs: ReportInputs) -> Conclusion:
        """The first statement, and what has to be known of the records."""
        headline, *others = self.statements(result, inputs)
        return Conclusion(headline, [*others, *remarks(inputs.cells, inputs.knobs)])

    def picture(self, result: list[Cell], inputs: ReportInputs) -> Chart | None:
        """The hit rate by the size of the cache, or what a job takes in each cell."""
        found = ladders(result)
        lines = [
            LoadLine(
                ladder.name,
                PALETTE[index % len(PALETTE)],
                [
                    LoadPoint(float(cache_tokens(cell) or 0), 100 * (cell.mean(HIT) or 0.0))
                    for cell in ladder.cells
                ],
            )
            for index, ladder in enumerate(found)
        ]
        if lines and not engines(result):
            label = "tokens that the cache holds"
            caption = "Share of the prompt tokens that the prefix cache had."
            panels = [("", "hit rate, %", lines)]
            return over_loads("Where is the cache too small?", panels, label, caption)
        times = [(cell, stat) for cell in result if (stat := cell.summary(LATENCY))]
        rows = [ForestRow(cell.label, stat.mean, *stat.ends()) for cell, stat in times]
        return forest(
            "How long does a job take?",
            rows if len(rows) > 1 else [],
            "seconds a job",
            "Means over jobs.",
            span="least and greatest block",
        )

    def statements(self, result: list[Cell], inputs: ReportInputs) -> list[str]:
        """A sentence for a lone cell; of several how engines differ, and where the cliff is."""
        if len(inputs.cells) == 1:
            return [sentence(result[0])]
        return [*engines(result), *cliffs(ladders(result))]

    def tables(self, result: list[Cell], inputs: ReportInputs) -> list[Table]:
        """A row a cell, where there are several."""
        if len(inputs.cells) == 1:
            return []
        columns, names = filled_columns(result, TERMINAL), name_columns(result)
        rows = _rows(result, names, columns, True)
        return [terminal_table(names, columns, rows, _compared_heads(result))]

    def files(self, result: list[Cell], inputs: ReportInputs) -> dict[str, str]:
        """agents.md: the table, for a README."""
        columns, names = filled_columns(result, TERMINAL), name_columns(result)
        heads = [*(column.heading for column in columns), *_compared_heads(result)]
        table = markdown_table([*names, "status"], heads, _rows(result, names, columns, True))
        return {"agents.md": table}

    def figures(self, result: list[Cell], inputs: ReportInputs) -> Iterable[Described | None]:
        """The hit rate by the size of the cache."""
        return [figure(ladders(result))]

    def page_tables(self, result: list[Cell], inputs: ReportInputs) -> list[PageTable]:
        """A row a cell."""
        columns, names = filled_columns(result, COLUMNS), name_columns(result)
        heads = [*names, *(column.heading for column in columns), *_compared_heads(result)]
        return [PageTable("Jobs", heads, _rows(result, names, columns, False))]


def compared(cell: Cell, first: Cell) -> Estimate | None:
    """The latency of a cell's jobs over that of another's, see `relative`; None where they did not
    do the same work, or took turns in too few blocks for an interval."""
    if cell is first or not like_for_like(first, cell):
        return None
    found = relative(cell, first, lambda row: number(row.get(LATENCY)))
    return found if found is not None and (found.low is not None or apart(cell, first)) else None


def engines(cells: Sequence[Cell]) -> list[str]:
    """How much longer or shorter jobs take on another engine than on that of the first cell."""
    first = cells[0]
    return [
        f"A job takes {ratio(found.ratio)} as long with {cell.label} as with {first.label}"
        f"{_sure(found)}{caveat(cell, first)}."
        for cell in cells
        if cell.first("choices.engine") != first.first("choices.engine")
        and (found := compared(cell, first)) is not None
    ]


def _sure(found: Estimate) -> str:
    """The interval in brackets, where there is one."""
    ends = interval(found.low, found.high)
    return "" if ends == MISSING else f" (95 %: {ends}, {count(found.n, 'block')})"


def _compared_heads(cells: Sequence[Cell]) -> list[str]:
    """Headings of the comparison with the first cell; none where no cell has one."""
    is_compared = any(compared(cell, cells[0]) is not None for cell in cells)
    return ["Job latency, × first", "95 %"] if is_compared else []


def _rows(
    cells: Sequence[Cell], names: list[str], columns: Sequence[Column], status: bool
) -> list[list[str]]:
    """A row a cell: its names, its status if wanted, its figures, the comparison."""
    rows, is_compared = [], bool(_compared_heads(cells))
    for cell in cells[:MAX_ROWS]:
        found = compared(cell, cells[0])
        ends = interval_text(found, cell, cells[0])
        rows.append(
            [
                *names_of(cell, names),
                *([cell.marked_status] if status else []),
                *(text(cell, column) for column in columns),
                *([MISSING if found is None else ratio(found.ratio), ends] if is_compared else []),
            ]
        )
    return rows


def cache_tokens(cell: Cell) -> int | None:
    """Tokens that the cache holds, where the configuration says so; one block is reserved."""
    blocks, size = cell.mean(BLOCKS), cell.mean(BLOCK_SIZE)
    return None if blocks is None or size is None else int((blocks - 1) * size)


def ladders(cells: Sequence[Cell]) -> list[CacheSizes]:
    """Of the cells with a cache for prefixes, groups of at least two that differ in its size
    alone."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.mean(HIT) is None or cache_tokens(cell) is None or not _keeps_prefixes(cell):
            continue
        sized = cell.columns.get(BLOCKS)
        rest = [f"{title}={value}" for title, value in cell.varying.items() if title != sized]
        groups.setdefault(" ".join(rest), []).append(cell)
    several = {name: group for name, group in groups.items() if len(group) > 1}
    return [
        CacheSizes(
            name if len(several) > 1 else "",
            tuple(sorted(group, key=lambda cell: cache_tokens(cell) or 0)),
        )
        for name, group in several.items()
    ]


def _keeps_prefixes(cell: Cell) -> bool:
    return cell.first("config.cache.prefix_caching") is True


def sentence(cell: Cell) -> str:
    """What the jobs of one cell took."""
    figures = {column.key: text(cell, column) for column in COLUMNS}
    jobs, sessions = (int(cell.mean(f"jobs.{name}") or 0) for name in ("num_jobs", "sessions"))
    words = f"{count(jobs, 'job')} of {count(sessions, 'session')}"
    if jobs:
        words += (
            f": {figures['jobs.latency_s.mean']} s a job, {figures['jobs.jobs_per_hour']} an hour"
        )
    if cell.mean(HIT) is not None:
        words += (
            f"; the prefix cache had {figures[HIT]} % of the prompt tokens, of "
            f"{figures[OPTIMAL]} % that it could have had"
        )
    return f"{words}; sessions under way held {figures[LIVE]} tokens at most{caveat(cell)}."


def cliffs(found: Sequence[CacheSizes]) -> list[str]:
    """Where each ladder's cache becomes too small."""
    return [
        f"{ladder.name}: {_cliff(ladder)}" if ladder.name else _cliff(ladder) for ladder in found
    ]


def _cliff(ladder: CacheSizes) -> str:
    live = max(cell.mean(LIVE) or 0.0 for cell in ladder.cells)
    optimal = max(cell.mean(OPTIMAL) or 0.0 for cell in ladder.cells)
    rates = (
        f"the best hit rate is {sig(100 * ladder.best)} %, of {sig(100 * optimal)} % that prompts "
        f"share; sessions under way held {live:,.0f} tokens at most"
    )
    enough, small = ladder.cliff()
    if enough is None:  # a larger one did worse
        return f"No cache is large enough: {rates}."
    words = f"A cache of {cache_tokens(enough):,} tokens is large enough"
    if small is not None:
        lost = sig(100 * ladder.loss(small), 2)
        words += f"; one of {cache_tokens(small):,} loses {lost} points of the hit rate"
    return f"{words}: {rates}."


def figure(found: Sequence[CacheSizes]) -> Chart | None:
    """Hit rate against the size of the cache, and dashed what is optimal; a row a ladder."""
    if not found:
        return None
    rows = []
    for ladder in found:
        sizes = [float(cache_tokens(cell) or 0) for cell in ladder.cells]
        hits = [100 * (cell.mean(HIT) or 0.0) for cell in ladder.cells]
        best = [100 * (cell.mean(OPTIMAL) or 0.0) for cell in ladder.cells]
        names = [f"{size:,.0f} tokens: {sig(hit)} %" for size, hit in zip(sizes, hits, strict=True)]
        series = [
            Series("optimal", FAINT, sizes, best, "line", dashed=True),
            Series("hit rate", SLATE, sizes, hits, "line"),
            Series("", SLATE, sizes, hits, names=names),
        ]
        rows.append((ladder.name, [Panel("", "tokens that the cache holds", "%", series)]))
    alt = " ".join(cliffs(found))
    caption = "Share of the prompt tokens that the prefix cache had, and that it could have had."
    return Chart("agents", "Where does the prefix cache become too small?", alt, caption, rows)
