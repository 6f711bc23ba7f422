"""What a report is made of: records, and what they say, worked out once for the page and the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from minivllm.analysis.capacity import Search
from minivllm.analysis.cells import Cell, gather
from minivllm.analysis.findings import Analysis, Goal, Planned
from minivllm.analysis.format import count
from minivllm.analysis.liveness import Liveness, liveness
from minivllm.analysis.rows import Row, read_rows, record_folder
from minivllm.bench.records.schema import Damaged
from minivllm.bench.records.tables import damaged_tables
from minivllm.report import percentiles
from minivllm.report.studies import ablation, capacity, tuning
from minivllm.report.tables import COLUMNS, Column


@dataclass(frozen=True)
class Material:
    """Records as rows, and what is found in them.

    Args:
        rows: at least one.
        unreadable: files that are no records.
        planned: of an ablation that has just ended, see `Planned`.
        goal: of a search that has just ended.
        columns: of its tables, see `percentiles.columns`.
    """

    rows: list[Row]
    unreadable: list[Damaged]
    planned: Planned | None = None
    goal: Goal | None = None
    columns: Sequence[Column] = COLUMNS

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

    @property
    def warning(self) -> str | None:
        """How much of what should be there is not; the page has the files."""
        found = (
            (self.unreadable, "unreadable record left out", "unreadable records left out"),
            (self.damaged, "table missing or torn", "tables missing or torn"),
        )
        told = [count(len(paths), one, several) for paths, one, several in found if paths]
        return f"{', '.join(told)}: the report names them under Validity" if told else None

    @cached_property
    def analysis(self) -> Analysis | None:
        """Of the ablation; None where there is none."""
        return ablation.find(self.rows, self.planned)

    @cached_property
    def searches(self) -> list[Search]:
        """For capacity."""
        return capacity.find(self.rows)

    @cached_property
    def tuning(self) -> tuning.Tuning | None:
        """Of preset=tune; None where the records are of no search."""
        return tuning.find(self.rows, self.cells, self.goal)


def read(
    source: Path | list[Path],
    planned: Planned | None = None,
    goal: Goal | None = None,
    asked: Sequence[float] = (),
) -> Material:
    """Everything at or below a record folder, a sweep's folder, or several of them.

    Args:
        source: what to read.
        planned, goal: see `Material`.
        asked: percentiles of latencies for the tables; none: the usual.

    Raises:
        BadInput: there is no record at all. Failed records are enough for a report.
    """
    rows, unreadable = read_rows(source)
    if asked:
        percentiles.complete(rows, asked)
    return Material(rows, unreadable, planned, goal, percentiles.columns(asked))
