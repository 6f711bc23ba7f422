"""What each optimisation is worth: the verdict of an ablation as words, a table, and figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.analysis import ranking
from minivllm.analysis.ablation.findings import Analysis, Attribution, Effect
from minivllm.analysis.cell import Cell
from minivllm.analysis.format import (
    MISSING,
    count,
    cut,
    interval,
    listing,
    p_value,
    ratio,
    sig,
    spanned,
    whole_percent,
)
from minivllm.report.figures import opening
from minivllm.report.figures.chart import Chart, Series
from minivllm.report.figures.opening import greatest_first, ratio_panel, ratio_rows
from minivllm.report.figures.palette import (
    BETTER,
    FAINT,
    INK,
    LIGHT,
    NEUTRAL,
    SLATE,
    WORSE,
)
from minivllm.report.figures.render import Described, Plot
from minivllm.report.figures.style import (
    Drawing,
    Sheet,
    beside,
    canvas,
    plain_ticks,
    rows_axis,
    short,
)
from minivllm.report.html import Conclusion
from minivllm.report.inputs import ReportInputs
from minivllm.report.sections import place_of
from minivllm.report.studies.base import Study
from minivllm.report.studies.effects import (
    blocks_text,
    effects_table,
    every_effect,
    markdown_text,
    together,
)
from minivllm.report.verdict import remarks

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

NAMES = {**ranking.NAMES, "energy.joules_per_output_token": "J/token"}
TONES = {
    "faster": "ok",
    "slower": "failed",
    "more together": "ok",
    "less together": "failed",
    "failed": "failed",
    "none": "neutral",
}
COLOURS = {"faster": BETTER, "slower": WORSE, "none": NEUTRAL, "failed": WORSE}
TINGES = {
    "faster": "better",
    "slower": "worse",
    "more together": "better",
    "less together": "worse",
}  # of a ratio, whichever way its metric is better
DESIGNS = {
    "leave_one_out": "each optimisation taken out of all of them",
    "add_one_in": "each optimisation added to none of them",
    "pairs": "each optimisation and each pair of them added to none",
    "factorial": "every combination of the optimisations",
}


class AblationStudy(Study[Analysis]):
    """What each optimisation is worth."""

    name = "ablation"
    title = "What is each optimisation worth?"
    leads = True
    template = "ablation"
    figure_names = ("forest", "waterfall")
    file_names = ("effects.md",)

    def find(self, inputs: ReportInputs) -> Analysis | None:
        """The analysis of the records' ablation; None where there is none. See `analyse`."""
        if not any(row.get("ablation.design") for row in inputs.rows):
            return None
        # with scipy: a second that other reports are spared
        from minivllm.analysis.ablation.effects import analyse

        return analyse(inputs.rows, inputs.planned)

    def conclusion(self, result: Analysis, inputs: ReportInputs) -> Conclusion:
        return verdict(result, inputs.cells)

    def picture(self, result: Analysis, inputs: ReportInputs) -> Chart | None:
        """A row an optimisation, the greatest effect first."""
        rows = ratio_rows(result.effects, lambda e: e.name, lambda e: ratio(e.ratio), COLOURS)
        label = f"{metric_name(result.metric)}, with / without"
        caption = "The ratio of the typical block, and its 95 % interval."
        return opening.forest(self.title, greatest_first(rows), label, caption, even=1.0)

    def statements(self, result: Analysis, inputs: ReportInputs) -> list[str]:
        """Which effects do not multiply, and the notes of the analysis."""
        return [*together(result), *result.notes]

    def tables(self, result: Analysis, inputs: ReportInputs) -> list[Table]:
        """A line for each optimisation."""
        return [effects_table(result)]

    def files(self, result: Analysis, inputs: ReportInputs) -> dict[str, str]:
        """effects.md: the same lines."""
        return {"effects.md": markdown_text(result)}

    def figures(self, result: Analysis, inputs: ReportInputs) -> list[Described | None]:
        """The forest of effects, and the waterfall where a factorial attributes the whole."""
        return [forest(result), waterfall(result.attribution) if result.attribution else None]

    def section(
        self, result: Analysis, inputs: ReportInputs, plots: list[Plot], out_dir: Path
    ) -> dict[str, Any]:
        return section(result, inputs.cells, plots, out_dir)


def metric_name(metric: str) -> str:
    """A metric as one says it."""
    return NAMES.get(metric, metric)


