"""What a step costs as more requests share it and as their context grows, beside the least that it
can cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minivllm.analysis.cell import Cell, Summary
from minivllm.analysis.format import MISSING, listing, ratio, sig
from minivllm.analysis.interleaving import caveat
from minivllm.analysis.rows import number
from minivllm.bench.metrics import roofline
from minivllm.report.figures.chart import Chart, Panel, Series
from minivllm.report.figures.opening import LoadLine, LoadPoint, over_loads
from minivllm.report.figures.palette import FAINT, MIST, SAND, SLATE, TAUPE
from minivllm.report.figures.render import Described
from minivllm.report.figures.style import short
from minivllm.report.html import Conclusion
from minivllm.report.inputs import ReportInputs
from minivllm.report.studies.base import PageTable, Study
from minivllm.report.verdict import remarks

PRESET = "scaling"
REQUESTS, PROMPT = "workload.num_requests", "workload.input_len"
MARGIN = 1.1  # by which a growth has to pass another to be called greater
HEADINGS = (
    "requests",
    "context",
    "time (ms)",
    "least (ms)",
    "× least",
    "limit",
    "grew",
    "least grew",
)


@dataclass(frozen=True)
class Rung:
    """One cell's cost of one kind of step."""

    cell: Cell
    batch: float  # requests of a step
    context: float  # tokens of each of them
    ms: Summary  # mean of a step (of a prompt), over blocks
    least_ms: float | None  # by the measured limits
    limit: str  # which of them: "memory" | "matrix"


@dataclass(frozen=True)
class Ladder:
    """Rungs of which only one size grows."""

    kind: str  # a key of KINDS
    series: str  # what else tells it from other ladders; "" where there is one
    rungs: tuple[Rung, ...]

    def size(self, rung: Rung) -> float:
        """What grows."""
        return rung.batch if self.kind == "batch" else rung.context

    def beyond(self, rung: Rung) -> float:
        """How much the time has grown since the first rung, over what the work or the limits
        explain."""
        first = self.rungs[0]
        explained = self.size(rung) / self.size(first)
        if rung.least_ms and first.least_ms:
            explained = max(explained, rung.least_ms / first.least_ms)
        return rung.ms.mean / first.ms.mean / explained

    def growth(self) -> Iterator[tuple[Rung, Rung, float, float | None]]:
        """Neighbours with the growth of the time and of the least time."""
        for before, after in zip(self.rungs, self.rungs[1:], strict=False):
            least = after.least_ms / before.least_ms if after.least_ms and before.least_ms else None
            yield before, after, after.ms.mean / before.ms.mean, least

    def steep(self) -> list[tuple[Rung, Rung, float, float | None]]:
        """Where the time grew faster than the work did and faster than the limits explain, also
        between the block that was slow before and the one that was fast after."""
        return [
            (before, after, grew, least)
            for before, after, grew, least in self.growth()
            if after.ms.low / before.ms.high
            > MARGIN * max(self.size(after) / self.size(before), least or 0.0)
        ]


KINDS = {
    "batch": ("A decode step by its requests", "requests in the step"),
    "context": ("A decode step by its context", "tokens of context"),
    "prompt": ("A prompt by its length", "tokens of the prompt"),
}


class ScalingStudy(Study[list[Ladder]]):
    """How the cost grows with the work."""

    name = "scaling"
    title = "How does the cost grow with the work?"
    page_title = "How does the cost of {model} grow with the work?"
    leads = True
    figure_names = ("scaling",)
    file_names = ("scaling.md",)

    def find(self, inputs: ReportInputs) -> list[Ladder] | None:
        return ladders(inputs.cells) or None

    def conclusion(self, result: list[Ladder], inputs: ReportInputs) -> Conclusion:
        steep = [_title(ladder) for ladder in result if ladder.steep()]
        if steep:
            headline = f"Super-linear beyond the limits: {listing(steep)}."
        else:
            headline = "No cost grows faster than the work and the limits explain."
        return Conclusion(headline, remarks(inputs.cells))

    def picture(self, result: list[Ladder], inputs: ReportInputs) -> Chart | None:
        """How the time of each ladder grows beyond what its work and the limits explain."""
        lines = [
            LoadLine.numbered(
                index,
                _title(ladder),
                [
                    LoadPoint(ladder.size(rung) / ladder.size(ladder.rungs[0]), ladder.beyond(rung))
                    for rung in ladder.rungs
                ],
            )
            for index, ladder in enumerate(result)
        ]
        caption = (
            "Growth of the time over that of the work or, where it is more, of the least time by "
            "the limits: above 1 the time grows faster than they explain."
        )
        panels = [("", "time / limit, first = 1", lines)]
        return over_loads(self.title, panels, "work, first = 1", caption, even=1.0)

    def figures(self, result: list[Ladder], inputs: ReportInputs) -> list[Described | None]:
        return [figure(result)]

    def section_statements(self, result: list[Ladder], inputs: ReportInputs) -> list[str]:
        """What each ladder comes to."""
        return statements(result)

    def page_tables(self, result: list[Ladder], inputs: ReportInputs) -> list[PageTable]:
        """A table a ladder."""
        return [PageTable(_title(ladder), HEADINGS, rows(ladder)) for ladder in result]


