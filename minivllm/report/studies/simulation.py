"""Simulated cells beside the measured ones that they predict."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from minivllm.analysis.cell import Cell
from minivllm.analysis.cells import CHOICE_ORDER, spoken
from minivllm.analysis.format import MISSING, count, listing, show, sig
from minivllm.analysis.rows import tells
from minivllm.bench.records.identity import NEUTRAL_RUNTIME
from minivllm.report.figures.chart import Chart
from minivllm.report.figures.opening import ForestRow, forest
from minivllm.report.figures.palette import PALETTE
from minivllm.report.figures.render import Plot
from minivllm.report.html import Conclusion
from minivllm.report.inputs import ReportInputs
from minivllm.report.ranking import not_like_for_like
from minivllm.report.studies.base import Study
from minivllm.report.verdict import remarks

FIGURES = (
    ("metrics.output_tokens_per_s", "Output", "tok/s"),
    ("metrics.ttft_ms.p50", "TTFT p50", "ms"),
    ("metrics.ttft_ms.p99", "TTFT p99", "ms"),
)
# What must be the same; where weights lie is not part of it, nor what comes after the measured
# window.
GROUPS = (*CHOICE_ORDER, "runtime")
BESIDES = ("config.model.weights", *(f"config.runtime.{knob}" for knob in sorted(NEUTRAL_RUNTIME)))


@dataclass(frozen=True)
class Prediction:
    """One figure of one pair."""

    measured: str
    predicted: str
    error: float | None  # percent of the measured value


@dataclass(frozen=True)
class ComparedCells:
    """A measured cell and the simulated cell of the same configuration."""

    label: str
    figures: list[Prediction]  # one for each of FIGURES


@dataclass(frozen=True)
class SimulationCheck:
    """The section: a row a pair, and what they say together."""

    pairs: list[ComparedCells]
    summary: str
    columns: tuple[tuple[str, str], ...] = tuple((title, unit) for _, title, unit in FIGURES)


class SimulationStudy(Study[SimulationCheck]):
    """How well a simulation predicts what was measured."""

    name = "simulation"
    title = page_title = "How well does the simulation predict?"
    template = "simulation"
    leads = True

    def find(self, inputs: ReportInputs) -> SimulationCheck | None:
        return simulation_check(inputs.cells)

    def conclusion(self, result: SimulationCheck, inputs: ReportInputs) -> Conclusion:
        """The largest errors, and what has to be known of the records."""
        done = [cell for cell in inputs.cells if cell.ok]
        return Conclusion(
            result.summary, [*not_like_for_like(done), *remarks(inputs.cells, inputs.knobs)]
        )

    def picture(self, result: SimulationCheck, inputs: ReportInputs) -> Chart | None:
        """The error of each figure in each pair."""
        colours = dict(zip((title for title, _ in result.columns), PALETTE, strict=False))
        rows = [
            ForestRow(f"{pair.label}: {title}", figure.error, None, None, colours[title], title)
            for pair in result.pairs
            for (title, _), figure in zip(result.columns, pair.figures, strict=True)
            if figure.error is not None
        ]
        rows.sort(key=lambda row: -abs(row.value))
        caption = "Predicted over measured, less 1; the largest errors first."
        return forest("How far off?", rows, "% of the measured figure", caption, even=0.0)

    def section(
        self, result: SimulationCheck, inputs: ReportInputs, plots: list[Plot], out_dir: Path
    ) -> SimulationCheck:
        """What was found, as it is."""
        return result


def simulation_check(cells: list[Cell]) -> SimulationCheck | None:
    """Pair measured with simulated cells; None where no cell is both."""
    if not any(cell.simulated for cell in cells):
        return None
    simulated = [cell for cell in cells if cell.ok and cell.simulated]
    measured = [cell for cell in cells if cell.ok and not cell.simulated]
    pairs = [
        ComparedCells(_label(real), [_compare(real, cell, key) for key, _, _ in FIGURES])
        for cell, real in twins(simulated, measured, "engine")
    ]
    return SimulationCheck(pairs, _summary(pairs)) if pairs else None


def twins(cells: list[Cell], others: list[Cell], apart: str) -> list[tuple[Cell, Cell]]:
    """Each of the cells with the last of the others that has the same knobs, but for those of the
    group `apart` and those that one of the two engines does not support."""
    known = [(other, other.ok[0], _knobs(other, apart)) for other in reversed(others)]
    found = []
    for cell in cells:
        row, mine = cell.ok[0], _knobs(cell, apart)
        for other, its_row, theirs in known:
            differing = mine.items() ^ theirs.items()
            if not any(tells(row, name) and tells(its_row, name) for name, _ in differing):
                found.append((cell, other))
                break
    return found


def _knobs(cell: Cell, apart: str) -> dict[str, str]:
    """All knobs that are set but those of the group `apart`."""
    row = cell.ok[0]
    prefixes = tuple(f"config.{group}." for group in GROUPS if group != apart)
    names = [name for name in row if name.startswith(prefixes) and name not in BESIDES]
    names.append("config.measure.seed")
    return {name: show(row.get(name)) for name in names if row.get(name) is not None}


def _label(cell: Cell) -> str:
    parts = [
        spoken(title, value)
        for title, value in cell.varying.items()
        if title.split(".")[0] not in ("engine", "run", "attention kernel", "code")
    ]
    return " · ".join(parts) or cell.label


def _compare(real: Cell, simulated: Cell, key: str) -> Prediction:
    measured, predicted = real.mean(key), simulated.mean(key)
    error = None if not measured or predicted is None else 100 * (predicted / measured - 1)
    return Prediction(sig(measured), sig(predicted), error)


def _summary(pairs: list[ComparedCells]) -> str:
    worst = []
    for i, (_, title, _) in enumerate(FIGURES):
        errors = [abs(e) for pair in pairs if (e := pair.figures[i].error) is not None]
        worst.append(f"{title} {sig(max(errors), 2) if errors else MISSING} %")
    return f"{count(len(pairs), 'cell')} measured and simulated. Largest error: {listing(worst)}."
