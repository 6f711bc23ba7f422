"""What a report is made from: records, and what they say, worked out once for the page and the
terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from minivllm.analysis.ablation.findings import Goal, Planned
from minivllm.analysis.cell import Cell
from minivllm.analysis.cells import gather
from minivllm.analysis.format import count
from minivllm.analysis.liveness import Liveness, liveness
from minivllm.analysis.rows import CHUNK, Row, read_rows, record_folder
from minivllm.bench.records.schema import DamagedFile
from minivllm.bench.records.storage import EVENTS, TABLES
from minivllm.bench.records.tables import damaged_tables
from minivllm.platform.processes.process_pool import Begun, ProcessPool
from minivllm.report import percentiles
from minivllm.report.figures.cell_styles import CellStyles
from minivllm.report.tables import COLUMNS, Column

# fields of a row by which its tables are checked
CHECKED = ("status", "directory", "slimmed", *(f"digests.{name}" for name in (*TABLES, EVENTS)))


@dataclass(frozen=True)
class ReportInputs:
    """Records as rows, and what is derived from them.

    Args:
        rows: at least one.
        unreadable: files that are no records.
        planned: of an ablation that has just ended, see `Planned`.
        goal: of a search that has just ended.
        columns: of its tables, see `percentiles.columns`.
        pool: checks tables and draws figures where it was started for the records.
    """

    rows: list[Row]
    unreadable: list[DamagedFile] = field(default_factory=list)
    planned: Planned | None = None
    goal: Goal | None = None
    columns: Sequence[Column] = COLUMNS
    pool: ProcessPool = field(default_factory=ProcessPool, compare=False, repr=False)
    # What studies found, by their names, see `Study.finding`.
    findings: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    _checks: Begun[list[Row], list[DamagedFile]] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Begin to check the tables, which another process does while this one draws."""
        rows = [{key: row.get(key) for key in CHECKED} for row in self.rows if record_folder(row)]
        chunks = [rows[at : at + CHUNK] for at in range(0, len(rows), CHUNK)]
        object.__setattr__(self, "_checks", self.pool.begin(_damaged, chunks))

    @cached_property
    def cells(self) -> list[Cell]:
        return gather(self.rows)

    @cached_property
    def knobs(self) -> list[Liveness]:
        """Which of the knobs that differ did anything."""
        return liveness(self.cells)

    @cached_property
    def damaged(self) -> list[DamagedFile]:
        """Tables beside the records that are missing, torn, or not those that were recorded."""
        return [table for damaged in self._checks.results() for table in damaged]

    @cached_property
    def styles(self) -> CellStyles:
        """How each cell is drawn in every figure."""
        return CellStyles(self.cells)

    @property
    def warning(self) -> str | None:
        """How many records and tables could not be read; the page names the files."""
        groups = (
            (self.unreadable, "unreadable record left out", "unreadable records left out"),
            (self.damaged, "table missing or torn", "tables missing or torn"),
        )
        counts = [count(len(paths), one, several) for paths, one, several in groups if paths]
        return f"{', '.join(counts)}: the report names them under Validity" if counts else None


def read(
    source: Path | list[Path],
    planned: Planned | None = None,
    goal: Goal | None = None,
    requested: Sequence[float] = (),
    pool: ProcessPool | None = None,
) -> ReportInputs:
    """Everything at or below a record folder, a sweep's folder, or several of them.

    Args:
        source: what to read.
        planned, goal: see `ReportInputs`.
        requested: percentiles of latencies for the tables; none: the usual.
        pool: shares the work on thousands of records; closed by the caller once the report is
            written. None leaves all to this process.

    Raises:
        BadInput: there is no record at all. Failed records are enough for a report.
    """
    rows, unreadable = read_rows(source, pool)
    if requested:
        percentiles.complete(rows, requested)
    columns = percentiles.columns(requested)
    return ReportInputs(rows, unreadable, planned, goal, columns, pool or ProcessPool())


def _damaged(rows: list[Row]) -> list[DamagedFile]:
    """See `damaged_tables`, of several records."""
    return [table for row in rows for table in damaged_tables(row)]