def verdict(analysis: Analysis, cells: list[Cell]) -> Conclusion:
    """What each optimisation gives, with its interval, then what is not decided."""
    name = metric_name(analysis.metric)
    ranked = sorted(
        (e for e in analysis.effects if e.verdict in ("faster", "slower") and e.ratio),
        key=lambda e: -_gain(e, analysis),
    )
    effect_texts = [f"{e.name} {spanned(e.ratio, e.low, e.high)}{_busy(e)}" for e in ranked]
    if effect_texts:
        headline = f"What each optimisation is worth in {name}: {'; '.join(effect_texts)}."
    elif _undecidable(analysis):
        most = max(e.blocks for e in analysis.effects if e.verdict == "too few blocks")
        headline = (
            "Too few blocks for any verdict: over "
            f"{count(len(analysis.effects), 'optimisation')} it takes {analysis.blocks_needed}, "
            f"and there {'is' if most == 1 else 'are'} {most}."
        )
    else:
        headline = f"No optimisation is shown to change {name}."
    lines = []
    for state, text in (
        ("none", "None"),
        ("not live", "Not live, so not a result"),
        ("apart", "Measured at other times, so not a result"),
        ("failed", "Failed"),
        ("not measured", "Not measured yet"),
        ("too few blocks", "Too few blocks for a verdict"),
    ):
        if names := [_undecided(e) for e in analysis.effects if e.verdict == state]:
            lines.append(f"{text}: {listing(names, 8)}.")
    if whole := analysis.attribution:
        total = spanned(whole.total, whole.low, whole.high)
        lines.append(f"All of them together: {total} against none of them.")
    lines += [*together(analysis), *analysis.notes, *remarks(cells)]
    return Conclusion(headline, list(dict.fromkeys(lines)))


def _busy(effect: Effect) -> str:
    """What has to stand beside an effect whose arms met other processes."""
    return f" ({effect.busy} of {count(effect.blocks, 'block')} busy)" if effect.busy else ""


def _undecidable(analysis: Analysis) -> bool:
    """Whether nothing could have been found: of so few blocks `none` would not be a finding
    either."""
    states = {effect.verdict for effect in analysis.effects}
    return "too few blocks" in states and "none" not in states


def _gain(effect: Effect, analysis: Analysis) -> float:
    """How much better, whichever way is better."""
    value = effect.ratio or 1.0
    return value if analysis.direction == "higher" else 1 / value


def _undecided(effect: Effect) -> str:
    if effect.verdict != "none" or effect.minimum_detectable is None:
        return effect.name
    return f"{effect.name} (found from {sig(100 * effect.minimum_detectable, 2)} %)"


def section(
    analysis: Analysis, cells: list[Cell], plots: list[Plot], out_dir: Any
) -> dict[str, Any]:
    """The section as plain data for its template."""
    places = {
        cell.arm: place_of(cell, i, out_dir)
        for i, cell in enumerate(cells)
        if cell.ok and cell.sweep == analysis.sweep
    }
    others = list(dict.fromkeys(e.metric for e in analysis.others))
    return {
        "design": DESIGNS.get(analysis.design, analysis.design),
        "metric": metric_name(analysis.metric),
        "better": "above 1 is better" if analysis.direction == "higher" else "below 1 is better",
        "baseline": analysis.baseline,
        "blocks": count(analysis.blocks, "block"),
        "needed": analysis.blocks_needed if analysis.blocks < analysis.blocks_needed else None,
        "noise": analysis.noise
        and spanned(analysis.noise.ratio, analysis.noise.low, analysis.noise.high),
        "others": [metric_name(m) for m in others],
        "rows": _effect_rows(analysis, others, places),
        "interactions": _interaction_rows(analysis),
        "plots": plots,
    }


def _effect_rows(
    analysis: Analysis, others: list[str], places: dict[str, str | None]
) -> list[dict[str, Any]]:
    """A row for each optimisation; `others` are the further metrics, `places` where an arm's
    records are."""
    further = {(e.name, e.metric): e for e in analysis.others}
    return [
        {
            "name": e.name,
            "verdict": e.verdict,
            "reason": e.reason,
            "tone": TONES.get(e.verdict, "mixed"),
            "sort": e.ratio,
            "ratio": ratio(e.ratio),
            "interval": interval(e.low, e.high),
            "p": p_value(e.p_holm),
            "least": MISSING
            if e.minimum_detectable is None
            else f"{sig(100 * e.minimum_detectable, 2)}",
            "blocks": blocks_text(e),
            "same": whole_percent(e.same_tokens),
            "arms": [(arm, places.get(arm)) for arm in (e.arm, e.against)],
            "pairs": e.pairs,
            "tinge": TINGES.get(e.verdict, ""),
            "others": [_other(further.get((e.name, m))) for m in others],
        }
        for e in every_effect(analysis)
    ]


