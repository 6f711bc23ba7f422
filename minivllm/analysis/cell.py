"""One cell: the records of one configuration, a block each, and their means."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm.analysis.format import MISSING, show
from minivllm.analysis.rows import (
    Block,
    Row,
    below,
    block_of,
    frame,
    is_simulated,
    met_others,
    number,
    open_loop,
    started,
    status_of,
)
from minivllm.bench.records.identity import QUALITY_TASK
from minivllm.platform.times import UNKNOWN_S

if TYPE_CHECKING:
    import pandas as pd

DEVICE = "provenance.device.name"
ABSENT = "NotInstalled"  # type of the error of a cell whose engine is not installed


class Summary(NamedTuple):
    """One figure over the blocks of a cell."""

    mean: float
    low: float
    high: float
    n: int  # blocks that have the figure

    @property
    def spread(self) -> bool:
        """Whether there is a range to show."""
        return self.n >= 2

    def ends(self, scale: float = 1.0) -> tuple[float, float] | tuple[None, None]:
        """The range, if there is one to show."""
        return (self.low * scale, self.high * scale) if self.spread else (None, None)


@dataclass
class Cell:
    """What is compared: one arm of one sweep, over its blocks."""

    sweep: str
    arm: str
    cell_id: str
    rows: list[Row]
    label: str = ""
    # value by title of its column, only of fields that vary
    varying: dict[str, str] = field(default_factory=dict)
    # title by field, of the same fields
    columns: dict[str, str] = field(default_factory=dict, repr=False)
    # what `stat` has found
    _stats: dict[str, Summary | None] = field(default_factory=dict, repr=False)

    @cached_property
    def ok(self) -> list[Row]:
        """Rows whose figures may be quoted."""
        return [row for row in self.rows if status_of(row) == "ok"]

    @cached_property
    def timed(self) -> list[Row]:
        """Those of them that are of the load: quality that was measured alone counts where there is
        nothing else."""
        return [row for row in self.ok if not measured_alone(row)] or self.ok

    @property
    def tried(self) -> int:
        """How many blocks there are, well or not."""
        return len(self.timed) + len(self.failed)

    @property
    def blocks(self) -> str:
        """How many blocks ended well, of how many."""
        return f"{len(self.timed)}/{self.tried}"

    @property
    def crashed(self) -> int:
        """How many blocks of the load failed, but for those that were not fit to be measured."""
        return sum(status_of(row) != "invalid" and not measured_alone(row) for row in self.failed)

    @cached_property
    def failed(self) -> list[Row]:
        """Rows that did not end well, invalid ones included."""
        return [row for row in self.rows if status_of(row) != "ok"]

    @cached_property
    def simulated(self) -> bool:
        """Whether the figures are predictions."""
        return any(map(is_simulated, self.rows))

    @cached_property
    def starts(self) -> dict[Block, float]:
        """When each block of the load was begun, see `started`; those that do not say are left
        out."""
        begun = {block_of(row): started(row) for row in self.timed}
        return {block: moment_s for block, moment_s in begun.items() if moment_s != UNKNOWN_S}

    @cached_property
    def busy(self) -> bool:
        """Whether other processes used the machine while it was measured."""
        return any(met_others(row) for row in self.ok)

    @property
    def rejected(self) -> bool:
        """Whether the configuration was bad input, so that nothing was started."""
        return all(row.get("error.type") in ("BadInput", ABSENT) for row in self.rows)

    @property
    def absent(self) -> bool:
        """Whether its engine was not installed."""
        return all(row.get("error.type") == ABSENT for row in self.rows)

    @property
    def status(self) -> str:
        """`ok` when any block is; else the commonest failure."""
        return (
            "ok" if self.ok else Counter(status_of(row) for row in self.rows).most_common(1)[0][0]
        )

    @property
    def status_text(self) -> str:
        """Status for people: names what failed among the blocks."""
        if not self.failed:
            return "ok"
        if self.absent:
            return "not installed"
        failures = Counter(status_of(row) for row in self.failed)
        if not self.ok and len(failures) == 1:
            return self.status
        counts = ", ".join(f"{n} {name}" for name, n in failures.items())
        return f"{len(self.ok)} ok, {counts}" if self.ok else counts

    @property
    def marked_status(self) -> str:
        """The same, and whether other processes were at work."""
        return self.status_text + ", busy" * self.busy

    @property
    def tone(self) -> str:
        """How a table shows the status: ok | mixed | failed."""
        if not self.ok:
            return "failed"
        return "mixed" if self.failed or self.busy else "ok"

    @property
    def mention(self) -> str:
        """The label within a sentence, where an arm `with int8` needs a noun."""
        arm = self.label.startswith(("with ", "without ")) and self.first("ablation.design")
        return f"the arm {self.label}" if arm else self.label

    @property
    def last_started(self) -> float:
        """When the newest of its records was begun; see `started`."""
        return max(started(row) for row in self.rows)

    def summary(self, key: str) -> Summary | None:
        """Mean and range of a field over the ok blocks; None where no block has it."""
        rows = self.ok if key.startswith("quality.") else self.timed
        if len(rows) == 1:
            only = number(rows[0].get(key))
            return None if only is None else Summary(only, only, only, 1)
        if key not in self._stats:
            values = [v for row in rows if (v := number(row.get(key))) is not None]
            mean = math.fsum(values) / len(values) if values else 0.0
            self._stats[key] = (
                Summary(mean, min(values), max(values), len(values)) if values else None
            )
        return self._stats[key]

    def mean(self, key: str) -> float | None:
        """Mean of a field over the ok blocks."""
        rows = self.ok if key.startswith("quality.") else self.timed
        if len(rows) == 1:  # as of each of thousands of cells
            return number(rows[0].get(key))
        stat = self.summary(key)
        return stat.mean if stat else None

    @cached_property
    def configured(self) -> bool:
        """Whether the configuration was recorded; an arm that could not be composed has none."""
        return any(below(row, "choices") for row in self.rows)

    def frames(
        self, file: str, columns: Sequence[str], needed: Sequence[str] = ()
    ) -> Iterator[pd.DataFrame]:
        """A table of each ok block that has it, in the blocks' order; see `rows.frame`."""
        for row in self.ok:
            if (table := frame(row, file, columns, needed)) is not None:
                yield table

    def first(self, key: str) -> Any:
        """The field in the first row that has it, ok rows first."""
        for rows in (self.ok, self.failed):
            for row in rows:
                if row.get(key) is not None:
                    return row[key]
        return None

    def named(self, key: str) -> str:
        """A field for people; of the configuration a null differs from a knob that the option does
        not have."""
        value = self.first(key)
        known = value is not None or (
            key.startswith("config.") and any(key in row for row in self.rows)
        )
        return show(value) if known else MISSING


def like_for_like(first: Cell, second: Cell) -> bool:
    """Whether both did the same work, at the same requested rate, on the same device, so that one
    may be divided by the other."""
    same = ("workload_hash",) if first.simulated else ("workload_hash", DEVICE)
    return (
        first.simulated == second.simulated
        and set_load(first) == set_load(second)
        and all(first.first(key) == second.first(key) for key in same)
    )


def set_load(cell: Cell) -> tuple[tuple[str, Any], ...] | None:
    """See `open_loop`, of a cell."""
    return open_loop((cell.ok or cell.rows)[0])


def measured_alone(row: Row) -> bool:
    """Whether a record is of quality only, measured without a load."""
    return bool(row.get("config.task._target_") == QUALITY_TASK)
