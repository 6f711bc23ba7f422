"""The words and tables of the page, as plain data for its template."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any
from urllib.parse import quote

from minivllm.analysis.cell import DEVICE, Cell
from minivllm.analysis.cells import CHOICE_ORDER, IGNORED
from minivllm.analysis.format import MISSING, count, listing, show
from minivllm.analysis.liveness import Liveness, undistinguished
from minivllm.analysis.rows import (
    Row,
    distinct,
    fields,
    frame,
    is_simulated,
    number,
    reason_of,
    record_folder,
    started,
    status_of,
    strings,
)
from minivllm.bench.records import archive
from minivllm.bench.records.storage import REQUESTS
from minivllm.platform.times import UNKNOWN_S, minute
from minivllm.report.tables import COLUMNS

MAX_ROWS = 1000  # of a table of the page; the files beside it have all
MOST_KNOBS = 24  # that are shown though they did their work
MOST_GROUPS = 2  # of cells that no counter tells apart, named at the top of the page
MAX_LINKS = 12  # to records of one cell
MAX_FAILURES = 200  # shown in full; the table and the CSV have all
RANDOM = "weights are random"  # noted of older simulations, which have no weights
STARTS = ("minivllm", "minivllm.exe", "run.py", "__main__.py")  # what starts the command line
NOWHERE = ("runs_dir=", "reports_dir=")  # folders that an archive does not name
NUMBER = re.compile(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?![\w])")  # in a sentence
MAX_LOG = 200_000  # characters of log tails on the page, all together


def link(row: Row, out_dir: Path, file: str = "record.json") -> str | None:
    """Relative URL of a file of the record, or of the archive that holds it; None where it is not
    there."""
    folder = record_folder(row)
    if folder is None or (held := archive.holder(folder / file)) is None:
        return None
    try:
        return quote(Path(os.path.relpath(held, out_dir)).as_posix())
    except ValueError:  # another drive on Windows
        return held.resolve().as_uri()


def requested(rows: list[Row], cells: list[Cell]) -> list[tuple[str, str]]:
    """What was measured, where and when: label and text."""
    axes = [f"{title} = {_values(cells, title)}" for title in _titles(cells)]
    blocks = sorted({len(cell.rows) for cell in cells})
    amount = f"{count(len(cells), 'cell')}, {count(len(rows), 'record')}"
    if len(cells) > 1 and len(blocks) == 1:
        amount += f" ({count(blocks[0], 'block')} a cell)"
    facts = [("Varied", "; ".join(axes))] if axes else []
    facts.append(("Measured", amount))
    models = [show(v) for v in distinct(rows, "choices.model")]
    facts.append(
        ("Model", listing([f"{m}{_max_len(rows, m)}" for m in models]) if models else MISSING)
    )
    kinds = {"random": "random (real architecture)", "checkpoint": "checkpoint"}
    measured = [row for row in rows if not is_simulated(row)]
    weights = [kinds.get(str(v), str(v)) for v in distinct(measured, "weights")]
    unknown = "a server's own, not known" if measured else "not loaded"
    facts.append(("Weights", listing(weights) or unknown))
    facts.append(("Device", listing(devices(rows)) or "not recorded"))
    load = [
        f"{group} {listing([show(v) for v in values])}"
        for group in ("workload", "arrival")
        if (values := distinct(rows, f"choices.{group}"))
    ]
    if load:
        facts.append(("Load", ", ".join(load) + _requests(cells)))
    if begun := sorted(moment_s for row in rows if (moment_s := started(row)) != UNKNOWN_S):
        later = f" to {minute(begun[-1])}" if begun[-1] != begun[0] else ""
        facts.append(("Started", minute(begun[0]) + later))
    return facts


def devices(rows: list[Row]) -> list[str]:
    """What was measured on; the machine that a simulation ran on changes no figure."""
    named = distinct((row for row in rows if not is_simulated(row)), DEVICE)
    return [show(name) for name in named] + ["simulated"] * any(map(is_simulated, rows))


def _values(cells: list[Cell], title: str, limit: int = 12) -> str:
    values = list(dict.fromkeys(cell.varying[title] for cell in cells if cell.configured))
    more = f", … ({len(values)} values)" if len(values) > limit else ""
    return ", ".join(values[:limit]) + more


def _titles(cells: list[Cell]) -> list[str]:
    return list(cells[0].varying)


def _max_len(rows: list[Row], model: str) -> str:
    lengths = distinct(
        [row for row in rows if show(row.get("choices.model")) == model],
        "config.model.max_model_len",
    )
    return f" (context {show(lengths[0])})" if len(lengths) == 1 else ""


def _requests(cells: list[Cell]) -> str:
    counts = {
        (n, row.get("metrics.input_tokens"), row.get("metrics.output_tokens"))
        for cell in cells
        for row in cell.ok
        if (n := row.get("metrics.num_requests"))
    }
    if len(counts) != 1:
        return ""
    n, tokens_in, tokens_out = (number(v) or 0.0 for v in next(iter(counts)))
    requests = count(int(n), "request")
    if each := _size(cells):
        return f": {requests} of {each[0]:,} tokens in and {each[1]:,} out"
    return f": {requests}, {tokens_in:,.0f} tokens in and {tokens_out:,.0f} out in total"


def _size(cells: list[Cell]) -> tuple[int, int] | None:
    """Tokens in and out of every request; None where they differ, or are not recorded request by
    request."""
    sizes: set[tuple[int, int]] = set()
    for row in {row.get("workload_hash"): row for cell in cells for row in cell.ok}.values():
        table = frame(row, REQUESTS, ["input_tokens", "output_tokens"])
        if table is None or not {"input_tokens", "output_tokens"} <= set(table):
            return None
        sizes.update(
            zip(table["input_tokens"].tolist(), table["output_tokens"].tolist(), strict=True)
        )
        if len(sizes) > 1:
            return None
    return next(iter(sizes), None)


def commands(rows: list[Row]) -> list[str]:
    """The different command lines, in the form that runs in a checkout and where the package is
    installed."""
    return list(dict.fromkeys(map(_runnable, map(str, distinct(rows, "provenance.command")))))


def _runnable(command: str) -> str:
    """A command line without the places of the interpreter and of what it started."""
    try:
        words = shlex.split(command)
    except ValueError:  # of a record that was written by hand
        return command
    if words and Path(words[0]).name.startswith("python"):
        words[0] = "python"
        script = next((i for i, word in enumerate(words[1:], 1) if not word.startswith("-")), 0)
        if script and Path(words[script]).name in STARTS:
            words[1 : script + 1] = ["-m", "minivllm"]
    elif words and Path(words[0]).name in STARTS:
        words[:1] = ["python", "-m", "minivllm"]
    return shlex.join(word for word in words if word not in NOWHERE)


def constants(cells: list[Cell]) -> list[tuple[str, str]]:
    """Config groups whose option is the same in every cell."""
    rows = [row for cell in cells for row in cell.rows]
    groups = {name.removeprefix("choices.") for name in fields(rows) if name.startswith("choices.")}
    ordered = [g for g in CHOICE_ORDER if g in groups]
    ordered += sorted(
        g
        for g in groups
        if g not in CHOICE_ORDER and g not in IGNORED and not g.startswith("hydra")
    )
    pairs = []
    for group in ordered:
        values = distinct(rows, f"choices.{group}")
        if len(values) == 1 and group not in _titles(cells):
            pairs.append((group, show(values[0])))
    return pairs


def place_of(cell: Cell, index: int, out_dir: Path) -> str | None:
    """Where a cell's numbers come from: its only record, or the list of them in the provenance, as
    far as that goes."""
    if len(cell.ok) == 1:
        return link(cell.ok[0], out_dir)
    return f"#{anchor(index)}" if index < MAX_ROWS else None


def unshown(all_rows: Sized, more: str) -> str:
    """That a table of the page ends before its rows do; empty where it has them all."""
    rest = len(all_rows) - MAX_ROWS
    return f"{rest:,} further rows are in {more}." if rest > 0 else ""


def anchor(index: int) -> str:
    """Name of a cell's first line in the list of records."""
    return f"records-{index + 1}"


