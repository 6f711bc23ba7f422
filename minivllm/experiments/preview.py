"""sweep.dry_run: the plan of a sweep or a search as a table, with an estimate of its time."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from minivllm.analysis.format import count
from minivllm.bench.records import storage
from minivllm.bench.records.measurement import Measurement
from minivllm.bench.records.reading import read_record
from minivllm.errors import BadInput
from minivllm.experiments.schedule import Plan, recorded_status

if TYPE_CHECKING:
    from rich.console import Console


def show_plan(plan: Plan) -> None:
    """Print the plan of a sweep."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column

    from minivllm.report.terminal import bare_table, print_table

    durations = recorded_durations(plan.folder.parent)
    job_of = {m.run_id: index for index, job in enumerate(plan.jobs) for m in job}
    table = bare_table(
        Column("arm", overflow="fold"), "blocks", "recorded", "to measure", "job", "seconds each"
    )
    for cell in plan.cells:
        if cell.problem is not None:
            table.add_row(
                escape(cell.arm.name),
                "-",
                "-",
                "not installed" if cell.absent else "[red]invalid[/]",
                "-",
                "-",
            )
            continue
        pending = [m for m in cell.measurements if m.run_id in job_of]
        known = [durations[m.cell_id] for m in cell.measurements if m.cell_id in durations]
        table.add_row(
            escape(cell.arm.name),
            str(len(cell.measurements)),
            str(sum(m.run_id in plan.recorded for m in cell.measurements)),
            str(len(pending)),
            _jobs({job_of[m.run_id] for m in pending}),
            f"{known[0]:.0f}" if known else "unknown",
        )
    console = Console()
    print_table(table, console)
    for cell in plan.invalid:
        console.print(
            f"[red]invalid[/]: {escape(cell.arm.name)}: {escape(cell.problem or '')}",
            highlight=False,
            soft_wrap=True,
        )
    if plan.sweep.blocks is not None:
        _show_design(plan, console)
    if skipped := plan.skipped:
        console.print(skipped, highlight=False, soft_wrap=True)
    todo = [m.cell_id for job in plan.jobs for m in job]
    console.print(
        f"sweep {plan.name}: {len(todo)} of {len(plan.measurements)} measurements to make in "
        f"{len(plan.jobs)} job{'' if len(plan.jobs) == 1 else 's'}; {estimate(todo, durations)}",
        highlight=False,
        soft_wrap=True,
    )


def _jobs(numbers: set[int]) -> str:
    """Job numbers in words: a list, or a range."""
    if len(numbers) > 2 and max(numbers) - min(numbers) == len(numbers) - 1:
        return f"{min(numbers)}-{max(numbers)}"
    return ", ".join(map(str, sorted(numbers))) or "-"


def show_lone(measurements: Sequence[Measurement]) -> None:
    """Print the measurements of a single run, whose configuration was checked."""
    first = measurements[0]
    known = recorded_durations(first.path.parents[1])
    lines = (
        f"{first.cell}, cell {first.cell_id}: valid",
        f"{count(len(measurements), 'measurement')} into {first.path.parent}/, each again: "
        + estimate([m.cell_id for m in measurements], known),
    )
    print("\n".join(lines))


