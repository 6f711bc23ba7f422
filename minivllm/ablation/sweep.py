"""Running a sweep: compose its arms, skip what is recorded, launch the rest, report whatever happened."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from minivllm.ablation.plan import Arm, Sweep
from minivllm.bench import identity, storage
from minivllm.bench.measurement import Measurement
from minivllm.bench.record import Failure, Record
from minivllm.config import finish, quoted
from minivllm.errors import BadInput
from minivllm.explain import explain, is_config_error

Load = Callable[[Sequence[str]], DictConfig]
Launch = Callable[[Sequence[Sequence[str]]], Sequence[Any]]

RECORDING = ("minivllm.tasks.bench.run", identity.QUALITY_TASK)  # tasks that leave records
PLAN = "plan.json"


@dataclass
class Cell:
    """An arm, and what has become of it."""

    arm: Arm
    config: dict[str, Any] | None = None
    problem: str | None = None  # why it cannot be measured
    measurements: list[Measurement] = field(default_factory=list)


@dataclass
class Plan:
    """A sweep with its records: what there is, and what is still to be measured."""

    name: str
    folder: Path
    cells: list[Cell]
    recorded: dict[str, str]  # run_id -> status
    jobs: list[list[Measurement]]  # pending measurements; those of a job share one engine
    warnings: list[str]

    @property
    def measurements(self) -> list[Measurement]:
        """Of every cell, recorded or not."""
        return [measurement for cell in self.cells for measurement in cell.measurements]

    @property
    def invalid(self) -> list[Cell]:
        """Cells that cannot be measured."""
        return [cell for cell in self.cells if cell.problem is not None]


def run_sweep(sweep: Sweep, load: Load, launch: Launch) -> int:
    """Run a sweep to its report.

    Args:
        sweep: what to measure.
        load: composes a configuration from overrides; raises what Hydra raises.
        launch: runs jobs, given as overrides, through Hydra's launcher; returns their JobReturns.

    Returns:
        The exit code: 0 if every record of the sweep is ok, else 1.

    Raises:
        BadInput: no arm at all can be measured; nothing has been written then.
    """
    cells = [_compose(arm, sweep.settings, load) for arm in sweep.arms]
    _require_one(cells)
    first = next(cell.config for cell in cells if cell.config is not None)
    if any(cell.config is not None and cell.config["task"]["_target_"] not in RECORDING for cell in cells):
        return _launch_plainly(cells, sweep, launch)
    plan = _plan(sweep, cells, first)
    if first["sweep"]["dry_run"]:
        from minivllm.ablation.preview import show_plan

        show_plan(plan)
        return 0
    with _only_one(plan):
        for measurement in plan.measurements:  # under the lock: nobody is replacing them now
            storage.recover(measurement.path)
        _look_up(plan, first["sweep"])  # again: another process may have measured in the meantime
        return _measure(plan, sweep, launch, Path(first["reports_dir"]) / plan.name)


# ---- planning


def _compose(arm: Arm, settings: Sequence[str], load: Load) -> Cell:
    """Compose and check one arm by itself, so that a mistake in it is its own."""
    overrides = [*arm.overrides, *settings]
    try:
        return Cell(arm, finish(load(overrides)))
    except BadInput as error:
        return Cell(arm, problem=str(error))
    except Exception as error:
        if not is_config_error(error):
            raise
        return Cell(arm, problem=str(explain(error, overrides, load)))


def _require_one(cells: list[Cell]) -> None:
    """Raise BadInput if not one arm can be measured: then the command is wrong, not an arm of it."""
    if all(cell.problem is not None for cell in cells):
        prefix = "" if len(cells) == 1 else f"none of the {len(cells)} arms is valid; the first: "
        raise BadInput(f"{prefix}{cells[0].problem}")


def _plan(sweep: Sweep, cells: list[Cell], first: dict[str, Any]) -> Plan:
    from minivllm.tasks.bench import check

    settings = first["sweep"]
    name = settings["name"] or first["name"] or sweep.hash()
    root = Path(first["runs_dir"])
    settled: dict[str, dict[str, Any]] = {}  # model options -> the same with their weights found
    warnings: dict[str, None] = {}
    for position, cell in enumerate(cells):
        if cell.config is None:
            continue
        model = json.dumps(cell.config["model"], sort_keys=True)
        try:
            config, fingerprint, notes = check(
                {**cell.config, "model": settled.get(model, cell.config["model"])}
            )
        except BadInput as error:
            cell.problem = str(error)
            continue
        settled[model] = config["model"]
        warnings.update(dict.fromkeys(notes))
        cell.measurements = identity.expand(config, name, cell.arm.name, root, fingerprint, position)
    _require_one(cells)
    plan = Plan(name, root / name, cells, {}, [], list(warnings))
    _look_up(plan, settings)
    return plan


def _look_up(plan: Plan, settings: dict[str, Any]) -> None:
    """Fill in what is recorded, and so what is still to be measured."""
    plan.recorded = {
        m.run_id: status for m in plan.measurements if (status := recorded_status(m)) is not None
    }
    jobs: dict[str, list[Measurement]] = {}
    for measurement in plan.measurements:
        status = plan.recorded.get(measurement.run_id)
        again = settings["fresh"] or (settings["retry"] == "failed" and status != "ok")
        if status is None or again:
            jobs.setdefault(identity.engine_id(measurement.config), []).append(measurement)
    plan.jobs = list(jobs.values())


def recorded_status(measurement: Measurement) -> str | None:
    """Status of the measurement's record; None where there is none (or none that can be read)."""
    try:
        record = json.loads((measurement.path / storage.RECORD).read_text(encoding="utf-8"))
        return str(record["status"])
    except (OSError, ValueError, KeyError):
        return None