def anchors(cells: Sequence[Cell]) -> dict[int, str]:
    """Links to each cell's lines in the list of records, by the cell's `id`."""
    return {id(cell): f"#{anchor(index)}" for index, cell in enumerate(cells[:MAX_ROWS])}


def failures(cells: list[Cell], out_dir: Path) -> tuple[list[dict[str, Any]], int]:
    """What went wrong, blocks of a cell with the same failure together, and how many more there
    are."""
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for cell in cells:
        for row in cell.failed:
            key = (cell.label, status_of(row), str(row.get("error.type") or ""), reason_of(row))
            group = groups.setdefault(
                key, {"log": str(row.get("error.log_tail") or ""), "records": [], "run_log": None}
            )
            group["records"].append((show(row.get("block")), link(row, out_dir)))
            group["run_log"] = group["run_log"] or link(row, out_dir, "run.log")
    each = min(6_000, MAX_LOG // max(1, min(len(groups), MAX_FAILURES)))
    shown = [
        {
            "label": label,
            "status": status,
            "type": kind,
            "message": message,
            **group,
            "log": group["log"][-each:],
        }
        for (label, status, kind, message), group in list(groups.items())[:MAX_FAILURES]
    ]
    return shown, len(groups) - len(shown)


def heading(rows: list[Row], cells: list[Cell], study: str = "") -> tuple[str, str]:
    """The page's question, such as `What do quant and batching change in qwen3?`, and the names of
    the record folders.

    Args:
        rows: of all records.
        cells: of these.
        study: the question of a study, with {model} and {knobs} where these are to be named.
    """
    models = listing([show(v) for v in distinct(rows, "choices.model")], 3)
    models = models or listing([show(v) for v in distinct(rows, "choices.engine")], 3) or "minivllm"
    studied = cells[0].first("ablation.optimisations")
    varied = [_short(title, _titles(cells)) for title in _titles(cells) if title != "model"]
    constant = dict(constants(cells))
    options = [constant[group] for group in ("quant", "batching") if group in constant]
    if not options and "engine" in constant and models != constant["engine"]:
        options = [constant["engine"]]  # of which no more is known
    if study:
        title = study.format(model=models, knobs=listing(varied))
    elif studied:
        together = (
            ", alone and together," if cells[0].first("ablation.design") == "factorial" else ""
        )
        title = f"What is each of {listing(strings(studied))} worth{together} in {models}?"
    elif varied:
        title = f"What {'does' if len(varied) == 1 else 'do'} {listing(varied)} change in {models}?"
    elif len(cells) > 1:
        title = f"How do {models} compare?"
    else:
        title = f"How fast is {' · '.join([models, *options])}?"
    names = [str(name) for name in distinct(rows, "sweep")]
    return title, " + ".join(names[:3]) + (f" + {len(names) - 3} more" if len(names) > 3 else "")


def _short(title: str, titles: list[str]) -> str:
    """A knob without its group, unless another has the same name."""
    last = title.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in titles) == 1 else title


