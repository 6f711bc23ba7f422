"""Records gathered into cells, which are named by what varies among them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from minivllm.analysis.capacity import TASK as CAPACITY
from minivllm.analysis.capacity import UNITS as RATES
from minivllm.analysis.cell import DEVICE, Cell, measured_alone
from minivllm.analysis.format import MISSING, show
from minivllm.analysis.rows import (
    Row,
    differing,
    fields,
    number,
    started,
    tells,
)
from minivllm.bench.records.identity import NEUTRAL_MEASURE, NEUTRAL_RUNTIME
from minivllm.platform.times import UNKNOWN_S

# Parts of the configuration that are not knobs of the measurement.
IGNORED = {
    *("name", "runs_dir", "reports_dir", "report", "runs", "choices", "sweep", "prompt"),
    *("task", "preset", "ablation", "optimisations", "tracker", "view"),
}
CHOICE_ORDER = (
    *(
        "model",
        "quant",
        "pruning",
        "attention",
        "batching",
        "cache",
        "decoding",
        "speculative",
        "workload",
        "arrival",
        "engine",
    ),
)
MAX_LABEL_PARTS = 4
PACKAGES = {
    "packages": "",
    "peer_packages": "peer's ",
}  # field of the provenance, what its packages are called


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


def _newest(rows: list[Row]) -> list[Row]:
    """One row a block and host, the newest, in their order; quality that was measured alone stands
    beside the speed."""
    kept: dict[tuple[float | str, str, bool], Row] = {}
    for row in sorted(rows, key=started):
        host = str(row.get("provenance.host") or "")
        # A record that names no block, as after damage, takes no other's place.
        block = number(row.get("block"))
        place = str(row.get("run_id")) if block is None else block
        kept[place, host, measured_alone(row)] = row
    return sorted(kept.values(), key=lambda r: (number(r.get("block")) or 0, str(r.get("run_id"))))


def _order(row: Row) -> tuple[Any, ...]:
    """As the arms of a sweep were given, not as they happened to be measured: a cell tried again
    keeps its place.

    The rates of a search for capacity ascend, however it came to them.
    """
    searched = row.get("config.task._target_") == CAPACITY
    rates = (number(row.get(f"config.arrival.{knob}")) for knob in RATES if searched)
    rate = next((rate for rate in rates if rate is not None), 0.0)
    begun_s = started(row)
    begun_s = math.inf if begun_s == UNKNOWN_S else begun_s  # after all others
    return rate, number(row.get("position")) or 0, begun_s, str(row.get("arm"))


def _identity(row: Row) -> tuple[str, ...]:
    return tuple(str(row.get(key) or "") for key in ("sweep", "arm", "cell_id"))


def _label(cells: list[Cell]) -> None:
    """Fill in what varies among the cells and a unique label for each."""
    columns = varying_columns(cells)
    for cell in cells:
        cell.columns = columns
        cell.varying = {title: cell.named(key) for key, title in columns.items()}
    titles = _telling(cells) if len(columns) > MAX_LABEL_PARTS else list(columns.values())
    for cell in cells:
        values = {title: cell.varying[title] for title in titles}
        parts = [spoken(title, value) for title, value in values.items() if value != MISSING]
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


def _telling(cells: list[Cell]) -> list[str]:
    """Titles of columns that tell cells apart as well as all columns do: the later ones that follow
    from those before are left out, but for the engine where there is room, since what a cell lacks
    does not say what it is."""

    def num_distinct(titles: list[str]) -> int:
        return len({tuple(cell.varying[title] for title in titles) for cell in cells})

    kept = list(cells[0].varying)
    most = num_distinct(kept)
    for title in reversed(kept.copy()):
        rest = [other for other in kept if other != title]
        if num_distinct(rest) == most:
            kept = rest
    engine = cells[0].columns.get("choices.engine")
    if engine is not None and engine not in kept and len(kept) < MAX_LABEL_PARTS:
        kept.append(engine)
    return [title for title in cells[0].varying if title in kept]


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
    known = (cell for cell in cells if cell.configured and tells(cell.rows[0], key))
    shown = (show(cell.first(key)) for cell in known)
    one = next(shown, None)
    return any(other != one for other in shown)
