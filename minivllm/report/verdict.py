"""What the records say in sentences, and no more than they say."""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.bench.validity import shared
from minivllm.report.cells import DEVICE, Cell, Stat, set_load, show
from minivllm.report.format import count, listing, ratio, sig
from minivllm.report.liveness import liveness
from minivllm.report.precision import headline as quality
from minivllm.report.rows import number, strings

THROUGHPUT = "metrics.output_tokens_per_s"
ALIKE = 1.01  # weights that differ by less are those of one precision: engines count buffers differently


@dataclass(frozen=True)
class Verdict:
    """The headline and the lines below it, each a plain sentence."""

    headline: str
    lines: list[str]


def verdict(cells: list[Cell]) -> Verdict:
    """Fastest cell against baseline and slowest, memory, failures, and how far to trust it."""
    done = [cell for cell in cells if cell.stat(THROUGHPUT)]
    if not done and (words := quality(cells)):
        return Verdict(words[0], _failures(cells))
    if not done:
        what = "The only cell" if len(cells) == 1 else f"Every one of the {len(cells)} cells"
        ran = any(cell.ok for cell in cells)
        return Verdict(
            f"{what} {'has no throughput' if ran else 'failed'}: there is nothing to compare.",
            _failures(cells),
        )
    if len(done) == 1:
        cell = done[0]
        headline = f"{cell.label}: {sig(cell.mean(THROUGHPUT))} output tokens/s"
        for key, name in (("metrics.ttft_ms.p50", "TTFT"), ("metrics.itl_ms.p50", "ITL")):
            value = cell.mean(key)
            headline += "" if value is None else f", median {name} {sig(value)} ms"
        lines = [*_memory(done), *quality(cells), *_failures(cells), *busy(cells), *_trust(done)]
        return Verdict(headline + ".", lines)
    ranked = sorted(done, key=lambda cell: -(cell.mean(THROUGHPUT) or 0.0))
    best, worst, base = ranked[0], ranked[-1], cells[0]
    headline = f"Fastest: {best.label} at {sig(best.mean(THROUGHPUT))} output tokens/s"
    lines = _not_like_for_like(done)
    if not lines:
        headline += f", {_ratio(best, worst)} the slowest ({worst.label}, {sig(worst.mean(THROUGHPUT))})"
        if base not in done:
            what = "has no throughput" if base.ok else "failed"
            lines.append(f"The first cell ({base.label}) {what}, so there is no baseline to compare with.")
        elif base not in (best, worst):
            lines.append(f"Against the first cell ({base.label}): {_ratio(best, base)} its output tokens/s.")
        elif base is best:
            lines.append(
                "The fastest is the first cell, the baseline: nothing that was varied made it faster."
            )
        lines += _intervals(best, worst)
    lines += _close_second(ranked) + _memory(done) + quality(cells)
    lines += _dead(cells) + _failures(cells) + busy(cells) + _trust(done)
    return Verdict(headline + ".", lines)


def remarks(cells: list[Cell]) -> list[str]:
    """What is worth knowing besides who is fastest: memory, quality, failures, and a busy machine."""
    weighed = _memory([cell for cell in cells if cell.stat(THROUGHPUT)])
    return weighed + quality(cells) + _failures(cells) + busy(cells)


def busy(cells: list[Cell]) -> list[str]:
    """That other processes used the machine while cells were measured, if so: they are slower for it."""
    timed = [cell for cell in cells if cell.stat(THROUGHPUT)]
    met = [cell for cell in timed if any(shared(strings(row.get("validity.notes"))) for row in cell.ok)]
    if not met:
        return []
    named = listing([cell.label for cell in met], 4) + (" was" if len(met) == 1 else " were")
    every = "this was" if len(timed) == 1 else "every cell was"
    return [
        f"Other processes used the machine while {every if len(met) == len(timed) else named} measured: "
        "figures may be worse for it."
    ]


def _ratio(cell: Cell, other: Cell) -> str:
    mine, theirs = cell.mean(THROUGHPUT), other.mean(THROUGHPUT)
    return ratio(mine / theirs) if mine and theirs else "–"


