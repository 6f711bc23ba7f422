"""Cells: the records of one configuration (one a block), gathered, named and averaged."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from minivllm.analysis.capacity import TASK as CAPACITY
from minivllm.analysis.capacity import UNITS as RATES
from minivllm.analysis.format import MISSING, show
from minivllm.analysis.rows import (
    Row,
    below,
    differing,
    fields,
    is_simulated,
    met_others,
    number,
    open_loop,
    started,
    status_of,
)
from minivllm.bench.records.identity import NEUTRAL_MEASURE, NEUTRAL_RUNTIME, QUALITY_TASK

# Parts of the configuration that are not knobs of the measurement.
IGNORED = {
    *("name", "runs_dir", "reports_dir", "report", "runs", "choices", "sweep", "prompt"),
    *("task", "preset", "ablation", "optimisations", "tracker"),
}
CHOICE_ORDER = (
    *(
        "model",
        "quant",
        "attention",
        "batching",
        "cache",
        "decoding",
        "workload",
        "arrival",
        "engine",
    ),
)
MAX_LABEL_PARTS = 4
DEVICE = "provenance.device.name"
PACKAGES = {
    "packages": "",
    "peer_packages": "peer's ",
}  # field of the provenance, what its packages are called


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
        return [row for row in self.ok if not _alone(row)] or self.ok

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
        return sum(status_of(row) != "invalid" and not _alone(row) for row in self.failed)

    @cached_property
    def failed(self) -> list[Row]:
        """Rows that did not end well, invalid ones included."""
        return [row for row in self.rows if status_of(row) != "ok"]

    @cached_property
    def simulated(self) -> bool:
        """Whether the figures are predictions."""
        return any(map(is_simulated, self.rows))

    @cached_property
    def busy(self) -> bool:
        """Whether other processes used the machine while it was measured."""
        return any(met_others(row) for row in self.ok)

    @property
    def refused(self) -> bool:
        """Whether the configuration was bad input, so that nothing was started."""
        return all(row.get("error.type") == "BadInput" for row in self.rows)

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
    def last_started(self) -> str:
        """When the newest of its records was begun, as text that sorts; "" where none says."""
        return max(started(row) for row in self.rows)

    def stat(self, key: str) -> Summary | None:
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
        stat = self.stat(key)
        return stat.mean if stat else None

    @cached_property
    def configured(self) -> bool:
        """Whether the configuration was recorded; an arm that could not be composed has none."""
        return any(below(row, "choices") for row in self.rows)

    def first(self, key: str) -> Any:
        """The field in the first row that has it, ok rows first."""
        for rows in (self.ok, self.failed):
            for row in rows:
                if row.get(key) is not None:
                    return row[key]
        return None

    def named(self, key: str) -> str:
        """A field for people; of the configuration a null is told from a knob that the option does
        not have."""
        value = self.first(key)
        known = value is not None or (
            key.startswith("config.") and any(key in row for row in self.rows)
        )
        return show(value) if known else MISSING


def gather(rows: list[Row]) -> list[Cell]:
    """Cells in the order of the sweeps and of each sweep's arms, labelled; the first is the
    baseline.

    Records of different code, devices, packages or threads are never averaged: they are cells of
    their own. Of a block that was measured again, with a trace say, the newest record counts.
    """
    known: dict[tuple[str, ...], dict[str, set[str]]] = {}
    titles = foundations(rows)
    ground = titles.keys() & differing(rows, tuple(titles)) if rows else set()
    for row in rows:
        of_cell = known.setdefault(_identity(row), {})
        for key in ground:
            if row.get(key) is not None:
                of_cell.setdefault(key, set()).add(str(row[key]))

    def group(row: Row) -> tuple[str, ...]:
        identity = _identity(row)
        parts = list(identity)
        for key in ground:
            candidates = known[identity].get(key, set())
            # A worker that died early could not say; its record belongs to the only cell it can
            # belong to.
            missing = next(iter(candidates)) if len(candidates) == 1 else ""
            parts.append(str(row[key]) if row.get(key) is not None else missing)
        return tuple(parts)

    groups: dict[tuple[str, ...], list[Row]] = {}
    sweeps = {
        sweep: place
        for place, sweep in enumerate(dict.fromkeys(str(row.get("sweep")) for row in rows))
    }
    for row in sorted(rows, key=lambda row: (sweeps[str(row.get("sweep"))], *_order(row))):
        groups.setdefault(group(row), []).append(row)
    cells = [Cell(key[0], key[1], key[2], _newest(members)) for key, members in groups.items()]
    cells.sort(key=lambda cell: cell.arm != "baseline")  # stable: a named baseline comes first
    _label(cells)
    return cells


def foundations(rows: Sequence[Row]) -> dict[str, str]:
    """The fields of a record that say what its figures stand on besides the configuration, with
    their titles."""
    packages = {
        (name, whose + name.removeprefix(f"provenance.{kind}."))
        for kind, whose in PACKAGES.items()
        for name in fields(rows)
        if name.startswith(f"provenance.{kind}.") and any(row.get(name) is not None for row in rows)
    }
    return {
        DEVICE: "device",
        "provenance.code_hash": "code",
        "provenance.driver": "driver",
        "provenance.threads": "threads",
        **dict(sorted(packages)),
    }


def like_for_like(first: Cell, second: Cell) -> bool:
    """Whether both did the same work, as fast as asked, on the same device, so that one may be
    divided by the other."""
    same = ("workload_hash",) if first.simulated else ("workload_hash", DEVICE)
    return (
        first.simulated == second.simulated
        and set_load(first) == set_load(second)
        and all(first.first(key) == second.first(key) for key in same)
    )


def set_load(cell: Cell) -> tuple[tuple[str, Any], ...] | None:
    """See `open_loop`, of a cell."""
    return open_loop((cell.ok or cell.rows)[0])


def _newest(rows: list[Row]) -> list[Row]:
    """One row a block and host, the newest, in their order; quality that was measured alone stands
    beside the speed."""
    kept: dict[tuple[float, str, bool], Row] = {}
    for row in sorted(rows, key=started):
        kept[number(row.get("block")) or 0, str(row.get("provenance.host") or ""), _alone(row)] = (
            row
        )
    return sorted(kept.values(), key=lambda r: (number(r.get("block")) or 0, str(r.get("run_id"))))


def _alone(row: Row) -> bool:
    return bool(row.get("config.task._target_") == QUALITY_TASK)


def _order(row: Row) -> tuple[Any, ...]:
    """As the arms of a sweep were given, not as they happened to be measured: a cell tried again
    keeps its place.

    The rates of a search for capacity ascend, however it came to them.
    """
    searched = row.get("config.task._target_") == CAPACITY
    rates = (number(row.get(f"config.arrival.{knob}")) for knob in RATES if searched)
    rate = next((rate for rate in rates if rate is not None), 0.0)
    begun = started(row) or "~"
    return rate, number(row.get("position")) or 0, begun, str(row.get("arm"))


def _identity(row: Row) -> tuple[str, ...]:
    return tuple(str(row.get(key) or "") for key in ("sweep", "arm", "cell_id"))


def _label(cells: list[Cell]) -> None:
    """Fill in what varies among the cells and a unique label for each."""
    columns = varying_columns(cells)
    for cell in cells:
        cell.columns = columns
        cell.varying = {title: cell.named(key) for key, title in columns.items()}
        parts = [spoken(title, value) for title, value in cell.varying.items() if value != MISSING]
        named = cell.arm and (
            not cell.configured
            or not parts
            or len(parts) > MAX_LABEL_PARTS
            or cell.first("ablation.design")  # its arms are named after what they switch
        )
        cell.label = (
            cell.arm if named else " · ".join(parts) or cell.sweep or cell.cell_id or "cell"
        )
    counts = Counter(cell.label for cell in cells)
    for cell in cells:
        if counts[cell.label] > 1 and cell.arm and cell.arm != cell.label:
            cell.label = f"{cell.label} ({cell.arm})"
    counts, seen = Counter(cell.label for cell in cells), Counter[str]()
    for cell in cells:
        if counts[cell.label] > 1:
            seen[cell.label] += 1
            cell.label = f"{cell.label} #{seen[cell.label]}"


def spoken(title: str, value: str) -> str:
    """A value of a varying column in a label: an option's name speaks for itself, a bare number
    does not."""
    return f"{title.rsplit('.', 1)[-1]}={value}" if "." in title else value


def name_columns(cells: list[Cell]) -> list[str]:
    """Headings of the columns by which a table names its cells: what varies, else one for their
    label.

    Arms of an ablation have names of their own, and the baseline and its copy differ in nothing
    else.
    """
    if not cells or not cells[0].varying:
        return ["cell"]
    return (
        ["arm"] if all(cell.first("ablation.design") for cell in cells) else list(cells[0].varying)
    )


def names_of(cell: Cell, columns: list[str]) -> list[str]:
    """What `cell` has in each of the `name_columns`; of a cell without a configuration the label
    alone."""
    if cell.configured and all(title in cell.varying for title in columns):
        return [cell.varying[title] for title in columns]
    return [cell.label] + [""] * (len(columns) - 1)


def varying_columns(cells: list[Cell]) -> dict[str, str]:
    """Record fields that differ among the cells, with the title of their column.

    A group whose option differs is shown by the option's name; its other knobs are shown only where
    they differ among cells of the same option.
    """
    if len(cells) < 2:
        return {}
    columns: dict[str, str] = {}
    if len({cell.sweep for cell in cells}) > 1:
        columns["sweep"] = "run"
    rows = [row for cell in cells for row in cell.rows]
    others = {
        "weights": "weights kind",
        "attention_backend": "attention kernel",
        **foundations(rows),
    }
    # all other fields differ in no cell
    moving_fields = differing(rows, ("choices.", "config.", *others))
    names = sorted(moving_fields)
    choices = [f"choices.{group}" for group in CHOICE_ORDER if f"choices.{group}" in names]
    choices += [k for k in names if k.startswith("choices.") and k not in choices]
    moving: dict[str, str] = {}
    for key in choices:
        group = key.removeprefix("choices.")
        if group not in IGNORED and not group.startswith("hydra") and _differs(cells, key):
            columns[key] = moving[group] = group
    for key in names:
        path = key.removeprefix("config.").split(".")
        if not key.startswith("config.") or path[0] in IGNORED or path[-1] == "_target_":
            continue
        if path[0] == "measure" and path[1] in NEUTRAL_MEASURE:
            continue
        if path[0] == "runtime" and path[1] in NEUTRAL_RUNTIME:
            continue
        if path[0] in moving:
            by_option: dict[str, list[Cell]] = {}
            for cell in cells:
                by_option.setdefault(show(cell.first(f"choices.{path[0]}")), []).append(cell)
            differs = any(_differs(members, key) for members in by_option.values())
        elif path[0] == "quality":  # settings that matter only where quality was measured
            differs = _differs([cell for cell in cells if cell.first("quality.reference_id")], key)
        else:
            differs = _differs(cells, key)
        if differs:
            columns[key] = ".".join(path)
    for key, title in others.items():
        if key not in moving_fields or (title == "threads" and "config.runtime.threads" in columns):
            continue
        # Missing in records of early failures, so only different known values count.
        if len({show(cell.first(key)) for cell in cells if cell.first(key) is not None}) > 1:
            columns[key] = title
    return columns


def _differs(cells: list[Cell], key: str) -> bool:
    shown = (show(cell.first(key)) for cell in cells if cell.configured)
    one = next(shown, None)
    return any(other != one for other in shown)
