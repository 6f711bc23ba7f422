"""The measurements of a sweep: those recorded, those pending, and their order in jobs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minivllm.analysis.ablation.findings import Planned
from minivllm.bench.records import identity, storage
from minivllm.bench.records.measurement import Measurement
from minivllm.bench.records.reading import record_in
from minivllm.config import plug_ins
from minivllm.config.groups import Config
from minivllm.errors import BadInput, NotInstalled
from minivllm.experiments.arms import Load, compose, shuffled
from minivllm.experiments.filling import PilotResult
from minivllm.experiments.plan import Arm, Sweep, essential


@dataclass
class PlannedArm:
    """An arm with its configuration and its measurements, or the reason why it has none."""

    arm: Arm
    position: int  # within the sweep
    config: dict[str, Any] | None = None
    fingerprint: str = ""  # of the weights
    problem: str | None = None  # the reason why the arm cannot be measured
    absent: bool = False  # whether the problem is that something is not installed, and no error
    measurements: list[Measurement] = field(default_factory=list)


@dataclass
class Plan:
    """A sweep with its recorded and its pending measurements."""

    name: str
    folder: Path
    sweep: Sweep
    cells: list[PlannedArm]
    # The configuration of the first valid arm, for the folders and the settings of the sweep.
    config: dict[str, Any]
    warnings: list[str]
    blocks: int = 0  # of every cell; 0 before `extend`
    recorded: dict[str, str] = field(default_factory=dict)  # run_id -> status
    jobs: list[list[Measurement]] = field(default_factory=list)  # pending measurements
    filled: PilotResult | None = None  # the number of requests, where a pilot found it
    launched: set[str] = field(default_factory=set)  # run_ids that this process has launched
    rejected: bool = False  # whether every job of the last launch ended with bad input

    @property
    def settings(self) -> Config:
        """The configuration with its options as typed objects."""
        return Config.of(self.config)

    @property
    def measurements(self) -> list[Measurement]:
        """The measurements of every cell, recorded or not."""
        return [measurement for cell in self.cells for measurement in cell.measurements]

    @property
    def ablations(self) -> Planned | None:
        """The field `ablation` of each measurement by run_id; None without an ablation."""
        if self.sweep.blocks is None:
            return None
        rows = [*self.measurements, *map(self.row_of_invalid, self.invalid)]
        return {row.run_id: row.ablation for row in rows if row.ablation is not None}

    @property
    def invalid(self) -> list[PlannedArm]:
        """The cells that cannot be measured, but for those that are not installed."""
        return [cell for cell in self.cells if cell.problem is not None and not cell.absent]

    @property
    def skipped(self) -> str:
        """What is recorded already and not measured again, in words; empty where nothing is."""
        pending = {measurement.run_id for job in self.jobs for measurement in job}
        left = [status for run_id, status in self.recorded.items() if run_id not in pending]
        if not left:
            return ""
        words = f"{len(left)} of {len(self.measurements)} recorded already, skipped"
        if failed := sum(status != "ok" for status in left):
            words += (
                f"; {failed} of them did not end well: sweep.retry=failed measures "
                f"{'it' if failed == 1 else 'them'} again"
            )
        return words

    def row_of_invalid(self, cell: PlannedArm) -> Measurement:
        """The measurement that records why a cell cannot be measured."""
        run = identity.digest(["invalid", essential(cell.arm.overrides)])
        slug = re.sub(r"[^A-Za-z0-9_.]+", "-", cell.arm.name).strip("-.")[:80] or "cell"
        config = cell.config or {"overrides": list(cell.arm.overrides), "choices": {}}
        about = self.sweep.blocks.record(cell.arm, 0) if self.sweep.blocks else None
        directory = str(self.folder / f"{slug}-{run}")
        return Measurement(
            run, run, self.name, cell.arm.name, 0, directory, config, cell.position, about
        )

    def extend(self, blocks: int | None = None) -> None:
        """Give every cell this number of blocks; None takes its `measure.repeats`."""
        for cell in self.cells:
            if cell.problem is None and cell.config is not None:
                cell.measurements = identity.expand(
                    cell.config,
                    self.name,
                    cell.arm.name,
                    self.folder.parent,
                    cell.fingerprint,
                    cell.position,
                    blocks,
                )
        self.blocks = max((len(cell.measurements) for cell in self.cells), default=0)
        if (blocks_of := self.sweep.blocks) is not None:
            for block in range(self.blocks):
                order = self.order(block)
                for cell in self.cells:
                    if block < len(cell.measurements):
                        about = blocks_of.record(cell.arm, order.index(cell.arm.name))
                        cell.measurements[block] = replace(cell.measurements[block], ablation=about)

    def look_up(self, elsewhere: Collection[str] = ()) -> None:
        """Read which measurements are recorded, and put the others into jobs.

        Measurements of one engine share a job, which loads the engine once. In an ablation, and
        with several blocks of isolated processes, the measurements of a block share a job in
        shuffled order, so that one host measures the whole block.

        Args:
            elsewhere: run_ids of measurements that other jobs are still to make.
        """
        self.recorded = {
            m.run_id: status
            for m in self.measurements
            if (status := recorded_status(m)) is not None
        }
        alone = self.settings.measure.isolation == "run"
        # A single block has no repeats to interleave, so its jobs may run side by side.
        in_turns = self.sweep.blocks is not None or (alone and self.blocks > 1)
        jobs: dict[Any, list[Measurement]] = {}
        sweep = self.settings.sweep
        for measurement in self.measurements:
            if measurement.run_id in elsewhere:
                continue
            status = self.recorded.get(measurement.run_id)
            again = sweep.fresh or (sweep.retry == "failed" and status != "ok")
            if status is None or (again and measurement.run_id not in self.launched):
                shared = measurement.block if in_turns else identity.engine_id(measurement.config)
                jobs.setdefault(shared, []).append(measurement)
        self.jobs = list(jobs.values())
        if in_turns:
            self.jobs = []
            for block in sorted(jobs):
                turns = {name: turn for turn, name in enumerate(self.order(block))}
                self.jobs.append(sorted(jobs[block], key=lambda m: turns[m.arm]))

    def order(self, block: int) -> list[str]:
        """The arms of one block in measuring order."""
        seed = self.sweep.blocks.seed if self.sweep.blocks else self.settings.measure.seed
        return shuffled((cell.arm.name for cell in self.cells), seed, block)


def compose_arms(sweep: Sweep, load: Load, before: int = 0) -> list[PlannedArm]:
    """Compose every arm by itself, so that an error stays with its arm.

    Args:
        sweep: the arms.
        load: composes a configuration from overrides.
        before: the number of arms of the sweep before these.
    """
    cells = []
    for position, arm in enumerate(sweep.arms, before):
        try:
            cells.append(
                PlannedArm(arm, position, compose([*arm.overrides, *sweep.settings], load))
            )
        except BadInput as error:
            cells.append(PlannedArm(arm, position, problem=str(error)))
    return cells


def require_one(cells: Sequence[PlannedArm]) -> None:
    """Raise BadInput if no arm can be measured, since then the command itself is wrong."""
    if all(cell.problem is not None for cell in cells):
        prefix = "" if len(cells) == 1 else f"none of the {len(cells)} arms is valid; the first: "
        raise BadInput(f"{prefix}{cells[0].problem}")


def check_arms(cells: Sequence[PlannedArm], skip_absent: bool) -> list[str]:
    """Check the composed arms and note the problem of each; returns warnings.

    Args:
        cells: see `compose_arms`.
        skip_absent: whether arms whose engine is not installed are marked as absent, not as wrong.
    """
    from minivllm.experiments.preflight import check

    plug_ins.look_at(cell.config for cell in cells if cell.config is not None)
    settled: dict[str, dict[str, Any]] = {}  # model options -> the same with resolved weights
    warnings: dict[str, None] = {}
    for cell in cells:
        if cell.config is None:
            continue
        model = json.dumps(cell.config["model"], sort_keys=True)
        try:
            cell.config, cell.fingerprint, notes = check(
                {**cell.config, "model": settled.get(model, cell.config["model"])}, filling=True
            )
        except BadInput as error:
            cell.problem = str(error)
            cell.absent = isinstance(error, NotInstalled) and skip_absent
            continue
        settled[model] = cell.config["model"]
        warnings.update(dict.fromkeys(notes))
    return list(warnings)


def make_plan(
    sweep: Sweep,
    cells: Sequence[PlannedArm],
    config: dict[str, Any],
    name: str,
    warnings: list[str],
    filled: PilotResult | None = None,
) -> Plan:
    """Make the plan of checked arms, and look up its records.

    Args:
        sweep, cells: the arms; of absent ones there is a message.
        config: see `Plan`.
        name: the name of the sweep.
        warnings: the warnings for the user.
        filled: what a pilot found.
    """
    for problem in dict.fromkeys(cell.problem for cell in cells if cell.absent):
        print(f"left out: {problem}", file=sys.stderr)
    folder = Path(Config.of(config).runs_dir) / name
    plan = Plan(name, folder, sweep, [*cells], config, warnings, filled=filled)
    plan.extend()
    # A dry run moves nothing, so it reads records that were put aside in their present place.
    if plan.settings.sweep.dry_run:
        for cell in plan.cells:
            cell.measurements = [standing(measurement) for measurement in cell.measurements]
    plan.look_up()
    return plan


def standing(measurement: Measurement) -> Measurement:
    """The measurement with the present folder of its record, also if it was put aside."""
    return replace(measurement, directory=str(storage.standing(measurement.path)))


def recorded_status(measurement: Measurement) -> str | None:
    """The status of the measurement's record; None where no record can be read."""
    record = record_in(measurement.path)
    return None if record is None else str(record["status"])
