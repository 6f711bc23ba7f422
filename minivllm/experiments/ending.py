"""What every task that measures ends with: its tables, its report, and word of it to the tracker."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.analysis.findings import Goal, Planned
from minivllm.bench.records.storage import OPERATIONS, RECORD, TRACE
from minivllm.errors import BadInput
from minivllm.tracking.base import SafeTracker

if TYPE_CHECKING:
    from minivllm.report.material import Material


def refuse_unwritable(config: dict[str, Any]) -> None:
    """Raise BadInput where `conclude` could write no report, before anything is measured for it; nothing is written."""
    folder = Path(config.get("reports_dir") or "reports")
    nearest = next(there for there in (folder, *folder.parents) if os.path.exists(there))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise BadInput(f"reports_dir={folder}: {nearest.resolve()} cannot be written to; give another folder")


def list_reports(reports_dir: Path) -> None:
    """Bring the page that lists all reports up to date; that it cannot be written is one line."""
    from minivllm.report.index import rebuild

    try:
        rebuild(reports_dir)
    except OSError as error:
        print(f"warning: the list of reports was not written: {error}", file=sys.stderr)


def percentiles(config: dict[str, Any]) -> list[float]:
    """Those of latencies that the tables are asked to have; none: the usual."""
    return (config.get("report") or {}).get("percentiles") or []


def conclude(
    folder: Path,
    out_dir: Path,
    config: dict[str, Any],
    planned: Planned | None = None,
    goal: Goal | None = None,
) -> Material | None:
    """Print and report whatever has been recorded; a failure here is one line, and hides nothing before it.

    Args:
        folder: of the records.
        out_dir: of the report.
        config: the resolved configuration, which names the tracker and the percentiles.
        planned: of an ablation, see `Planned`.
        goal: of a search.

    Returns:
        What the report is of; None where there is none.
    """
    if not any(folder.glob(f"*/{RECORD}")):
        print("nothing has been recorded, so there is no report", file=sys.stderr)
        return None
    from minivllm import report
    from minivllm.analysis import factors
    from minivllm.analysis.ranking import rank
    from minivllm.report.banner import simulated
    from minivllm.report.lead import not_separated
    from minivllm.report.percentiles import too_few
    from minivllm.report.studies import tuning
    from minivllm.report.studies.effects import effects_table, together
    from minivllm.report.terminal import print_table
    from minivllm.report.verdict import busy, incomplete

    try:
        asked = percentiles(config)
        material = report.read(folder, planned, goal, asked)
        if material.warning:
            print(f"warning: {material.warning}", file=sys.stderr)
        found = material.tuning
        tables = report.summary_tables(material.cells, material.columns)
        for table in tables if found is None else [tuning.table(found)]:
            print_table(table)
        for line in too_few(material.cells, material.columns) if asked else ():
            print(line)
        if material.analysis is not None:
            print_table(effects_table(material.analysis))
            for note in [*together(material.analysis), *material.analysis.notes]:
                print(note)
        elif found is not None:
            for line in tuning.sentences(found):
                print(line)
        else:
            done = [cell for cell in material.cells if cell.ok]
            for line in [*not_separated(done), *factors.sentences(material.cells), *rank(done).notes]:
                print(line)
        for line in [*incomplete(material.cells), *busy(material.cells)]:
            print(line)
        if (banner := simulated(material.cells)) is not None:
            print(f"{banner.title} {banner.text}")
        print(f"records: {folder}")
        if any(folder.glob(f"*/{TRACE}")):
            print(
                f"traces: {folder}/*/{TRACE} (https://ui.perfetto.dev opens them), {OPERATIONS} beside each"
            )
        page = report.write_report(material, out_dir)
        list_reports(out_dir.parent)
    except Exception as error:
        why = str(error) if isinstance(error, BadInput) else f"{type(error).__name__}: {error}"
        print(f"error: the report could not be built: {why}", file=sys.stderr)
        return None
    print(f"report: {page}")
    SafeTracker(config).report(out_dir.name, page)
    return material
