"""What the records say in sentences, and no more than they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from minivllm.analysis.ablation import factors
from minivllm.analysis.cell import Cell
from minivllm.analysis.format import count, in_cells, listing, sig
from minivllm.analysis.interleaving import caveat
from minivllm.analysis.levels import apart
from minivllm.analysis.liveness import Liveness, liveness
from minivllm.analysis.moved import changed_weights, sentences
from minivllm.analysis.ranking import rank
from minivllm.analysis.rows import number, reason_of
from minivllm.bench.metrics.telemetry_validity import TAKEN, taken_words
from minivllm.config.groups import OPTIONS
from minivllm.report.figures.chart import Chart
from minivllm.report.figures.plots import THROUGHPUT
from minivllm.report.html import Conclusion
from minivllm.report.ranking import (
    NO_INTERVAL,
    by_latency,
    by_throughput,
    not_like_for_like,
    range_text,
)
from minivllm.report.sections import MOST_GROUPS, not_told_apart
from minivllm.report.studies.precision import headline as quality
from minivllm.report.sweeps import levels, loads, precisions
from minivllm.report.sweeps.picture import of_ranking

# weights that differ by less are those of one precision: engines count buffers differently
ALIKE = 1.01


def verdict(cells: list[Cell], knobs: Sequence[Liveness] | None = None) -> Conclusion:
    """Which cell leads, against baseline and the last, memory, failures, and how far to trust
    it."""
    done = [cell for cell in cells if cell.summary(THROUGHPUT)]
    if not done and (words := quality(cells)):
        return Conclusion(words[0], _failures(cells))
    if not done and len(cells) == 1 and not cells[0].ok and not cells[0].absent:
        status = cells[0].status_text
        how = "is invalid" if status == "invalid" else f"failed ({status})"
        reason = reason_of(cells[0].failed[0]).partition("\n")[0].rstrip(".")
        return Conclusion(f"The only cell {how}: {reason}.", [])
    if not done:
        what = "The only cell" if len(cells) == 1 else f"Every one of the {len(cells)} cells"
        ran = any(cell.ok for cell in cells)
        return Conclusion(
            f"{what} {'has no throughput' if ran else 'failed'}: there is nothing to compare.",
            _failures(cells),
        )
    if len(done) == 1:
        cell = done[0]
        headline = f"{cell.label}: {sig(cell.mean(THROUGHPUT))} output tokens/s"
        for key, name in (("metrics.ttft_ms.p50", "TTFT"), ("metrics.itl_ms.p50", "ITL")):
            value = cell.mean(key)
            headline += "" if value is None else f", median {name} {sig(value)} ms"
        lines = [
            *_memory(done),
            *quality(cells),
            *_failures(cells),
            *doubts(cells),
            *_trust(done),
        ]
        return Conclusion(headline + caveat(cell) + ".", lines)
    headline, lines = by_latency(done, cells[0]) or by_throughput(done, cells[0])
    if (found := answer(cells)) is not None:
        ranked = [headline, *lines]
        headline, is_ranked = found
        lines = ranked if is_ranked else not_like_for_like(done)
    lines += factors.sentences(cells) + _memory(done) + quality(cells)
    known = liveness(cells) if knobs is None else knobs
    lines += _dead(known) + _uncounted(cells[0], known) + one_configuration(cells)
    lines += _failures(cells) + doubts(cells) + _trust(done)
    return Conclusion(headline, lines)


def answer(cells: Sequence[Cell]) -> tuple[str, bool] | None:
    """The answer of a plain sweep: which precision, which option for which load, or what the load
    changes, and whether a ranking of all cells says something besides; None where that is the
    answer."""
    if (found := precisions.precisions(cells)) is not None:
        return precisions.sentence(found), False
    of_levels = levels.levels_of(cells)
    if of_levels is not None and (of_levels.is_load or len(levels.runs(of_levels)) > 1):
        return levels.sentence(of_levels), not of_levels.is_load
    if (of_load := loads.load_sweep(cells)) is not None and (text := loads.sentence(of_load)):
        return text, False
    return None


def picture(cells: Sequence[Cell]) -> Chart | None:
    """What the headline of a sweep says, drawn; None for a lone cell, and where no cell has a
    figure."""
    if (found := precisions.precisions(cells)) is not None:
        return precisions.picture(found)
    return of_ranking(cells)


def remarks(cells: list[Cell], knobs: Sequence[Liveness] = ()) -> list[str]:
    """What is worth knowing besides who is fastest: memory, quality, knobs that did nothing,
    failures, and a busy machine."""
    weighed = _memory([cell for cell in cells if cell.summary(THROUGHPUT)])
    known = weighed + quality(cells) + _dead(knobs) + one_configuration(cells)
    return known + _failures(cells) + doubts(cells)


def one_configuration(cells: list[Cell]) -> list[str]:
    """Which cells no counter tells apart, though each is an arm of its own."""
    lines = not_told_apart(cells)
    if len(lines) <= MOST_GROUPS:
        return lines
    return [
        f"{len(lines)} groups of cells may each have run as one configuration: no counter tells "
        "theirs apart."
    ]


def doubts(cells: list[Cell]) -> list[str]:
    """Why figures may not be what they seem: blocks that are missing or lie apart, weights and
    counters that changed though nobody set them, a busy machine."""
    moved = changed_weights(cells) + sentences(cells)
    return incomplete(cells) + apart(cells) + moved + busy(cells)


def with_others(conclusion: Conclusion, cells: Sequence[Cell]) -> Conclusion:
    """The conclusion with what other processes took of the processor time, where it was much, in
    its headline."""
    words = _taken(cells)
    if words is None:
        return conclusion
    headline = f"{conclusion.headline} Meanwhile other processes took {words}."
    return replace(conclusion, headline=headline)


def _taken(cells: Sequence[Cell]) -> str | None:
    """What other processes took of the processor time of the cores that the runs use, at most, in
    words; None where it was little, or is not known."""
    rows = [row for cell in cells for row in cell.ok]
    taken = max((number(row.get("validity.cpu_taken")) or 0.0 for row in rows), default=0.0)
    return None if taken < TAKEN else f"{'up to ' * (len(rows) > 1)}{taken_words(taken)}"


def incomplete(cells: list[Cell]) -> list[str]:
    """Which cells have a throughput in some of their good blocks only, so that means are over
    those."""
    lacking = [
        (cell, len(cell.timed) - stat.n)
        for cell in cells
        if (stat := cell.summary(THROUGHPUT)) and stat.n < len(cell.timed)
    ]
    return [
        f"{cell.mention}: no throughput in {missing} of {count(len(cell.timed), 'block')}; means "
        "are over the others."
        for cell, missing in lacking
    ]


def busy(cells: list[Cell]) -> list[str]:
    """That other processes used the machine while cells were measured, if so: they are slower for
    it."""
    timed = [cell for cell in cells if cell.summary(THROUGHPUT)]
    met = [cell for cell in timed if cell.busy]
    if not met:
        return []
    named = listing([cell.mention for cell in met], 4) + (" was" if len(met) == 1 else " were")
    every = "this was" if len(timed) == 1 else "every cell was"
    threads = [
        cell.first("provenance.threads")
        for cell in met
        if cell.first("provenance.device.kind") == "cpu"
    ]
    most = max((int(number) for number in threads if number), default=1)
    # Threads spin where they wait for one another: one whose core is taken holds the others up at
    # every product.
    remedy = (
        f", many times where its {most} threads wait for one that has no core: "
        f"runtime.threads={most - 1} leaves one"
    )
    share = "" if (words := _taken(met)) is None else f" ({words})"
    return [
        f"Other processes used the machine while {every if len(met) == len(timed) else named} "
        f"measured{share}: figures may be worse for it{remedy * (most > 1)}."
    ]


def _memory(done: list[Cell]) -> list[str]:
    weighed = [
        (cell, cell.mean("memory.weights"), cell.mean("memory.weights_16bit")) for cell in done
    ]
    known = [(cell, weights, full) for cell, weights, full in weighed if weights and full]
    # they are those of the checkpoint
    if all(ALIKE * weights > full for _, weights, full in known):
        return []
    _, weights, full = min(known, key=lambda item: item[1])
    others = [cell.mention for cell, w, _ in known if w > ALIKE * weights]
    text = (
        f"{sig(weights / 1e9)} GB, {sig(100 * weights / full)} % of their 16-bit size "
        f"({sig(full / 1e9)} GB)"
    )
    if not others:
        return [f"Weights: {text}."] if len(known) == len(done) else []
    sharers = [cell.mention for cell, w, _ in known if w <= ALIKE * weights]
    most = len(sharers) > 3 and len(others) < len(sharers)
    return [
        f"Smallest weights: {text}, in "
        f"{'all but ' + listing(others, 3) if most else listing(sharers, 3)}."
    ]


def _dead(knobs: Sequence[Liveness]) -> list[str]:
    where: dict[str, list[str]] = {}
    for item in knobs:
        if item.verdict == "not live":
            where.setdefault(item.option, []).append(item.label)
    return [
        f"Not live, so not a result: {in_cells(where)} did no more work than in the first cell."
    ] * bool(where)


def _uncounted(base: Cell, knobs: Sequence[Liveness]) -> list[str]:
    """Knobs of a user's own engine of whose work nothing is known."""
    if base.first("config.engine._target_") in OPTIONS:
        return []
    silent = [item for item in knobs if item.verdict == "not counted"]
    named = [f"{item.option} in {item.label}" for item in silent if item.option[:7] == "engine."]
    return [
        f"Not counted: {listing(named, 4)}; the engine counts nothing that shows whether it did "
        "anything."
    ] * bool(named)