# ---- running


@contextlib.contextmanager
def _only_one(plan: Plan) -> Iterator[None]:
    """Two processes that run one sweep at once would measure everything twice."""
    import filelock

    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"runs_dir={plan.folder.parent}: no folder for records can be made ({error})"
        ) from None
    lock = filelock.FileLock(plan.folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise BadInput(
            f"sweep {plan.name} is running in another process; wait, or give sweep.name=..."
        ) from None
    try:
        yield
    finally:
        lock.release()


def _measure(plan: Plan, sweep: Sweep, launch: Launch, report_dir: Path) -> int:
    """Launch what is pending; the report comes whatever happens."""
    todo = sum(map(len, plan.jobs))
    skipped = len(plan.measurements) - todo
    print(
        f"sweep {plan.name}: {_count(len(plan.cells), 'arm')}, {_count(len(plan.measurements), 'measurement')}"
    )
    if skipped:
        print(f"{skipped} of {len(plan.measurements)} recorded already, skipped")
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for position, cell in enumerate(plan.cells):
        _record_invalid(plan, cell, position)
    path = plan.folder / PLAN
    definition = {
        "arms": [[arm.name, *arm.overrides] for arm in sweep.arms],
        "settings": list(sweep.settings),
    }
    jobs = [[measurement.to_dict() for measurement in job] for job in plan.jobs]
    storage.write_json(path, {"name": plan.name, "definition": definition, "jobs": jobs})
    try:
        if jobs:
            _report_crashes(launch(_job_overrides(plan, path)))
    finally:
        reported = _report(plan, report_dir)
    statuses = [recorded_status(measurement) for measurement in plan.measurements]
    return 0 if reported and not plan.invalid and all(status == "ok" for status in statuses) else 1


def _job_overrides(plan: Plan, path: Path) -> list[list[str]]:
    """For each job the overrides of one of its arms (they share an engine) and where its list is."""
    arms = {cell.arm.name: cell.arm for cell in plan.cells}
    return [
        [
            *arms[job[0].arm].overrides,
            f"sweep.name={quoted(plan.name)}",
            f"sweep.plan={quoted(str(path))}",
            f"sweep.job={i}",
        ]
        for i, job in enumerate(plan.jobs)
    ]


def _report_crashes(returns: Sequence[Any]) -> None:
    """Name jobs that raised; those that a failing cell ended have left a record, and say so there."""
    for index, job in enumerate(returns):
        try:
            _ = job.return_value  # raises what the job raised
        except Exception as error:
            print(f"error: job {index} raised {type(error).__name__}: {error}", file=sys.stderr)


def _report(plan: Plan, out_dir: Path) -> bool:
    """Build the report and print the summary; a failure here must not hide what went before."""
    from minivllm.bench.records import load_records
    from minivllm.report import build_report, summary_tables

    if not any(plan.folder.glob(f"*/{storage.RECORD}")):
        print("nothing has been recorded, so there is no report", file=sys.stderr)
        return False
    try:
        from rich.console import Console

        page = build_report(plan.folder, out_dir)
        for table in summary_tables(load_records(plan.folder)):
            Console().print(table, "")
    except Exception as error:
        print(f"error: the report could not be built: {type(error).__name__}: {error}", file=sys.stderr)
        return False
    print(f"report: {page}")
    return True


def _record_invalid(plan: Plan, cell: Cell, position: int) -> None:
    """A row for an arm that cannot be measured; and none left of a time when it could not."""
    run = identity.digest(["invalid", sorted(cell.arm.overrides)])
    slug = re.sub(r"[^A-Za-z0-9_.]+", "-", cell.arm.name).strip("-.")[:80] or "cell"
    directory = plan.folder / f"{slug}-{run}"
    if cell.problem is None:
        storage.remove(directory)
        return
    print(f"invalid: {cell.arm.name}: {cell.problem}", file=sys.stderr)
    config = cell.config or {"overrides": list(cell.arm.overrides), "choices": {}}
    record = Record(
        run_id=run,
        cell_id=run,
        sweep=plan.name,
        arm=cell.arm.name,
        block=0,
        status="invalid",
        config=config,
        position=position,
        error=Failure("BadInput", cell.problem),
    )
    record.validity.ok = False
    record.validity.reasons.append(f"invalid: {cell.problem}")
    storage.write_record(directory, record, config=config)


def _launch_plainly(cells: list[Cell], sweep: Sweep, launch: Launch) -> int:
    """A sweep over another task: run every combination, say which failed."""
    for cell in cells:
        if cell.problem is not None:
            print(f"error: {cell.arm.name}: {cell.problem}", file=sys.stderr)
    jobs = [[*cell.arm.overrides, *sweep.settings] for cell in cells if cell.problem is None]
    codes = [2] * (len(cells) - len(jobs))
    for job in launch(jobs):
        try:
            codes.append(int(job.return_value or 0))
        except Exception as error:
            print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
            codes.append(1)
    return 0 if not any(codes) else 2 if all(code in (0, 2) for code in codes) else 1


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
