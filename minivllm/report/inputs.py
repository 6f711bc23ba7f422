"""What a report is made from: records, and what they say, worked out once for the page and the
terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from minivllm.analysis.cells import Cell, gather
from minivllm.analysis.findings import Goal, Planned
from minivllm.analysis.format import count
from minivllm.analysis.liveness import Liveness, liveness
from minivllm.analysis.rows import Row, read_rows, record_folder
from minivllm.bench.records.schema import Damaged
from minivllm.bench.records.tables import damaged_tables
from minivllm.report import percentiles
from minivllm.report.figures.looks import Looks
from minivllm.report.tables import COLUMNS, Column


@dataclass(frozen=True)
class ReportInputs:
    """Records as rows, and what is derived from them.

    Args:
        rows: at least one.
        unreadable: files that are no records.
        planned: of an ablation that has just ended, see `Planned`.
        goal: of a search that has just ended.
        columns: of its tables, see `percentiles.columns`.
    """

    rows: list[Row]
    unreadable: list[Damaged] = field(default_factory=list)
    planned: Planned | None = None
    goal: Goal | None = None
    columns: Sequence[Column] = COLUMNS
    # What studies found, by their names, see `Study.finding`.
    findings: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def cells(self) -> list[Cell]:
        """See `gather`."""
        return gather(self.rows)

    @cached_property
    def knobs(self) -> list[Liveness]:
        """Which of the knobs that differ did anything."""
        return liveness(self.cells)

    @cached_property
    def damaged(self) -> list[Damaged]:
        """Tables beside the records that are missing, torn, or not those that were recorded."""
        return [table for row in self.rows if record_folder(row) for table in damaged_tables(row)]

    @cached_property
    def looks(self) -> Looks:
        """How each cell is drawn in every figure."""
        return Looks(self.cells)

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
    asked: Sequence[float] = (),
) -> ReportInputs:
    """Everything at or below a record folder, a sweep's folder, or several of them.

    Args:
        source: what to read.
        planned, goal: see `ReportInputs`.
        asked: percentiles of latencies for the tables; none: the usual.

    Raises:
        BadInput: there is no record at all. Failed records are enough for a report.
    """
    rows, unreadable = read_rows(source)
    if asked:
        percentiles.complete(rows, asked)
    return ReportInputs(rows, unreadable, planned, goal, percentiles.columns(asked))
