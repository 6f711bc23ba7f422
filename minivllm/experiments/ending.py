"""The end of every task that measures: its tables, its report, and the copy to the tracker."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.analysis.ablation.findings import Goal, Planned
from minivllm.bench.records.storage import OPERATIONS, RECORD, TRACE
from minivllm.config.groups import Config
from minivllm.errors import BadInput
from minivllm.tracking.base import SafeTracker

if TYPE_CHECKING:
    from minivllm.report.inputs import ReportInputs
    from minivllm.report.studies.listed import Finding


def require_writable_reports(config: dict[str, Any]) -> None:
    """Raise BadInput where `conclude` could write no report; called before measuring, and writes
    nothing."""
    folder = Path(Config.of(config).reports_dir)
    nearest = next(there for there in (folder, *folder.parents) if os.path.exists(there))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise BadInput(
            f"reports_dir={folder}: {nearest.resolve()} cannot be written to; give another folder"
        )


def list_reports(reports_dir: Path) -> None:
    """Update the page that lists all reports; a failure is a one-line warning."""
    from minivllm.report.index import rebuild

    try:
        rebuild(reports_dir)
    except OSError as error:
        print(f"warning: the list of reports was not written: {error}", file=sys.stderr)


def percentiles(config: dict[str, Any]) -> list[float]:
    """The percentiles of latencies that the tables show; empty for the default ones."""
    chosen: list[float] = Config.of(config).report.percentiles
    return chosen


def conclude(
    folder: Path,
    out_dir: Path,
    config: dict[str, Any],
    planned: Planned | None = None,
    goal: Goal | None = None,
) -> ReportInputs | None:
    """Print the tables and build the report of all records; a failure is a one-line error.

    Args:
        folder: holds the records.
        out_dir: receives the report.
        config: the resolved configuration, with the tracker, the percentiles and the user's own
            studies.
        planned: the design of an ablation, see `Planned`.
        goal: the goal of a search.

    Returns:
        The inputs of the report; None where there is no report.
    """
    if not any(folder.glob(f"*/{RECORD}")):
        print("nothing has been recorded, so there is no report", file=sys.stderr)
        return None
    from minivllm.report.inputs import read
    from minivllm.report.page import write_report
    from minivllm.report.studies.listed import configured, findings

    try:
        studies = configured(config)
        inputs = read(folder, planned, goal, percentiles(config))
        if inputs.warning:
            print(f"warning: {inputs.warning}", file=sys.stderr)
        _print_findings(inputs, findings(inputs, studies), chosen=bool(percentiles(config)))
        print(f"records: {folder}")
        if any(folder.glob(f"*/{TRACE}")):
            print(
                f"traces: {folder}/*/{TRACE} (https://ui.perfetto.dev opens them), {OPERATIONS} "
                "beside each"
            )
        page = write_report(inputs, out_dir, studies)
        list_reports(out_dir.parent)
    except Exception as error:
        why = str(error) if isinstance(error, BadInput) else f"{type(error).__name__}: {error}"
        print(f"error: the report could not be built: {why}", file=sys.stderr)
        return None
    print(f"report: {page}")
    SafeTracker(config).report(out_dir.name, page)
    return inputs


def _print_findings(inputs: ReportInputs, known: list[Finding], *, chosen: bool) -> None:
    """Print tables and sentences, of the cells and then of the leading study.

    Args:
        inputs: of the report.
        known: the studies with their results.
        chosen: whether the user has chosen the percentiles, see `too_few`.
    """
    from minivllm.report.notices import simulated
    from minivllm.report.percentiles import too_few
    from minivllm.report.studies.listed import leading, terminal_tables
    from minivllm.report.terminal import print_table
    from minivllm.report.verdict import doubts

    lead = leading(known, inputs)
    for table in terminal_tables(inputs, known):
        print_table(table)
    for line in too_few(inputs.cells, inputs.columns) if chosen else ():
        print(line)
    if lead and not lead.study.replaces_summary(lead.result, inputs):
        for table in lead.study.tables(lead.result, inputs):
            print_table(table)
    statements = lead.study.statements(lead.result, inputs) if lead else None
    for line in _of_cells(inputs) if statements is None else statements:
        print(line)
    for study, result in known:
        if not study.leads_page(result, inputs):
            for line in study.statements(result, inputs) or ():
                print(line)
    for line in doubts(inputs.cells):
        print(line)
    if (notice := simulated(inputs.cells)) is not None:
        print(f"{notice.title} {notice.text}")


def _of_cells(inputs: ReportInputs) -> list[str]:
    """The sentences about the cells of a plain sweep."""
    from minivllm.analysis.ablation import factors
    from minivllm.analysis.ranking import rank
    from minivllm.report.ranking import not_separated

    done = [cell for cell in inputs.cells if cell.ok]
    return [*not_separated(done), *factors.sentences(inputs.cells), *rank(done).notes]
