"""The events of a record as a page, and as a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.analysis.rows import Row, record_folder
from minivllm.bench.records.events import Item, has_events, read_events
from minivllm.bench.records.measurement import DEFAULT_ARM
from minivllm.bench.records.storage import EVENTS, TELEMETRY
from minivllm.errors import BadInput
from minivllm.report.html import write_bytes
from minivllm.report.view.account import Account
from minivllm.report.view.page import recorded_page
from minivllm.report.view.trace import chrome_trace
from minivllm.report.view.why import sentence

MOST_PAGES = 12  # beside one report


@dataclass(frozen=True)
class Recording:
    """A recorded run as a report shows it."""

    title: str
    file: str  # beside the report
    slowest: str  # a sentence on the request that took longest


def is_recorded(row: Row) -> bool:
    """Whether a record has its events beside it."""
    folder = record_folder(row)
    return folder is not None and has_events(folder)


def items_of(row: Row) -> list[Item]:
    """The events of a record and its telemetry. Raises BadInput as `read_events`."""
    names = (EVENTS, TELEMETRY)
    digests = {name: row[key] for name in names if row.get(key := f"digests.{name}")}
    return read_events(Path(row["directory"]), digests)


def title_of(row: Row) -> str:
    """What a recording is called: its run, and in a sweep its arm and block."""
    arm, block = str(row.get("arm")), row.get("block") or 0
    title = str(row.get("sweep"))
    title += f": {arm}" if arm != DEFAULT_ARM else ""
    return title + (f", block {block}" if block else "")


def page_name(row: Row) -> str:
    """The name of the file with a record's page."""
    return f"view-{Path(row['directory']).name}.html"


def write_page(row: Row, out_dir: Path, items: list[Item]) -> Path:
    """Write the page of a recording.

    Args:
        row: of the record.
        out_dir: is there.
        items: as `items_of` gives them.
    """
    path = out_dir / page_name(row)
    write_bytes(path, recorded_page(title_of(row), items).encode())
    return path


def write_trace(row: Row, out_dir: Path, items: list[Item]) -> Path:
    """Write the trace of a recording; see `write_page`."""
    path = (out_dir / page_name(row)).with_suffix(".trace.json")
    trace: dict[str, Any] = chrome_trace(items, row.get("events.unix_s"))
    write_bytes(path, json.dumps(trace, separators=(",", ":")).encode())
    return path


def recordings(rows: Sequence[Row], out_dir: Path) -> list[Recording]:
    """Write the pages of records with events beside a report, of the first MOST_PAGES; those whose
    events are damaged are left out."""
    made: list[Recording] = []
    for row in rows:
        if len(made) == MOST_PAGES:
            break
        if not is_recorded(row):
            continue
        try:
            items = items_of(row)
        except BadInput:  # the report lists the file
            continue
        path = write_page(row, out_dir, items)
        made.append(Recording(title_of(row), path.name, _slowest(items)))
    return made


def _slowest(items: Sequence[Item]) -> str:
    account = Account.of(items)
    lives = [life for life in account.lives.values() if life.end_s is not None]
    if not lives:
        return "No request ended."
    longest = max(lives, key=lambda life: sum(life.ms.values()))
    return sentence(longest, account)
