"""A sweep from its arms to its report: compose, skip recorded measurements, launch the others."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from minivllm.analysis.cell import ABSENT
from minivllm.analysis.format import count
from minivllm.bench.records import identity, storage
from minivllm.bench.records.folder_lock import folder_lock
from minivllm.bench.records.reading import record_in
from minivllm.bench.records.record import Failure, Validity
from minivllm.config.compose import quoted
from minivllm.config.overrides import hidden
from minivllm.config.typed import Config
from minivllm.errors import BadInput
from minivllm.experiments import plain
from minivllm.experiments.arms import Load
from minivllm.experiments.plain import Launch
from minivllm.experiments.plan import Sweep
from minivllm.experiments.repeats import more_blocks, too_few
from minivllm.experiments.schedule import (
    Plan,
    PlannedArm,
    check_arms,
    compose_arms,
    make_plan,
    recorded_status,
    require_one,
)
from minivllm.platform import files
from minivllm.redaction import shown
from minivllm.tracking.base import SafeTracker, Tracker

PLAN = "plan.json"


def run_sweep(sweep: Sweep, load: Load, launch: Launch) -> int:
    """Run a sweep and build its report.

    Args:
        sweep: the arms and the settings.
        load: composes a configuration from overrides; raises what Hydra raises.
        launch: runs jobs, given as overrides, through Hydra's launcher; returns their JobReturns.

    Returns:
        The exit code: 0 if every record of the sweep is ok, 2 if nothing could be measured, else 1.

    Raises:
        BadInput: no arm can be measured, or no report can be written; nothing is written.
    """
    from minivllm.experiments.ending import conclude, require_writable_reports

    cells = compose_arms(sweep, load)
    require_one(cells)
    first = next(cell.config for cell in cells if cell.config is not None)
    if any(
        cell.config is not None and Config.of(cell.config).target("task") not in plain.RECORDING
        for cell in cells
    ):
        return plain.launch_all(cells, sweep, launch)
    identity.require_no_objective(first)
    require_writable_reports(first)
    warnings = check_arms(cells, Config.of(first).sweep.skip_absent)
    require_one(cells)
    plan = make_plan(
        sweep, cells, first, first["sweep"]["name"] or first["name"] or sweep.hash(), warnings
    )
    if first["sweep"]["dry_run"]:
        from minivllm.experiments.preview import show_plan

        show_plan(plan)
        return 0
    with folder_lock(plan.folder, "sweep", "sweep.name"):
        before = {_stamp(path) for path in plan.folder.glob(f"*/{storage.RECORD}")}
        try:
            measure(plan, launch)
        except KeyboardInterrupt:
            print(_interrupted(plan, before), file=sys.stderr)
            raise
        finally:
            reported = conclude(
                plan.folder, Path(first["reports_dir"]) / plan.name, first, plan.ablations
            )
    if plan.rejected:
        return 2
    statuses = [recorded_status(measurement) for measurement in plan.measurements]
    return 0 if reported and not plan.invalid and all(status == "ok" for status in statuses) else 1


def _stamp(path: Path) -> tuple[int, int] | None:
    """The inode and modification time of a record file, which survive moving its folder; None
    without a file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _interrupted(plan: Plan, before: Collection[tuple[int, int] | None]) -> str:
    """The progress of an interrupted sweep and the effect of repeating its command, in words.

    Args:
        plan: of the sweep.
        before: the stamps of older records, see `_stamp`.
    """
    total = len(plan.measurements)
    if not plan.settings.sweep.fresh:
        done = sum(recorded_status(measurement) is not None for measurement in plan.measurements)
        return f"{done} of {total} measurements are recorded; the same command continues"
    stamps = [_stamp(measurement.path / storage.RECORD) for measurement in plan.measurements]
    old = sum(stamp is not None and stamp in before for stamp in stamps)
    done = sum(stamp is not None for stamp in stamps) - old
    kept = f", and {count(old, 'older record')} kept" if old else ""
    return (
        f"{done} of {total} measurements were made anew{kept}; the same command begins again, "
        "without sweep.fresh=true it measures only what has no record"
    )


def _recover(plan: Plan) -> None:
    """Look up the records again, after repairing folders of a process that ended while replacing
    them."""
    for measurement in plan.measurements:  # the lock keeps other processes from replacing them
        storage.recover(measurement.path)
    plan.look_up()