def ladders(cells: list[Cell]) -> list[Ladder]:
    """Every ladder of the cells of the study; empty where they are of none."""
    mine = [cell for cell in cells if cell.ok and cell.first("choices.preset") == PRESET]
    # What tells these ladders apart; other cells beside them may vary in more.
    apart = [
        key
        for key in (mine[0].varying if mine else ())
        if key not in (REQUESTS, PROMPT) and len({cell.varying[key] for cell in mine}) > 1
    ]
    groups: dict[str, list[Cell]] = {}
    for cell in mine:
        rest = [f"{key}={cell.varying[key]}" for key in apart]
        groups.setdefault(" ".join(rest), []).append(cell)
    kept_ladders = []
    for series, members in groups.items():
        decode, prefill = (
            [rung for cell in members if (rung := make(cell)) is not None]
            for make in (_decode, _prefill)
        )
        alone = _shared(members, REQUESTS)
        for kind, rungs, fixed in (
            ("batch", decode, _shared(members, PROMPT)),
            ("context", decode, alone),
            ("prompt", prefill, alone),
        ):
            key, value = fixed
            kept = [rung for rung in rungs if rung.cell.first(f"config.{key}") == value]
            if len(kept) > 1:
                ladder = Ladder(kind, series, tuple(kept))
                kept_ladders.append(replace(ladder, rungs=tuple(sorted(kept, key=ladder.size))))
    return kept_ladders


def _shared(cells: Sequence[Cell], key: str) -> tuple[str, Any]:
    """A knob with its least value: what a ladder of the other one keeps."""
    values = [value for cell in cells if (value := number(cell.first(f"config.{key}"))) is not None]
    return key, min(values, default=None)


def _rung(cell: Cell, kind: str, number_of: float, batch: float, context: float) -> Rung | None:
    """Of totals over a window, `number_of` steps or prompts."""
    seconds = cell.summary(f"roofline.{kind}_s")
    if seconds is None or not seconds.mean or not number_of:
        return None
    scale = 1e3 / number_of
    limits = {}
    for name, work, rate in (
        ("memory", "bytes", "bandwidth_bytes_per_s"),
        ("matrix", "flops", "matrix_flops_per_s"),
    ):
        done, most = cell.mean(f"roofline.{kind}_{work}"), cell.mean(f"roofline.{rate}")
        if done and most:
            limits[name] = done / most * scale
    limit = max(limits, key=lambda name: limits[name], default="")
    ms = Summary(seconds.mean * scale, seconds.low * scale, seconds.high * scale, seconds.n)
    return Rung(cell, batch, context, ms, limits.get(limit), limit)


def _decode(cell: Cell) -> Rung | None:
    """The steps that only decode and have a time of their own, as many in each block as in the
    first."""
    columns = ["num_requests", "num_tokens", "num_prefill_tokens", "context_tokens"]
    frame = next(cell.frames("steps.parquet", [*columns, "gap_ms"], columns), None)
    if frame is None:
        return None
    steps = frame.iloc[roofline.timed(frame.to_dict("records"), roofline.decodes, _overlaps(cell))]
    if not len(steps):
        return None
    batch = float(steps["num_requests"].mean())
    return _rung(cell, "decode", len(steps), batch, float(steps["context_tokens"].mean()) / batch)


