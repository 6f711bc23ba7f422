"""What a growing load does: the finding of a sweep in which the load alone varies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.analysis.ablation import factors
from minivllm.analysis.cell import Cell, set_load
from minivllm.analysis.format import ratio, sig
from minivllm.analysis.interleaving import caveat
from minivllm.analysis.ranking import LATENCIES, NAMES
from minivllm.analysis.rows import number
from minivllm.report.figures.plots import THROUGHPUT, time_unit
from minivllm.report.sweeps.levels import load_words, of_load


@dataclass(frozen=True)
class LoadSweep:
    """Cells of one configuration under several loads.

    Args:
        title: of the column of the load.
        cells: those with a throughput, the least load first, each with its load.
    """

    title: str
    cells: tuple[tuple[float, Cell], ...]

    @property
    def latency(self) -> str | None:
        """The latency that most of a request lies in; None where not every cell has one."""
        return next(
            (
                metric
                for metric in LATENCIES
                if all(cell.mean(f"metrics.{metric}") for _, cell in self.cells)
            ),
            None,
        )


def load_sweep(cells: Sequence[Cell]) -> LoadSweep | None:
    """The cells in order of their load; None where anything else varies, or it is no number."""
    done = [cell for cell in cells if cell.configured and cell.summary(THROUGHPUT)]
    knobs = factors.knobs_of(list(cells)) if cells and cells[0].varying else []
    if len(knobs) != 1 or len(done) < 2:
        return None
    key = next(key for key, title in cells[0].columns.items() if title == knobs[0])
    known = [(load, cell) for cell in done if (load := number(cell.first(key))) is not None]
    if not of_load(key) or len(known) < len(done) or len({load for load, _ in known}) < len(known):
        return None
    return LoadSweep(knobs[0], tuple(sorted(known, key=lambda pair: pair[0])))


def sentence(found: LoadSweep) -> str:
    """How throughput and latency go from the least load to the greatest."""
    (_, first), (_, last) = found.cells[0], found.cells[-1]
    least, most = (load_words(found.title, cell.varying[found.title]) for cell in (first, last))
    parts = []
    slow, fast = first.mean(THROUGHPUT) or 0.0, last.mean(THROUGHPUT) or 0.0
    if set_load(first) is None and slow:
        grown = f"{ratio(fast / slow)} the output tokens/s ({sig(slow)} to {sig(fast)})"
        top = max((cell for _, cell in found.cells), key=lambda cell: cell.mean(THROUGHPUT) or 0.0)
        if top not in (first, last):
            where = load_words(found.title, top.varying[found.title])
            grown += f", the most with {where} ({sig(top.mean(THROUGHPUT))})"
        parts.append(grown)
    if (metric := found.latency) is not None:
        times = [cell.mean(f"metrics.{metric}") or 0.0 for cell in (first, last)]
        scale, unit = time_unit(times)
        low, high = (sig(ms * scale) for ms in times)
        parts.append(f"{ratio(times[1] / times[0])} the {NAMES[metric]} ({low} to {high} {unit})")
    if not parts:
        return ""
    return f"From {least} to {most}: {' and '.join(parts)}{caveat(first, last)}."
