"""Which measurements a sweep has, which of them are still to be made, and in which order."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minivllm.analysis.findings import Planned
from minivllm.bench.records import identity, storage
from minivllm.bench.records.measurement import Measurement
from minivllm.bench.records.reading import record_in
from minivllm.errors import BadInput, NotInstalled
from minivllm.experiments.arms import Load, compose, shuffled
from minivllm.experiments.plan import Arm, Sweep, essential


@dataclass
class PlannedArm:
    """An arm, and what has become of it."""

    arm: Arm
    position: int  # within the sweep
    config: dict[str, Any] | None = None
    fingerprint: str = ""  # of the weights
    problem: str | None = None  # why it cannot be measured
    absent: bool = False  # because something is not installed, and the sweep is of what is
    measurements: list[Measurement] = field(default_factory=list)


@dataclass
class Plan:
    """A sweep with its records: what there is, and what is still to be measured."""

    name: str
    folder: Path
    sweep: Sweep
    cells: list[PlannedArm]
    # of its first arm that has one: where records go, and how the sweep is run
    config: dict[str, Any]
    warnings: list[str]
    blocks: int = 0  # of every cell; 0 before `extend`: what each cell's own measure.repeats says
    recorded: dict[str, str] = field(default_factory=dict)  # run_id -> status
    jobs: list[list[Measurement]] = field(default_factory=list)  # pending measurements
    launched: set[str] = field(default_factory=set)  # run_ids that this process has had measured
    refused: bool = False  # whether no job of the last launch could measure anything

    @property
    def measurements(self) -> list[Measurement]:
        """Of every cell, recorded or not."""
        return [measurement for cell in self.cells for measurement in cell.measurements]

    @property
    def ablations(self) -> Planned | None:
        """How this sweep's records are to be read; None where it is no ablation."""
        if self.sweep.blocks is None:
            return None
        rows = [*self.measurements, *map(self.row_of_invalid, self.invalid)]
        return {row.run_id: row.ablation for row in rows if row.ablation is not None}

    @property
    def invalid(self) -> list[PlannedArm]:
        """Cells that cannot be measured."""
        return [cell for cell in self.cells if cell.problem is not None]

    def row_of_invalid(self, cell: PlannedArm) -> Measurement:
        """What stands in the records for a cell that cannot be measured."""
        run = identity.digest(["invalid", essential(cell.arm.overrides)])
        slug = re.sub(r"[^A-Za-z0-9_.]+", "-", cell.arm.name).strip("-.")[:80] or "cell"
        config = cell.config or {"overrides": list(cell.arm.overrides), "choices": {}}
        about = self.sweep.blocks.record(cell.arm, 0) if self.sweep.blocks else None
        directory = str(self.folder / f"{slug}-{run}")
        return Measurement(
            run, run, self.name, cell.arm.name, 0, directory, config, cell.position, about
        )

    def extend(self, blocks: int | None = None) -> None:
        """Give every cell so many blocks; None is its `measure.repeats`."""
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

    def look_up(self) -> None:
        """Fill in what is recorded, and so what is still to be measured.

        Measurements that share an engine share a job, in which it is loaded once. Those of an
        ablation, and of several blocks where each measurement has a process of its own, share one
        with their block, in shuffled order: the host that takes a job measures a whole block.
        """
        self.recorded = {
            m.run_id: status
            for m in self.measurements
            if (status := recorded_status(m)) is not None
        }
        alone = self.config["measure"]["isolation"] == "run"
        # In a single block nothing is measured twice: there are no turns to take, and jobs may run
        # side by side.
        in_turns = self.sweep.blocks is not None or (alone and self.blocks > 1)
        jobs: dict[Any, list[Measurement]] = {}
        for measurement in self.measurements:
            status = self.recorded.get(measurement.run_id)
            settings = self.config["sweep"]
            anew = settings["fresh"] or (settings["retry"] == "failed" and status != "ok")
            if status is None or (anew and measurement.run_id not in self.launched):
                shared = measurement.block if in_turns else identity.engine_id(measurement.config)
                jobs.setdefault(shared, []).append(measurement)
        self.jobs = list(jobs.values())
        if in_turns:
            self.jobs = []
            for block in sorted(jobs):
                turns = {name: turn for turn, name in enumerate(self.order(block))}
                self.jobs.append(sorted(jobs[block], key=lambda m: turns[m.arm]))

    def order(self, block: int) -> list[str]:
        """The arms of one block, as they take turns."""
        seed = self.sweep.blocks.seed if self.sweep.blocks else self.config["measure"]["seed"]
        return shuffled((cell.arm.name for cell in self.cells), seed, block)


def compose_arms(sweep: Sweep, load: Load, before: int = 0) -> list[PlannedArm]:
    """Compose every arm by itself, so that a mistake in it is its own.

    Args:
        sweep: the arms.
        load: composes a configuration from overrides.
        before: arms of the sweep that came before these.
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
    """Raise BadInput if not one arm can be measured: then the command is wrong, not an arm of
    it."""
    if all(cell.problem is not None for cell in cells):
        prefix = "" if len(cells) == 1 else f"none of the {len(cells)} arms is valid; the first: "
        raise BadInput(f"{prefix}{cells[0].problem}")


def check_arms(cells: Sequence[PlannedArm], skip_absent: bool) -> list[str]:
    """Find out which of the composed arms can be measured, and say so in them; returns warnings.

    Args:
        cells: see `compose_arms`.
        skip_absent: whether arms of what is not installed are marked as absent.
    """
    from minivllm.experiments.preflight import check

    settled: dict[str, dict[str, Any]] = {}  # model options -> the same with their weights found
    warnings: dict[str, None] = {}
    for cell in cells:
        if cell.config is None:
            continue
        model = json.dumps(cell.config["model"], sort_keys=True)
        try:
            cell.config, cell.fingerprint, notes = check(
                {**cell.config, "model": settled.get(model, cell.config["model"])}
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
) -> Plan:
    """The plan of arms that are checked, with what is recorded of it.

    Args:
        sweep, cells: the arms; absent ones are left out, and said to be.
        config: see `Plan`.
        name: of the sweep.
        warnings: for the user.
    """
    for cell in cells:
        if cell.absent:
            print(f"left out: {cell.problem}", file=sys.stderr)
    there = [cell for cell in cells if not cell.absent]
    plan = Plan(name, Path(config["runs_dir"]) / name, sweep, there, config, warnings)
    plan.extend()
    # records that were put aside are read where they are: nothing is moved
    if config["sweep"]["dry_run"]:
        for cell in there:
            cell.measurements = [standing(measurement) for measurement in cell.measurements]
    plan.look_up()
    return plan


def standing(measurement: Measurement) -> Measurement:
    """The measurement with the folder that its record lies in now, also where it was put aside."""
    return replace(measurement, directory=str(storage.standing(measurement.path)))


def recorded_status(measurement: Measurement) -> str | None:
    """Status of the measurement's record; None where there is none (or none that can be read)."""
    record = record_in(measurement.path)
    return None if record is None else str(record["status"])
