"""The number of blocks that a verdict needs, and that a narrow interval (`measure.target_ci`)
needs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from minivllm.analysis.ablation.design import Design
from minivllm.analysis.format import count, sig
from minivllm.bench.records.storage import RECORD

if TYPE_CHECKING:
    from minivllm.analysis.rows import Row
    from minivllm.experiments.schedule import Plan


def too_few(design: Design, plan: Plan) -> str | None:
    """A warning where the planned blocks are too few for a verdict on any effect; else None."""
    from minivllm.analysis.statistics import blocks_needed

    needed = blocks_needed(len(design.names))
    measure = plan.settings.measure
    most = measure.max_repeats if measure.target_ci else plan.blocks
    if most >= needed:
        return None
    return (
        f"a verdict over {count(len(design.names), 'optimisation')} needs {needed} blocks, and "
        f"{most} are planned: measure.repeats={needed} adds what is missing"
    )


def more_blocks(plan: Plan) -> int | None:
    """The new number of blocks of a plan whose blocks are all recorded; None if it has enough.

    With `measure.target_ci`, blocks are added until the widest confidence interval (high / low - 1)
    is narrower and an ablation has enough for a verdict, up to `measure.max_repeats`. Only the
    plan's own records count, so that a resumed sweep decides like an uninterrupted one.
    """
    from minivllm.analysis.statistics import blocks_needed

    target, limit = plan.settings.measure.target_ci, plan.settings.measure.max_repeats
    if target is None:
        return None
    fewest = 0 if plan.sweep.blocks is None else blocks_needed(len(plan.sweep.blocks.design.names))
    fewest = fewest if fewest <= limit else 0  # no verdict is possible, see `too_few`
    widths = _widths(plan)
    known = [width for width in widths if width is not None]
    if not widths:  # no cell has metrics
        return None
    widest = max(known) if len(known) == len(widths) else None
    shown = "none yet" if widest is None else f"{sig(100 * widest, 2)} %"
    state = (
        f"{plan.blocks} blocks: widest interval {shown}, measure.target_ci is {100 * target:.2g} %"
    )
    if widest is not None and widest <= target and plan.blocks >= fewest:
        print(f"{state}: done")
        return None
    if plan.blocks >= limit:
        print(f"{state}: ended at measure.max_repeats={limit}")
        return None
    # The width of an interval is proportional to 1 / sqrt(blocks). The number at most doubles.
    estimate = (
        2 * plan.blocks if widest is None else math.ceil(plan.blocks * (widest / target) ** 2)
    )
    grown = min(max(estimate, plan.blocks + 1), 2 * plan.blocks)
    more = min(max(grown, fewest), limit)
    print(f"{state}: {more - plan.blocks} more")
    return more


def _widths(plan: Plan) -> list[float | None]:
    """Relative widths of the intervals: of an ablation's effects, else of the metric that ranks the
    cells, one a cell; None without an interval."""
    from minivllm.analysis import statistics
    from minivllm.analysis.ablation.effects import analyse
    from minivllm.analysis.cells import gather
    from minivllm.analysis.metric import find_metric, logarithms
    from minivllm.analysis.ranking import rank
    from minivllm.bench.records.reading import flatten, read_records

    recorded = [m.path for m in plan.measurements if (m.path / RECORD).exists()]
    rows: list[Row] = [flatten(record) for record in read_records(recorded)] if recorded else []
    if plan.sweep.blocks is not None:
        analysis = analyse(rows, plan.ablations)
        effects = analysis.effects if analysis else ()
        return [effect.width for effect in effects if effect.ratio is not None]
    cells = [cell for cell in gather(rows) if cell.ok]
    for metric in map(find_metric, rank(cells).metrics):
        logs = [
            [*logs_by_block.values()]
            for cell in cells
            if (logs_by_block := logarithms(cell, metric))
        ]
        if logs:
            return [statistics.paired(values).width for values in logs]
    return []
