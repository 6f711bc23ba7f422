"""A search, which chooses each cell by the results of earlier ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from minivllm.analysis.ablation.findings import Goal
from minivllm.analysis.format import count
from minivllm.analysis.ranking import caution
from minivllm.bench.metrics.latency import fewest
from minivllm.bench.records import identity
from minivllm.bench.records.feature_figures import Quality
from minivllm.bench.records.lock import folder_lock
from minivllm.bench.records.measurement import DEFAULT_ARM
from minivllm.bench.records.reading import flatten, record_in
from minivllm.bench.records.record import Record
from minivllm.config.groups import OPTIONS, Config
from minivllm.config.overrides import quoted
from minivllm.errors import BadInput, nearest
from minivllm.experiments.arms import Load
from minivllm.experiments.plain import Launch
from minivllm.experiments.plan import Arm, Sweep, is_setting
from minivllm.experiments.schedule import (
    PlannedArm,
    check_arms,
    compose_arms,
    make_plan,
    require_one,
)
from minivllm.experiments.sweep import measure

WORST = 1e18  # greater than any metric, bytes and operations included
FAILED = 1e3  # the relative excess of a failed cell
# Metrics with at most one sample a request.
ONE_A_REQUEST = ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms")


def goal_of(sweep: Mapping[str, Any]) -> Goal:
    """The goal in the settings of `sweep`.

    Raises:
        BadInput: the objective is missing, or records have no such number.
    """
    if sweep["objective"] is None:
        raise BadInput(
            "sweep.objective is missing: name a number of the record, metrics.output_tokens_per_s"
        )
    goal = Goal(sweep["objective"], sweep["direction"] == "maximize", sweep["limits"])
    for key, name in _names(goal):
        if "." not in name:
            raise BadInput(
                f"{key}={name}: name a number of the record with its group, "
                "metrics.output_tokens_per_s"
            )
        node: Any = Record("", "", "", "", 0, "ok", {}, quality=Quality()).to_dict()
        for part in name.split("."):
            if node is None:  # an optional part of records
                break
            if not isinstance(node, dict) or part not in node:
                known = list(node) if isinstance(node, dict) else []
                raise BadInput(f"{key}: a record has no {name}; {nearest(part, known)}")
            node = node[part]
        if isinstance(node, dict):
            raise BadInput(f"{key}: {name} is no number but a group{_of_which(name, node)}")
    for name, limit in goal.limits.items():
        if not limit > 0:
            raise BadInput(f"sweep.limits: {name}={limit:g} must be above 0")
    return goal


def _names(goal: Goal) -> list[tuple[str, str]]:
    """Pairs of a setting and the number of the record that it names."""
    return [("sweep.objective", goal.objective), *(("sweep.limits", name) for name in goal.limits)]


def validate(goal: Goal, config: dict[str, Any]) -> None:
    """Raise BadInput for a configuration whose record will lack one of the goal's numbers."""
    for key, name in _names(goal):
        if (needed := _needed(name, config)) is not None:
            raise BadInput(f"{key}: {name} takes {needed}")


def excess(goal: Goal, blocks: Sequence[dict[str, Any]]) -> float:
    """The amount by which a cell exceeds the limits, see `Goal.excess`.

    Args:
        blocks: the cell's records; without any, or with one that is not ok, the excess is FAILED.
    """
    if not blocks or any(block["status"] != "ok" for block in blocks):
        return FAILED
    return min(goal.excess(lambda name: _mean(blocks, name)), FAILED / 2)


def worth(goal: Goal, blocks: Sequence[dict[str, Any]]) -> float:
    """The number to optimise: the mean objective over blocks within the limits, else a far worse
    one.

    It worsens with the excess, so that the search returns to cells within the limits.
    """
    if over := excess(goal, blocks):
        return (-WORST if goal.maximize else WORST) * (1 + over)
    return _mean(blocks, goal.objective)


class _Unrecorded(Exception):
    """The next trials of a dry search have no records; the message names them."""