def newest(rows: list[Row]) -> str:
    """When the last of the records was begun."""
    return minute(max(map(started, rows), default=UNKNOWN_S))


def validity(cells: list[Cell]) -> list[dict[str, Any]]:
    """Notes and reasons of the validity gate, each once with the cells it concerns and the range of
    its numbers, and means that not every block is part of; failures have a list of their own."""
    # by kind and words: lines and labels, each once
    remarks: dict[tuple[str, str], tuple[dict[str, None], dict[str, None]]] = {}

    def add(kind: str, line: str, label: str) -> None:
        texts, labels = remarks.setdefault((kind, NUMBER.sub("0", line)), ({}, {}))
        texts[line] = labels[label] = None

    for cell in cells:
        for line in partial_means(cell):
            add("incomplete", line, cell.label)
        for row in cell.rows:
            failure = f"{row.get('status')}: {row.get('error.message')}"
            for kind, key in (("not valid", "validity.reasons"), ("note", "validity.notes")):
                for line in strings(row.get(key)):
                    if line == failure or (cell.simulated and RANDOM in line):
                        continue
                    add(kind, line, cell.label)
            reason = row.get("energy.reason")
            if reason and number(row.get("energy.joules")) is not None:
                add("note", f"energy: {reason}", cell.label)
    return [
        {
            "kind": kind,
            "text": _ranged([*texts]),
            "cells": "all cells" if len(labels) == len(cells) > 1 else listing([*labels], 6),
        }
        for (kind, _), (texts, labels) in remarks.items()
    ]


def _ranged(lines: Sequence[str]) -> str:
    """Lines that differ in their numbers alone as one, with the least and the greatest of each."""
    columns = zip(*map(NUMBER.findall, lines), strict=True)
    ends = [[pick(found, key=_value) for pick in (min, max)] for found in columns]
    ranges = iter(low if _value(low) == _value(high) else f"{low} to {high}" for low, high in ends)
    return NUMBER.sub(lambda _: next(ranges), lines[0])


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def liveness(cells: list[Cell], knobs: list[Liveness]) -> dict[str, Any] | None:
    """Which knobs did anything: those that did nothing before the others, which are folded where
    they are many; and the cells that no counter tells apart, where the verdict only counts them."""
    ordered = sorted(knobs, key=lambda item: item.verdict != "not live")
    if not ordered:
        return None
    dead = sum(item.verdict == "not live" for item in ordered)
    shown = dead if len(ordered) > MOST_KNOBS else len(ordered)
    groups = not_told_apart(cells)
    return {
        "knobs": ordered[: min(shown, MAX_ROWS)],
        "folded": ordered[shown:MAX_ROWS],
        "indistinct": groups if len(groups) > MOST_GROUPS else [],
        "baseline": cells[0].label,
        "unshown": unshown(ordered, "the records"),
    }


def not_told_apart(cells: list[Cell]) -> list[str]:
    """A sentence for each group of cells that may have run as one configuration."""
    return [
        f"No counter tells {listing([cell.mention for cell in group], 4)} apart: they may have run "
        "as one configuration."
        for group in undistinguished(cells)
    ]


def partial_means(cell: Cell) -> list[str]:
    """Figures of the main table that some of a cell's blocks do not have, so that their mean is of
    the others."""
    return [
        f"{column.title}: {len(cell.timed) - stat.n} of {len(cell.timed)} blocks have no figure, "
        "and the mean is of the others"
        for column in COLUMNS
        if (stat := cell.summary(column.key)) is not None and stat.n < len(cell.timed)
    ]
