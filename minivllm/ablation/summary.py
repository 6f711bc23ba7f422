"""An ablation's verdicts for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.ablation.findings import Analysis, Effect
from minivllm.report.format import MISSING, ratio, sig

if TYPE_CHECKING:
    from rich.table import Table

COLOURS = {"faster": "green", "slower": "red", "failed": "red", "not live": "yellow"}


def effects_table(analysis: Analysis) -> Table:
    """A line for each optimisation, and one for the A/A arm."""
    from rich.markup import escape
    from rich.table import Column, Table

    names = (
        "optimisation",
        f"{analysis.metric}, with / without",
        "95 %",
        "p (Holm)",
        "blocks",
        "found from",
        "verdict",
    )
    table = Table(*(Column(name, overflow="fold") for name in names))
    for effect in (*analysis.effects, *([analysis.noise] if analysis.noise else [])):
        colour = COLOURS.get(effect.verdict)
        verdict = f"[{colour}]{effect.verdict}[/]" if colour else effect.verdict
        least = effect.minimum_detectable
        table.add_row(
            escape(effect.name),
            ratio(effect.ratio),
            _interval(effect),
            MISSING if effect.p_holm is None else f"{effect.p_holm:.3f}",
            str(effect.blocks),
            MISSING if least is None else f"{sig(100 * least, 2)} %",
            verdict,
        )
    return table


def _interval(effect: Effect) -> str:
    return (
        MISSING if effect.low is None or effect.high is None else f"{sig(effect.low)} to {sig(effect.high)}"
    )