def _prefill(cell: Cell) -> Rung | None:
    """The prompts, none of which has a time of its own where steps overlap."""
    requests, tokens = cell.mean("metrics.num_requests"), cell.mean("metrics.input_tokens")
    if not requests or not tokens or _overlaps(cell):
        return None
    return _rung(cell, "prefill", requests, 1, tokens / requests)


def _overlaps(cell: Cell) -> bool:
    return bool(cell.mean("liveness.runtime.overlap_steps"))


def statements(result: Sequence[Ladder]) -> list[str]:
    """What each ladder comes to, and where it is steeper than work and limits."""
    lines = []
    for ladder in result:
        first, last = ladder.rungs[0], ladder.rungs[-1]
        grew = last.ms.mean / first.ms.mean
        text = (
            f"{_title(ladder)}: {sig(first.ms.mean)} ms at {_size(ladder.size(first))}, "
            f"{sig(last.ms.mean)} ms at {_size(ladder.size(last))}: {ratio(grew)} the time for "
            f"{ratio(ladder.size(last) / ladder.size(first))} the work"
        )
        if first.least_ms and last.least_ms:
            text += f", where the limits ask for {ratio(last.least_ms / first.least_ms)}"
        steep = [
            f"from {_size(ladder.size(before))} to {_size(ladder.size(after))} ({ratio(times)} "
            "the time"
            + (f", limits {ratio(least)})" if least else ")")
            + caveat(before.cell, after.cell)
            for before, after, times, least in ladder.steep()
        ]
        where = (
            f"Super-linear beyond the limits {listing(steep)}"
            if steep
            else "Nowhere super-linear beyond the limits"
        )
        lines.append(f"{text}. {where}.")
    return lines


def _size(value: float) -> str:
    """Requests or tokens; means over steps need not be whole."""
    return f"{value:,.0f}" if abs(value - round(value)) < 0.005 else sig(value)


def _title(ladder: Ladder) -> str:
    return f"{KINDS[ladder.kind][0]}{', ' * bool(ladder.series)}{ladder.series}"


def rows(ladder: Ladder) -> list[list[str]]:
    """The rungs under HEADINGS."""
    growth = {id(after): (grew, least) for _, after, grew, least in ladder.growth()}
    return [
        [
            _size(rung.batch),
            _size(rung.context),
            sig(rung.ms.mean),
            sig(rung.least_ms),
            ratio(rung.ms.mean / rung.least_ms if rung.least_ms else None),
            rung.limit or MISSING,
            *(ratio(value) for value in growth.get(id(rung), (None, None))),
        ]
        for rung in ladder.rungs
    ]


def figure(result: Sequence[Ladder]) -> Chart:
    """A panel a kind: the time, and dashed the least time."""
    names = dict.fromkeys(ladder.series for ladder in result)
    # further ones are in the tables
    colours = dict(zip(names, (SLATE, TAUPE, MIST, SAND), strict=False))
    panels = []
    for kind, (title, x_label) in KINDS.items():
        series = []
        for ladder in result:
            if ladder.kind == kind and ladder.series in colours:
                series += _curves(ladder, colours[ladder.series])
        if series:
            panels.append(
                Panel(title, f"{x_label} (log scale)", "ms (log scale)", series, True, True)
            )
    caption = (
        "The dashed line is the least time: bytes at the measured bandwidth or operations at "
        "the measured matrix rate, whichever takes longer. Parallel lines are a constant share "
        "of the limit; a line that is steeper loses it."
    )
    return Chart(
        "scaling",
        "How does the cost grow with the work?",
        " ".join(statements(result)),
        caption,
        [("", panels)],
    )


def _curves(ladder: Ladder, colour: str) -> list[Series]:
    name = short(ladder.series or "measured", 60)
    xs = [ladder.size(rung) for rung in ladder.rungs]
    words = [
        f"{_size(x)}: {sig(rung.ms.mean)} ms" for x, rung in zip(xs, ladder.rungs, strict=True)
    ]
    times = [rung.ms.mean for rung in ladder.rungs]
    drawn = [
        Series(name, colour, xs, times, "line"),
        Series("", colour, xs, times, names=words),
    ]
    known = [(x, rung.least_ms) for x, rung in zip(xs, ladder.rungs, strict=True) if rung.least_ms]
    if known:
        drawn.append(
            Series(
                "least time",
                FAINT,
                [x for x, _ in known],
                [y for _, y in known],
                "line",
                dashed=True,
            )
        )
    return drawn
