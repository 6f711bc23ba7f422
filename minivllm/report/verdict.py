"""What the records say in sentences, and no more than they say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minivllm.report.cells import DEVICE, Cell, show
from minivllm.report.format import count, listing, ratio, sig
from minivllm.report.precision import headline as quality
from minivllm.report.rows import below, number

THROUGHPUT = "metrics.output_tokens_per_s"
# Groups whose options are optimisations of the engine and count their own work.
LIVE_GROUPS = ("quant", "attention", "batching", "cache", "speculative", "decoding", "runtime", "parallel")
# Knobs whose work one counter shows by itself; others of their group may move for another reason.
DECISIVE = {
    "batching.aging_s": ("batching.requests_overtaken",),
    "batching.chunked_prefill": ("batching.prefill_chunks",),
    "batching.fair_prefill": ("batching.prefill_chunks",),
    "batching.group_by_length": ("batching.requests_overtaken",),
    "batching.max_num_seqs": ("batching.largest_batch",),
    "batching.max_wait_ms": ("batching.waits",),
    "batching.preemption": ("batching.preemptions", "cache.blocks_swapped_out"),
    "batching.prefill_first": ("batching.requests_deferred",),
    "batching.shed": ("batching.requests_shed",),
    "batching.watermark": ("batching.admissions_held",),
    "cache.eviction": ("cache.tokens_evicted", "cache.queries_observed"),
    "cache.eviction_budget": ("cache.tokens_evicted",),
    "cache.eviction_sinks": ("cache.tokens_evicted",),
    "cache.eviction_window": ("cache.tokens_evicted",),
    "cache.kv_dtype": ("cache.kv_bytes_per_token", "cache.kv_dtype"),
    "cache.offload_disk_gb": ("cache.blocks_from_disk",),
    "cache.offload_gb": ("cache.blocks_restored",),
    "cache.prefix_caching": ("cache.prefix_tokens_reused",),
    "cache.swap_space_gb": ("cache.blocks_swapped_out",),
}


@dataclass(frozen=True)
class Verdict:
    """The headline and the lines below it, each a plain sentence."""

    headline: str
    lines: list[str]


@dataclass(frozen=True)
class Liveness:
    """Whether a knob that differs from the baseline's did anything, by its own counters."""

    label: str
    option: str  # as one writes it: "quant=nf4", "cache.block_size=32"
    counters: str
    baseline: str
    verdict: str  # "live" | "not live" | "not counted"


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
        lines = [*_memory(done), *quality(cells), *_failures(cells), *_trust(done)]
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
    lines += _dead(cells) + _failures(cells) + _trust(done)
    return Verdict(headline + ".", lines)


def _ratio(cell: Cell, other: Cell) -> str:
    mine, theirs = cell.mean(THROUGHPUT), other.mean(THROUGHPUT)
    return ratio(mine / theirs) if mine and theirs else "–"


def _intervals(best: Cell, worst: Cell) -> list[str]:
    """Ranges over blocks of the fastest cell and of its ratio to the slowest, same-numbered blocks paired."""
    stat = best.stat(THROUGHPUT)
    if stat is None or not stat.spread:
        return []
    text = f"Over {stat.n} blocks the fastest had {sig(stat.low)} to {sig(stat.high)} tokens/s"
    blocks = {row.get("block"): value for row in worst.ok if (value := number(row.get(THROUGHPUT)))}
    pairs = [
        value / blocks[row.get("block")]
        for row in best.ok
        if (value := number(row.get(THROUGHPUT))) and row.get("block") in blocks
    ]
    if len(pairs) >= 2:
        text += f", block by block {ratio(min(pairs))} to {ratio(max(pairs))} the slowest"
    return [text + "; these are least and greatest, not a confidence interval."]


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
    text = (
        f"{sig(weights / 1e9)} GB, {sig(100 * weights / full)} % of their 16-bit size ({sig(full / 1e9)} GB)"
    )
    if len({round(w) for _, w, _ in known}) == 1:
        return [f"Weights: {text}."] if len(known) == len(done) else []
    sharers = [c.label for c, w, _ in known if w == weights]
    return [f"Smallest weights: {text}, in {listing(sharers, 3)}."]


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
            f"Over {stat.n} blocks {sig(stat.low)} to {sig(stat.high)} tokens/s; "
            "these are least and greatest, not a confidence interval."
        )
    if any(
        str(cell.first("choices.arrival")) in ("poisson", "gamma", "constant", "ramp", "replay")
        for cell in done
    ):
        lines.append(
            "Requests arrived at a set rate, which caps the throughput: compare latencies, not tokens/s."
        )
    return lines


def liveness(cells: list[Cell]) -> list[Liveness]:
    """Did the counters move, in each cell and each engine group that differ from the first cell?"""
    if len(cells) < 2:
        return []
    base, found = cells[0], []
    for cell in cells[1:]:
        if not cell.ok or not base.ok:
            continue
        for group in LIVE_GROUPS:
            knobs = _knobs(cell, group)
            if knobs == _knobs(base, group):
                continue
            mine, theirs = _counters(cell, group), _counters(base, group)
            changed = _changed(group, knobs, _knobs(base, group))
            if all(name.partition("=")[0] in DECISIVE for name in changed):
                paths = {path for name in changed for path in DECISIVE[name.partition("=")[0]]}
                mine, theirs = _decisive(cell, paths), _decisive(base, paths)
            state = "not counted" if not mine and not theirs else "not live" if mine == theirs else "live"
            option = ", ".join(changed)
            found.append(Liveness(cell.label, option, _listed(mine), _listed(theirs), state))
    return found


def _knobs(cell: Cell, group: str) -> dict[str, str]:
    knobs = below(cell.ok[0], f"config.{group}")
    return {k: show(v) for k, v in knobs.items()} | {"": show(cell.first(f"choices.{group}"))}


def _changed(group: str, mine: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """What was set otherwise: the option, or else the knobs of the same option."""
    if mine[""] != theirs[""]:
        return [f"{group}={mine['']}"]
    return [
        f"{group}.{name}={show(mine.get(name))}"
        for name in sorted(mine | theirs)
        if mine.get(name) != theirs.get(name)
    ]


def _counters(cell: Cell, group: str) -> dict[str, Any]:
    """Counters of a group: the mean over blocks for numbers, the first block's for words."""
    counters = below(cell.ok[0], f"liveness.{group}")
    for name in counters:
        mean = cell.mean(f"liveness.{group}.{name}")
        counters[name] = round(mean, 9) if mean is not None else counters[name]
    return counters


def _decisive(cell: Cell, paths: set[str]) -> dict[str, Any]:
    """The counters of these names, those that were counted."""
    every = {group: _counters(cell, group) for group in {path.partition(".")[0] for path in paths}}
    parted = [path.partition(".") for path in sorted(paths)]
    return {name: every[group][name] for group, _, name in parted if name in every[group]}


def _listed(counters: dict[str, Any]) -> str:
    shown = (f"{k} {_counter(v)}" for k, v in sorted(counters.items()))
    return ", ".join(shown) or "none"


def _counter(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() else sig(value, 4)
    return str(value)