def _interaction_rows(analysis: Analysis) -> list[dict[str, Any]]:
    """A row for each two optimisations."""
    return [
        {
            "names": f"{i.first} with {i.second}",
            "verdict": i.verdict,
            "reason": i.reason,
            "tone": TONES.get(i.verdict, "mixed"),
            "tinge": TINGES.get(i.verdict, ""),
            "sort": i.ratio,
            "ratio": ratio(i.ratio),
            "interval": interval(i.low, i.high),
            "p": p_value(i.p_holm),
        }
        for i in analysis.interactions
    ]


def _other(effect: Effect | None) -> dict[str, Any]:
    """A further metric's entry, in the colour of its own verdict."""
    if effect is None:
        return {"text": MISSING, "interval": "", "tinge": "", "sort": None}
    ends = "" if effect.low is None else interval(effect.low, effect.high)
    tinge = TINGES.get(effect.verdict, "")
    return {"text": ratio(effect.ratio), "interval": ends, "tinge": tinge, "sort": effect.ratio}


def forest(analysis: Analysis) -> Chart | None:
    """Each optimisation's ratio with its interval, over the band of the A/A arm."""
    known = [e for e in analysis.effects if e.ratio is not None]
    if not known:
        return None
    noise, band = analysis.noise, None
    if noise and noise.low is not None and noise.high is not None:
        ends = cut([noise.low, noise.high])
        band = Series("A/A: the baseline against itself", LIGHT, ends, [], "band")

    def words(effect: Effect) -> str:
        span = spanned(effect.ratio, effect.low, effect.high)
        return f"{effect.name}: {span}, {count(effect.blocks, 'block')}"

    name = metric_name(analysis.metric)
    rows = ratio_rows(known, lambda effect: short(effect.name, 30), words, COLOURS)
    panel = ratio_panel(rows, f"{name}, with / without (log scale)", band)
    texts = [f"{e.name} {spanned(e.ratio, e.low, e.high)}" for e in known]
    alt = f"Forest plot of {count(len(known), 'optimisation')} in {name}: {listing(texts, 12)}."
    caption = (
        "Ratios of the typical block with 95 % intervals, beside that of the A/A arm. The verdict "
        "is that of the test, after correction for the number of optimisations; what is no larger "
        "than the A/A arm's difference is none."
    )
    return Chart("forest", "Which effects are real?", alt, caption, [("", [panel])])


def waterfall(whole: Attribution) -> Drawing:
    """The whole change as a product of factors, one bar from where the last one ended."""
    names = ["none of them", *(short(factor.name, 30) for factor in whole.factors), "all of them"]

    def draw(sheet: Sheet) -> Figure:
        figure, ax = canvas(height=sheet.height(len(names)), sheet=sheet)
        half, reached = sheet.bar / 2, 1.0
        ax.plot([1.0, 1.0], [-half, half], color=INK, lw=2)
        for y, factor in enumerate(whole.factors, 1):
            until = reached * factor.ratio
            tint = BETTER if factor.ratio > 1 else WORSE if factor.ratio < 1 else NEUTRAL
            ax.barh(y, until - reached, left=reached, height=sheet.bar, color=tint)
            ax.plot([until, until], [y - half, y + 1 + half], color=FAINT, lw=0.8)
            beside(ax, max(reached, until), y, spanned(factor.ratio, factor.low, factor.high))
            reached = until
        last = len(names) - 1
        ax.barh(last, whole.total - 1, left=1.0, height=sheet.bar, color=SLATE)
        beside(ax, max(1.0, whole.total), last, spanned(whole.total, whole.low, whole.high))
        ax.set_xscale("log")
        plain_ticks(ax.xaxis)
        left, right = ax.get_xlim()
        ax.set_xlim(left, right * (right / left) ** (sheet.margin(0.35) - 1))  # room for the labels
        rows_axis(ax, names, sheet)
        ax.set_xlabel(f"{metric_name(whole.metric)} against none of them (log scale)")
        return figure

    texts = [f"{f.name} {spanned(f.ratio, f.low, f.high)}" for f in whole.factors]
    alt = (
        f"Waterfall of {listing(texts, 12)}, which multiply to "
        f"{spanned(whole.total, whole.low, whole.high)}."
    )
    caption = (
        "The factors multiply to the whole. Each is the geometric mean of what the optimisation "
        "gives over every order of switching them on (Shapley values of the logarithm), so that "
        "none is favoured by coming first and nothing is counted twice."
    )
    return Drawing("waterfall", "What is the whole made of?", alt, caption, draw)