@dataclass
class Search:
    """Trials as the arms of one growing sweep, which reuses records.

    A trial that cannot be composed or measured has a record of status invalid, and counts as
    failed.

    Args:
        goal: the objective and the limits.
        config: of the command, without the knobs of trials.
        load, launch: as for `run_sweep`.
    """

    goal: Goal
    config: dict[str, Any]
    load: Load
    launch: Launch
    name: str = ""
    fixed: Sequence[str] = ()
    cells: dict[Arm, PlannedArm] = field(default_factory=dict)  # by trial
    dry: bool = False  # whether to measure nothing
    most: int = 0  # trials in all; 0 where unknown

    def define(
        self, fixed: Sequence[str], space: Sequence[str], name: str | None, most: int = 0
    ) -> None:
        """Set the fixed overrides and the search space; without a name, their hash is the name."""
        self.fixed, self.most = fixed, most
        cells = [text for text in fixed if not is_setting(text)]
        self.name = name or Sweep((Arm("search", (*cells, *space)),), ()).hash()

    @property
    def aim(self) -> str:
        """The objective and all limits in words."""
        limits = " and ".join(f"{name} <= {limit:g}" for name, limit in self.goal.limits.items())
        most = "most" if self.goal.maximize else "least"
        return f"search {self.name}: the {most} {self.goal.objective}" + (
            f" with {limits}" if limits else ""
        )

    def run(self, propose: Callable[[], object]) -> int:
        """Run `propose`, which calls `measure` with its trials, and report all trials.

        Returns:
            The exit code: 1 if no trial was within the limits.

        Raises:
            BadInput: another process runs the same search, or no trial was valid.
        """
        if (warning := caution(self.goal.objective, flatten({"config": self.config}))) is not None:
            print(f"warning: {warning}", file=sys.stderr)
        with folder_lock(Path(Config.of(self.config).runs_dir) / self.name, "search", "sweep.name"):
            print(self.aim)
            try:
                propose()
            finally:
                code = self._conclude()
        if self.cells:
            require_one([*self.cells.values()])
        return code

    def follow(self, propose: Callable[[], object]) -> str | None:
        """Run `propose` up to the first trials without records; nothing is measured or written.

        Returns:
            The names of those trials; None where all are recorded.

        Raises:
            BadInput: no trial was valid.
        """
        self.dry = True
        try:
            propose()
        except _Unrecorded as pending:
            return str(pending)
        require_one([*self.cells.values()])
        return None

    def measure(self, trials: Sequence[Sequence[str]]) -> list[float]:
        """Measure trials, each a list of all its overrides; returns the number to optimise of
        each."""
        settings = [text for text in self.fixed if is_setting(text)]
        keys = {text.partition("=")[0] for text in self.fixed}
        arms = []
        for trial in trials:
            own = tuple(text for text in trial if not is_setting(text))
            varied = sorted(text for text in own if text.partition("=")[0] not in keys)
            arms.append(Arm(" ".join(varied) or DEFAULT_ARM, own))
        new = tuple(arm for arm in dict.fromkeys(arms) if arm not in self.cells)
        if new:
            sweep = Sweep(new, (*settings, f"sweep.name={quoted(self.name)}"))
            cells = compose_arms(sweep, self.load, before=len(self.cells))
            warnings = check_arms(cells, skip_absent=False)
            for cell in cells:
                if cell.problem is None and cell.config is not None:
                    validate(self.goal, cell.config)
            self.cells |= {cell.arm: cell for cell in cells}
            plan = make_plan(sweep, cells, self.config, self.name, warnings)
            if not self.dry:
                measure(plan, self.launch, self._progress(len(new)))
                if plan.rejected:
                    raise BadInput(
                        f"search {self.name}: nothing can be measured, for the reason above"
                    )
            elif plan.jobs:
                raise _Unrecorded(", ".join(dict.fromkeys(m.arm for job in plan.jobs for m in job)))
        return [worth(self.goal, self._blocks(arm)) for arm in arms]

    def _progress(self, batch: int) -> str:
        """The numbers of the last `batch` trials in words."""
        last = len(self.cells)
        which = f"trial {last}" if batch == 1 else f"trials {last - batch + 1} to {last}"
        return f"search {self.name}: {which}" + f" of at most {self.most}" * bool(self.most)

    def _conclude(self) -> int:
        """Report all trials; returns the exit code."""
        from minivllm.experiments.ending import conclude
        from minivllm.report.studies.searches.tuning import TuningStudy

        if not self.cells:
            return 1
        view = Config.of(self.config)
        runs, reports = Path(view.runs_dir), Path(view.reports_dir)
        inputs = conclude(runs / self.name, reports / self.name, self.config, goal=self.goal)
        missing = sum(
            not self._blocks(arm) and bool(cell.measurements) for arm, cell in self.cells.items()
        )
        if missing:
            print(f"{count(missing, 'trial')} not measured to the end")
        tuning = TuningStudy().finding(inputs) if inputs is not None else None
        return 0 if tuning is not None and tuning.kept else 1

    def _blocks(self, arm: Arm) -> list[dict[str, Any]]:
        """The records of a trial; empty where one is missing."""
        records = [record_in(measurement.path) for measurement in self.cells[arm].measurements]
        blocks = [record for record in records if record is not None]
        return blocks if len(blocks) == len(records) else []


def _of_which(name: str, node: dict[str, Any]) -> str:
    """Advice for an objective that is a group: one of its numbers; empty where none is certain."""
    while node:
        part, inner = next(iter(node.items()))
        name = f"{name}.{part}"
        if not isinstance(inner, dict):
            return f" of them; choose one, e.g. {name}"
        node = inner
    return ""


def _needed(name: str, config: dict[str, Any]) -> str | None:
    """The setting that the number `name` of a record needs and the configuration lacks; else
    None."""
    group, _, figure = name.partition(".")
    if group == "quality" and not identity.quality_wanted(config):
        return "measure.quality=true"
    if group == "metrics" and identity.quality_alone(config):
        return "task=bench, as quality alone is measured"
    figure, _, p = figure.partition(".p")
    view = Config.of(config)
    known = view.target("workload") in OPTIONS
    requests = getattr(view.workload, "num_requests", None) if known else None
    if group == "metrics" and figure in ONE_A_REQUEST and p and isinstance(requests, int):
        least = fewest(int(p))
        if requests < least:
            return f"{least} requests: raise workload.num_requests={requests}"
    if name == "metrics.goodput_requests_per_s" and not any(vars(view.measure.slo).values()):
        return "an objective of latency, e.g. measure.slo.ttft_ms=500"
    return None


def _mean(blocks: Sequence[dict[str, Any]], name: str) -> float:
    values: list[float] = []
    for block in blocks:
        node: Any = block
        for part in name.split("."):
            node = node[part] if isinstance(node, dict) else None
        if not isinstance(node, int | float):
            raise BadInput(
                f"{name} is {node} in the record: a percentile needs more requests, quality "
                "measure.quality=true, others a device that reports it"
            )
        values.append(node)
    return fmean(values)