def _show_design(plan: Plan, console: Console) -> None:
    """Print the compared arms of each optimisation, and the number of blocks for a verdict."""
    from rich.markup import escape
    from rich.table import Column

    from minivllm.analysis.statistics import blocks_needed
    from minivllm.report.terminal import bare_table, print_table

    assert plan.sweep.blocks is not None
    design, metric = plan.sweep.blocks.design, plan.sweep.blocks.metric or "what ranks the arms"
    table = bare_table(
        *(
            Column(name, overflow="fold")
            for name in ("optimisation", "requires", "with it", "against")
        )
    )
    for contrast in design.contrasts:
        with_, without = (escape(design.label(chosen)) for chosen in contrast.pairs[0])
        rest = f" and {len(contrast.pairs) - 1} more pairs" if len(contrast.pairs) > 1 else ""
        requires = ", ".join(design.requires[contrast.name]) or "-"
        table.add_row(escape(contrast.name), escape(requires), with_, f"{without}{rest}")
    print_table(table, console)
    k = len(design.names)
    console.print(
        f"{design.kind}: {len(plan.cells)} arms, one of them a copy of the baseline, in "
        f"{plan.blocks} shuffled blocks; a verdict on {metric} over {k} "
        f"optimisation{'' if k == 1 else 's'} needs {blocks_needed(k)}",
        highlight=False,
        soft_wrap=True,
    )
    if (target := plan.settings.measure.target_ci) is not None:
        limit = plan.settings.measure.max_repeats
        console.print(
            f"blocks are added, up to {limit}, until every interval is narrower than "
            f"{100 * target:.2g} %",
            highlight=False,
            soft_wrap=True,
        )


def show_search(
    aim: str,
    measurements: Sequence[Measurement],
    space: Mapping[str, str],
    how: str,
    pending: str | None,
) -> None:
    """Print the goal of a search, and its progress by its records.

    Args:
        aim: the goal in words.
        measurements: those requested so far, see `Search.follow`.
        space: knob -> its values, as written.
        how: the number of trials and their sampler, in words.
        pending: the next trials to measure.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column

    from minivllm.report.terminal import bare_table, print_table

    console = Console()
    table = bare_table("knob", Column("values", overflow="fold"))
    for knob, values in space.items():
        table.add_row(escape(knob), escape(values))
    print_table(table, console)
    lines = (
        aim,
        how,
        progress(measurements, pending),
    )
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def progress(measurements: Sequence[Measurement], pending: str | None) -> str:
    """A sentence with the recorded part of a search, its time, and the next measurements.

    Args:
        measurements: those requested so far.
        pending: the first without a record; None if all have one.
    """
    recorded = [m for m in measurements if recorded_status(m) is not None]
    text = f"{len(recorded)} measurement{'' if len(recorded) == 1 else 's'} recorded"
    known = recorded_durations(recorded[0].path.parent.parent) if recorded else {}
    took = [known[m.cell_id] for m in recorded if m.cell_id in known]
    text += f", {_time(fmean(took))} each" if took else ": how long one takes is unknown"
    return f"{text}; next: {pending}" if pending else f"{text}; nothing is left to measure"


def estimate(todo: list[str], durations: dict[str, float]) -> str:
    """The estimated time of the cells `todo` (cell_ids) in words, from `durations` in seconds."""
    known = [durations[cell] for cell in todo if cell in durations]
    if not todo:
        return "nothing left to do"
    if not known:
        return "how long that takes is unknown: none of these cells has been measured yet"
    guessed = len(todo) - len(known)
    total = sum(known) + guessed * fmean(known)
    return _time(total) + (
        f" ({guessed} of them unknown, taken as the mean of the others)" if guessed else ""
    )


def _time(seconds: float) -> str:
    return f"about {seconds / 60:.0f} minutes" if seconds >= 120 else f"about {seconds:.0f} seconds"


def recorded_durations(runs_dir: Path) -> dict[str, float]:
    """Mean wall-clock seconds of a measurement, by cell_id, over all records below `runs_dir`."""
    seconds: dict[str, list[float]] = {}
    for path in runs_dir.glob(f"*/*/{storage.RECORD}"):
        with contextlib.suppress(OSError, BadInput):
            record = read_record(path)
            # The configuration is written when a measurement begins, the record when it ends.
            wall = path.stat().st_mtime - (path.parent / storage.CONFIG).stat().st_mtime
            window = (record.get("metrics") or {}).get("duration_s") or 0.0
            seconds.setdefault(record["cell_id"], []).append(max(wall, window))
    return {cell: fmean(values) for cell, values in seconds.items()}
