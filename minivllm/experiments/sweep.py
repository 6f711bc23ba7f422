"""A sweep from its arms to its report: compose, skip recorded measurements, launch the others."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from minivllm.analysis.cell import ABSENT
from minivllm.analysis.format import count
from minivllm.bench.completion import write_failure
from minivllm.bench.records import identity, storage
from minivllm.bench.records.lock import folder_lock
from minivllm.bench.records.measurement import Measurement
from minivllm.bench.records.reading import record_in
from minivllm.bench.records.record import Failure, Validity
from minivllm.config.groups import Config
from minivllm.config.overrides import hidden, quoted
from minivllm.errors import BadInput
from minivllm.experiments import filling, plain
from minivllm.experiments.arms import Load
from minivllm.experiments.filling import PilotResult
from minivllm.experiments.jobs import (
    FailedJob,
    JobsContinue,
    LostJob,
    await_queued,
    discard_left,
    has_begun,
    job_files,
    queued_jobs,
    reason,
)
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
    name = first["sweep"]["name"] or first["name"] or sweep.hash()
    filled = _fill(cells, first, name)
    plan = make_plan(sweep, cells, first, name, warnings, filled)
    if first["sweep"]["dry_run"]:
        from minivllm.experiments.preview import show_plan

        show_plan(plan)
        return 0
    with folder_lock(plan.folder, "sweep", "sweep.name"):
        before = {_stamp(path) for path in plan.folder.glob(f"*/{storage.RECORD}")}
        try:
            measure(plan, launch)
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt, JobsContinue):
                print(interrupt, file=sys.stderr)
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


def _fill(cells: Sequence[PlannedArm], first: dict[str, Any], name: str) -> PilotResult | None:
    """Give every arm with workload.num_requests=auto the number that the sweep's plan has, or that
    a pilot finds now, before any block; None where no arm has auto, or a dry run has no plan."""
    arms = [
        (cell.arm.name, cell.config, cell.fingerprint)
        for cell in cells
        if cell.problem is None and cell.config is not None and filling.is_auto(cell.config)
    ]
    if not arms:
        return None
    settings, root = Config.of(first).sweep, Path(first["runs_dir"])
    filled = None if settings.fresh else filling.known(root / name / PLAN)
    if filled is None and not settings.dry_run:
        with folder_lock(root / name, "sweep", "sweep.name"):
            filled = filling.find(arms, root, name)
            files.write_json(root / name / PLAN, {"name": name, **filling.field(filled)})
    if filled is not None:
        for cell in cells:
            if cell.config is not None:
                cell.config = filling.with_number(cell.config, filled.num_requests)
    return filled


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
        f"{done} of {total} measurements were made again{kept}; the same command begins again, "
        "without sweep.fresh=true it measures only what has no record"
    )


def _recover(plan: Plan) -> None:
    """Look up the records again, after repairing folders of a process that ended while replacing
    them; what a job of an earlier command is still to measure is left to it."""
    discard_left(plan.folder)
    elsewhere = {run_id for job in queued_jobs(plan.folder) for run_id in job.run_ids}
    for measurement in plan.measurements:  # the lock keeps other processes from replacing them
        if measurement.run_id not in elsewhere:
            storage.recover(measurement.path)
    plan.look_up(elsewhere)


def measure(plan: Plan, launch: Launch, what: str | None = None) -> None:
    """Launch the pending measurements, record invalid arms, and add blocks for `measure.target_ci`.

    Args:
        plan: the plan, whose folder this process has locked.
        launch: see `run_sweep`.
        what: printed in place of the sweep's name and size.
    """
    _recover(plan)
    size = f"{count(len(plan.cells), 'arm')}, {count(len(plan.measurements), 'measurement')}"
    print(what or f"sweep {plan.name}: {size}")
    if skipped := plan.skipped:
        print(skipped)
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
        own = {measurement.run_id for measurement in plan.measurements}
        if waited := [job for job in queued_jobs(plan.folder) if job.run_ids & own]:
            await_queued(waited)
        elif (more := more_blocks(plan)) is None:
            return
        else:
            plan.extend(more)
        _recover(plan)


def _launch(plan: Plan, launch: Launch) -> None:
    """Write the plan, run the jobs that are pending, and record what they left without a
    record."""
    path, sweep = plan.folder / PLAN, plan.sweep
    definition = {
        "arms": [[arm.name, *_hidden(arm.overrides)] for arm in sweep.arms],
        "settings": _hidden(sweep.settings),
    }
    jobs = [[measurement.to_dict() for measurement in job] for job in plan.jobs]
    public = [[{**entry, "config": shown(entry["config"])} for entry in job] for job in jobs]
    before = [0, *itertools.accumulate(map(len, jobs))]
    contents = [
        {"before": begin, "total": before[-1], "measurements": job}
        for begin, job in zip(before, jobs, strict=False)
    ]
    plan.launched.update(measurement.run_id for job in plan.jobs for measurement in job)
    stamps = {m.run_id: _stamp(m.path / storage.RECORD) for job in plan.jobs for m in job}
    try:
        found = filling.field(plan.filled)
        files.write_json(
            path, {"name": plan.name, "definition": definition, **found, "jobs": public}
        )
        with job_files(plan.folder, contents) as paths:
            ended = _run_jobs(launch, _job_overrides(plan, paths), paths) if paths else []
    except OSError as error:
        raise BadInput(
            f"runs_dir={plan.folder.parent}: the plan {path} cannot be written "
            f"({error.strerror or error})"
        ) from None
    codes = [_exit_code(job) for job in ended]
    plan.rejected = bool(codes) and all(code == 2 for code in codes)
    if not plan.rejected:  # else what is wrong is the command, and was printed
        _record_lost(plan, codes, stamps)


def _run_jobs(
    launch: Launch, overrides: Sequence[Sequence[str]], paths: Sequence[Path]
) -> list[Any]:
    """What each job returned: a JobReturn, or a FailedJob.

    Some launchers raise one job's error for all of them. The jobs that had begun failed then; the
    others are launched again.

    Raises:
        BadInput: no job could be started.
    """
    returns: dict[int, Any] = {}
    pending, begun = list(range(len(paths))), False
    while pending:
        try:
            returned = launch([overrides[i] for i in pending])
        except Exception as error:
            failed = [i for i in pending if has_begun(paths[i])]
            begun |= bool(failed)
            if not begun:  # Slurm is missing, for example, or no Ray cluster has the address
                raise BadInput(f"hydra/launcher: no job could be started: {error}") from error
            returns |= dict.fromkeys(failed or pending, FailedJob(error))
            pending = [i for i in pending if i not in returns]
        else:
            returns |= zip(pending, returned, strict=True)
            pending = []
    return [returns[i] for i in range(len(paths))]


def _exit_code(job: Any) -> int | Exception:
    """The exit code of a job, or the error that it ended with."""
    try:
        return int(job.return_value or 0)  # raises the job's exception
    except Exception as error:
        return error


def _record_lost(
    plan: Plan,
    codes: Sequence[int | Exception],
    stamps: Mapping[str, tuple[int, int] | None],
) -> None:
    """Write a record for each measurement that its job has left without one, with the reason.

    Args:
        plan: its jobs are those that have ended.
        codes: how each ended.
        stamps: of the records that were there before.
    """
    tracker = SafeTracker(plan.config)
    for number, (job, code) in enumerate(zip(plan.jobs, codes, strict=True)):
        lost = [m for m in job if _is_lost(m, code, stamps[m.run_id])]
        if not lost or code == 0:
            continue
        if isinstance(code, int):
            code = LostJob("JobExit", f"it ended with exit code {code}; its output says why")
        status, kind, line = reason(code)
        print(f"error: job {number} was lost ({kind}): {line}", file=sys.stderr)
        for measurement in lost:
            try:
                write_failure(
                    *(measurement, status, kind, f"the job was lost: {line}"),
                    tail=getattr(code, "tail", ""),
                )
            except OSError as error:
                print(f"error: {measurement.path}: no record: {error}", file=sys.stderr)
                continue
            tracker.record(measurement.path)


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
                "keep it; sweep.fresh=true measures again",
                file=sys.stderr,
            )


def _is_lost(
    measurement: Measurement, code: int | Exception, before: tuple[int, int] | None
) -> bool:
    """Whether a job has left a measurement without a record, or with one that knows only that its
    worker was killed, where the scheduler knows why."""
    if _stamp(measurement.path / storage.RECORD) in (None, before):
        return True
    error = (record_in(measurement.path) or {}).get("error") or {}
    return isinstance(code, LostJob) and error.get("type") in ("SIGTERM", "SIGKILL")


def _job_overrides(plan: Plan, paths: Sequence[Path]) -> list[list[str]]:
    """The overrides of each job: those of one of its arms (all share an engine), and its file.

    A job may run on another machine, in any folder. A launcher may store overrides, so secrets are
    masked in them; the job's file has the secrets.
    """
    arms = {cell.arm.name: cell.arm for cell in plan.cells}
    return [
        [
            *_hidden(arms[job[0].arm].overrides),
            f"sweep.name={quoted(plan.name)}",
            f"sweep.plan={quoted(str(path))}",
            f"sweep.cwd={quoted(os.getcwd())}",
        ]
        for job, path in zip(plan.jobs, paths, strict=True)
    ]


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