def _intervals(best: Cell, worst: Cell) -> list[str]:
    """Ranges over blocks of the fastest cell and of its ratio to the slowest, same-numbered blocks paired."""
    stat = best.stat(THROUGHPUT)
    if stat is None or not stat.spread:
        return []
    text = f"Over {stat.n} blocks the fastest had {_range(stat)} tokens/s"
    blocks = {row.get("block"): value for row in worst.ok if (value := number(row.get(THROUGHPUT)))}
    pairs = [
        value / blocks[row.get("block")]
        for row in best.ok
        if (value := number(row.get(THROUGHPUT))) and row.get("block") in blocks
    ]
    if len(pairs) >= 2:
        text += f", block by block {ratio(min(pairs))} to {ratio(max(pairs))} the slowest"
    return [text + "; these are least and greatest, not a confidence interval."]


def _range(stat: Stat) -> str:
    """Least and greatest block, once where they read the same."""
    low, high = sig(stat.low), sig(stat.high)
    return low if low == high else f"{low} to {high}"


def _not_like_for_like(done: list[Cell]) -> list[str]:
    """Why throughputs must not be divided by each other, if so."""
    lines = []
    if len({cell.simulated for cell in done}) > 1:
        lines.append("Some cells are measured and some simulated, so no ratio between them is a speed-up.")
    for key, noun in (("workload_hash", "workloads"), (DEVICE, "devices")):
        values = {show(cell.first(key)) for cell in done if cell.first(key) is not None}
        if len(values) > 1:
            lines.append(
                f"The cells ran on different {noun}, so no ratio between them is given as a speed-up."
            )
    if len({set_load(cell) for cell in done}) > 1:
        lines.append(
            "Requests arrived at different rates, so no ratio between the cells is given as a speed-up."
        )
    return lines


def _close_second(ranked: list[Cell]) -> list[str]:
    first, second = ranked[0].stat(THROUGHPUT), ranked[1].stat(THROUGHPUT)
    if first and second and first.spread and second.spread and second.high >= first.low:
        return [f"Not separated from the second, {ranked[1].label}: the ranges over blocks overlap."]
    return []


def _memory(done: list[Cell]) -> list[str]:
    weighed = [(cell, cell.mean("memory.weights"), cell.mean("memory.weights_16bit")) for cell in done]
    known = [(cell, weights, full) for cell, weights, full in weighed if weights and full]
    if not known:
        return []
    _, weights, full = min(known, key=lambda item: item[1])
    others = [cell.label for cell, w, _ in known if w > ALIKE * weights]
    text = (
        f"{sig(weights / 1e9)} GB, {sig(100 * weights / full)} % of their 16-bit size ({sig(full / 1e9)} GB)"
    )
    if not others:
        return [f"Weights: {text}."] if len(known) == len(done) else []
    sharers = [cell.label for cell, w, _ in known if w <= ALIKE * weights]
    most = len(sharers) > 3 and len(others) < len(sharers)
    return [
        f"Smallest weights: {text}, in {'all but ' + listing(others, 3) if most else listing(sharers, 3)}."
    ]


def _dead(cells: list[Cell]) -> list[str]:
    dead = [f"{item.option} in {item.label}" for item in liveness(cells) if item.verdict == "not live"]
    return (
        [f"Not live, so not a result: {listing(dead, 4)} did no more work than in the first cell."]
        if dead
        else []
    )


def _failures(cells: list[Cell]) -> list[str]:
    failed = [cell for cell in cells if cell.failed]
    if not failed:
        return []
    names = listing([f"{cell.label} ({cell.status_text})" for cell in failed], 4)
    return [f"{len(failed)} of {count(len(cells), 'cell')} had failures: {names}."]


def _trust(done: list[Cell]) -> list[str]:
    lines = []
    blocks = [cell.stat(THROUGHPUT).n for cell in done]  # type: ignore[union-attr]
    if min(blocks) < 2:
        who = (
            "Each cell was"
            if max(blocks) < 2 and len(done) > 1
            else "Some cells were"
            if max(blocks) > 1
            else "It was"
        )
        lines.append(
            f"{who} measured once, so there is no interval: differences of a few per cent may be noise. "
            "measure.repeats=3 measures three blocks."
        )
    elif len(done) == 1 and (stat := done[0].stat(THROUGHPUT)):
        lines.append(
            f"Over {stat.n} blocks {_range(stat)} tokens/s; "
            "these are least and greatest, not a confidence interval."
        )
    if any(set_load(cell) is not None for cell in done):
        lines.append(
            "Requests arrived at a set rate, which caps the throughput: compare latencies, not tokens/s."
        )
    return lines
