"""An ablation's verdicts as a table: for the terminal, and as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.analysis import statistics
from minivllm.analysis.ablation.findings import Analysis, Effect
from minivllm.analysis.format import (
    MISSING,
    interval,
    listing,
    p_value,
    ratio,
    sig,
    spanned,
    whole_percent,
)
from minivllm.report.spreadsheet import markdown_table
from minivllm.report.terminal import rich_table

if TYPE_CHECKING:
    from rich.table import Table

COLOURS = {"faster": "green", "slower": "red", "failed": "red"} | dict.fromkeys(
    ("not live", "apart", "not measured"), "yellow"
)


def effects_table(analysis: Analysis) -> Table:
    """A line for each optimisation, and one for the A/A arm."""
    from rich.markup import escape

    first, _, *others, last = _heading(analysis)
    figures = [("with / without", analysis.metric), *((title, "") for title in others)]
    table = rich_table([first], figures, status=last)
    for effect in every_effect(analysis):
        name, *numbers, verdict = _line(effect)
        colour = COLOURS.get(verdict)
        table.add_row(
            escape(name), f"[{colour}]{verdict}[/]" if colour else verdict, *map(escape, numbers)
        )
    return table


def markdown_text(analysis: Analysis) -> str:
    """The same lines in Markdown, with the reason of a verdict that figures seem to deny."""
    first, *others = _heading(analysis)
    lines = [
        [
            *_line(effect)[:-1],
            f"{effect.verdict}: {effect.reason}" if effect.reason else effect.verdict,
        ]
        for effect in every_effect(analysis)
    ]
    return markdown_table([first], others, lines)


def together(analysis: Analysis) -> list[str]:
    """Whether the effects of each two multiply, a sentence for each answer."""
    words = {
        False: "Effects that do not multiply",
        True: f"Effects that multiply, to within {100 * statistics.WITHIN:g} %",
        None: "Not told apart, whether effects multiply",
    }
    names_by_answer: dict[bool | None, list[str]] = {answer: [] for answer in words}
    for one in analysis.interactions:
        if one.ratio is None or one.joint is None:
            continue
        apart = one.verdict in ("more together", "less together")
        answer = False if apart else statistics.multiply(one.ratio, one.low, one.high) or None
        names_by_answer[answer].append(
            f"{one.first} with {one.second} gives {ratio(one.joint)}, "
            f"{spanned(one.ratio, one.low, one.high)} of the product of what each gives alone"
        )
    return [
        f"{words[answer]}: {listing(named, 3)}."
        for answer, named in names_by_answer.items()
        if named
    ]


def every_effect(analysis: Analysis) -> tuple[Effect, ...]:
    """One an optimisation, then that of the A/A arm."""
    return (*analysis.effects, *([analysis.noise] if analysis.noise else []))


def blocks_text(effect: Effect) -> str:
    """Over how many blocks an effect is, and how many of them were busy."""
    return f"{effect.blocks}{f' ({effect.busy} busy)' if effect.busy else ''}"


def _heading(analysis: Analysis) -> list[str]:
    ratios = f"{analysis.metric}, with / without"
    return [
        "optimisation",
        ratios,
        "95 %",
        "p (Holm)",
        "blocks",
        "found from",
        "same outputs",
        "verdict",
    ]


def _line(effect: Effect) -> list[str]:
    least = effect.minimum_detectable
    return [
        effect.name,
        ratio(effect.ratio),
        interval(effect.low, effect.high),
        p_value(effect.p_holm),
        blocks_text(effect),
        MISSING if least is None else f"{sig(100 * least, 2)} %",
        whole_percent(effect.same_tokens),
        effect.verdict,
    ]