def _failures(cells: list[Cell]) -> list[str]:
    absent = [cell.label for cell in cells if cell.absent]
    lines = [f"Not installed, so not measured: {listing(absent, 4)}."] if absent else []
    failed = [cell for cell in cells if cell.failed and not cell.absent]
    if not failed:
        return lines
    names = listing([f"{cell.label} ({cell.status_text})" for cell in failed], 4)
    return [*lines, f"{len(failed)} of {count(len(cells), 'cell')} had failures: {names}."]


def _trust(done: list[Cell]) -> list[str]:
    lines = []
    measured = [cell for cell in done if not cell.simulated]  # what is simulated has no noise
    blocks = [stat.n for cell in measured if (stat := cell.summary(THROUGHPUT))]
    if blocks and min(blocks) < 2:
        who = (
            "Each cell was"
            if max(blocks) < 2 and len(measured) == len(done) > 1
            else "Some cells were"
            if len(done) > 1
            else "It was"
        )
        lines.append(
            f"{who} measured once, so there is no interval: differences of a few per cent may be "
            "noise. measure.repeats=3 measures three blocks."
        )
    elif len(measured) == len(done) == 1 and (stat := done[0].summary(THROUGHPUT)):
        lines.append(f"Over {stat.n} blocks {range_text(stat)} tokens/s; {NO_INTERVAL}.")
    return [*lines, *rank(done).notes]
