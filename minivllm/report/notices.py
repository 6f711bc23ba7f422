"""What is to be known before any figure: that nothing was computed, or that the text is noise."""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.analysis.cell import Cell
from minivllm.analysis.format import count, listing
from minivllm.analysis.rows import Row, distinct, number


@dataclass(frozen=True)
class Notice:
    """One line above the verdict."""

    title: str
    text: str


def notices(cells: list[Cell]) -> list[Notice]:
    """Those that the records ask for."""
    return [one for one in (simulated(cells), _random(cells)) if one is not None]


def simulated(cells: list[Cell]) -> Notice | None:
    """What the times are those of, and of which cells; None where all were measured."""
    predicted = [cell for cell in cells if cell.simulated]
    if not predicted:
        return None
    models = list(
        dict.fromkeys(text for cell in predicted for row in cell.rows if (text := _model(row)))
    )
    times = f"nothing was computed; times are those of a model {listing(models) or 'of a step'}"
    if len(predicted) == len(cells):
        return Notice("Simulated:", f"{times}.")
    return Notice(
        "Partly simulated:",
        f"in {_which(predicted, cells)} {times}. The other cells were measured.",
    )


def _which(predicted: list[Cell], cells: list[Cell]) -> str:
    """The simulated cells by their engine, where it tells them from the others, else by name."""
    kinds = {cell.varying.get("engine", "") for cell in predicted}
    if kinds & {cell.varying.get("engine", "") for cell in cells if not cell.simulated}:
        return listing([cell.mention for cell in predicted], 6)
    return f"the {count(len(predicted), 'cell')} with engine={listing(sorted(kinds))}"


def _model(row: Row) -> str:
    """What a simulated record says of how long its steps take."""
    if steps := row.get("config.engine.steps"):
        return f"fitted to the steps recorded in {steps}"
    knobs = ("bandwidth_gb_s", "tflops", "overhead_ms")
    bandwidth, tflops, overhead = (number(row.get(f"config.engine.{knob}")) for knob in knobs)
    if bandwidth is None or tflops is None:
        return ""
    besides = f" with {overhead:g} ms a step besides" if overhead else ""
    return f"of {bandwidth:,g} GB/s and {tflops:,g} TFLOP/s{besides}"


def _random(cells: list[Cell]) -> Notice | None:
    """Of measured cells alone: a simulation has no weights."""
    kinds = distinct((row for cell in cells if not cell.simulated for row in cell.rows), "weights")
    if "random" not in kinds:
        return None
    some = " in some cells" if len(kinds) > 1 or any(cell.simulated for cell in cells) else ""
    return Notice(
        f"Random weights{some}.",
        "Speed and memory are those of the real architecture; the text it writes is noise, so "
        "nothing here says anything about quality.",
    )