def measure(plan: Plan, launch: Launch, what: str | None = None) -> None:
    """Launch the pending measurements, record invalid arms, and add blocks for `measure.target_ci`.

    Args:
        plan: the plan, whose folder this process has locked.
        launch: see `run_sweep`.
        what: printed in place of the sweep's name and size.
    """
    _recover(plan)
    todo = sum(map(len, plan.jobs))
    skipped = len(plan.measurements) - todo
    size = f"{count(len(plan.cells), 'arm')}, {count(len(plan.measurements), 'measurement')}"
    print(what or f"sweep {plan.name}: {size}")
    if skipped:
        pending = {measurement.run_id for job in plan.jobs for measurement in job}
        failed = sum(
            status != "ok" for run_id, status in plan.recorded.items() if run_id not in pending
        )
        again = (
            f"; {failed} of them did not end well: sweep.retry=failed measures "
            f"{'it' if failed == 1 else 'them'} again"
        )
        print(
            f"{skipped} of {len(plan.measurements)} recorded already, "
            f"skipped{again if failed else ''}"
        )
        _warn_of_old_terms(plan)
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if (blocks := plan.sweep.blocks) is not None and (advice := too_few(blocks.design, plan)):
        print(f"warning: {advice}", file=sys.stderr)
    tracker = SafeTracker(plan.config)
    for cell in plan.cells:
        _record_invalid(plan, cell, tracker)
    while True:
        _launch(plan, launch)
        if (more := more_blocks(plan)) is None:
            return
        plan.extend(more)
        _recover(plan)


def _launch(plan: Plan, launch: Launch) -> None:
    """Write the plan and run the jobs that are pending."""
    path, sweep = plan.folder / PLAN, plan.sweep
    definition = {
        "arms": [[arm.name, *_hidden(arm.overrides)] for arm in sweep.arms],
        "settings": _hidden(sweep.settings),
    }
    jobs = [[measurement.to_dict() for measurement in job] for job in plan.jobs]
    public = [[{**entry, "config": shown(entry["config"])} for entry in job] for job in jobs]
    try:
        files.write_json(path, {"name": plan.name, "definition": definition, "jobs": public})
    except OSError as error:
        raise BadInput(
            f"runs_dir={plan.folder.parent}: the plan {path} cannot be written "
            f"({error.strerror or error})"
        ) from None
    plan.launched.update(measurement.run_id for job in plan.jobs for measurement in job)
    if not jobs:
        return
    try:
        with files.private_json(files.private(path), jobs if jobs != public else None):
            returns = launch(_job_overrides(plan, path))
    except Exception as error:
        if any(
            recorded_status(measurement) is not None for job in plan.jobs for measurement in job
        ):
            raise
        # Slurm is missing, for example, or no Ray cluster has the given address.
        raise BadInput(f"hydra/launcher: no job could be started: {error}") from error
    plan.rejected = _report_crashes(returns)


def _hidden(overrides: Sequence[str]) -> list[str]:
    return [hidden(text) for text in overrides]


def _warn_of_old_terms(plan: Plan) -> None:
    """Warn of records with other SLOs, prices or limits than the command's, which stay
    unchanged."""
    for knob in ("slo", "price", "roofline"):
        kept = 0
        for measurement in plan.measurements:
            if (record := record_in(measurement.path)) is not None:
                had = (record.get("config") or {}).get("measure") or {}
                kept += knob in had and had[knob] != measurement.config["measure"][knob]
        if kept:
            print(
                f"warning: {count(kept, 'record')} of this sweep had another measure.{knob} and "
                "keep it; sweep.fresh=true measures anew",
                file=sys.stderr,
            )


def _job_overrides(plan: Plan, path: Path) -> list[list[str]]:
    """The overrides of each job: those of one of its arms (all share an engine), and its plan's
    path.

    A job may run on another machine, in any folder. A launcher may store overrides, so secrets are
    masked in them; the private copy of the plan has the secrets.
    """
    arms = {cell.arm.name: cell.arm for cell in plan.cells}
    return [
        [
            *_hidden(arms[job[0].arm].overrides),
            f"sweep.name={quoted(plan.name)}",
            f"sweep.plan={quoted(str(path))}",
            f"sweep.job={i}",
            f"sweep.cwd={quoted(os.getcwd())}",
        ]
        for i, job in enumerate(plan.jobs)
    ]


def _report_crashes(returns: Sequence[Any]) -> bool:
    """Print the errors of jobs that raised; a failed cell has a record instead.

    Returns:
        Whether every job ended with bad input, such as an unusable lock file or a full disk.
    """
    rejected = 0
    for index, job in enumerate(returns):
        try:
            rejected += job.return_value == 2  # raises the job's exception
        except Exception as error:
            print(f"error: job {index} raised {type(error).__name__}: {error}", file=sys.stderr)
    return bool(returns) and rejected == len(returns)


def _record_invalid(plan: Plan, cell: PlannedArm, tracker: Tracker) -> None:
    """Write a record for an arm that cannot be measured; remove an old one of an arm that can."""
    row = plan.row_of_invalid(cell)
    if cell.problem is None:
        storage.remove(row.path)
        return
    if not cell.absent:
        own = cell.problem.startswith(cell.arm.name)
        print(f"invalid: {'' if own else f'{cell.arm.name}: '}{cell.problem}", file=sys.stderr)
    error = Failure(ABSENT if cell.absent else "BadInput", cell.problem)
    reasons = Validity(False, [f"invalid: {cell.problem}"])
    record = row.record("invalid", error=error, validity=reasons)
    storage.write_record(row.path, record, config=row.config)
    tracker.record(row.path)
