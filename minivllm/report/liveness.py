"""Whether a knob did anything, by the counters that it keeps of its own work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minivllm.report.cells import Cell, show
from minivllm.report.format import sig
from minivllm.report.rows import below, differing

# Groups whose options are optimisations of the engine and count their own work.
LIVE_GROUPS = ("quant", "attention", "batching", "cache", "decoding", "runtime")
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
    "decoding.beam_width": ("decoding.beam_rounds", "batching.forks"),
    "decoding.deadline_ms": ("batching.requests_shed", "batching.requests_overtaken"),
    "decoding.n": ("batching.forks",),
    "decoding.priority": ("batching.requests_overtaken",),
    "runtime.compile": ("runtime.compiled",),
    "runtime.cpu_kernels": ("runtime.cpu_kernels",),
    "runtime.cuda_graphs": ("runtime.graph_replays",),
    "runtime.fused_kernels": ("runtime.modules_fused", "decoding.drawn_fused"),
    "runtime.linear_kernel": ("quant.kernels",),
    "runtime.moe": ("runtime.mixtures_grouped",),
    "runtime.native_layers": ("runtime.native_layers",),
    "runtime.overlap": ("runtime.overlap_steps",),
    "runtime.trim_last_layer": ("runtime.rows_trimmed",),
}
# Knobs whose work no counter shows, whatever has moved.
UNCOUNTED = {
    *("attention.split_size", "cache.offload_dir", "quant.threshold"),
    *("runtime.device", "runtime.threads", "runtime.cores", "runtime.determinism", "runtime.profile"),
    *("decoding.seed", "decoding.early_stopping", "decoding.length_penalty", "decoding.logprobs"),
    *(
        "decoding.prompt_logprobs",
        "decoding.max_tokens",
        "decoding.stop",
        "decoding.stop_token_ids",
        "decoding.ignore_eos",
    ),
}


@dataclass(frozen=True)
class Liveness:
    """Whether a knob that differs from the baseline's did anything, by its own counters."""

    label: str
    option: str  # as one writes it: "quant=nf4", "cache.block_size=32"
    counters: str  # of a live one those that moved
    baseline: str
    verdict: str  # "live" | "not live" | "not counted"


def liveness(cells: list[Cell]) -> list[Liveness]:
    """Did the counters move, in each cell and each engine group that differ from the first cell?"""
    if len(cells) < 2:
        return []
    base, found = cells[0], []
    if not base.ok:
        return []
    moving = differing([cell.timed[0] for cell in cells if cell.ok])
    parts = [name.split(".") for name in moving if name.startswith(("config.", "choices."))]
    groups = [group for group in LIVE_GROUPS if any(part[1] == group for part in parts)]
    told = {group: (_knobs(base, group), _counters(base, group)) for group in groups}
    for cell in cells[1:]:
        for group in groups if cell.ok else ():
            knobs, (at_first, theirs) = _knobs(cell, group), told[group]
            if knobs == at_first:
                continue
            mine = _counters(cell, group)
            changed = _changed(group, knobs, at_first)
            names = {name.partition("=")[0] for name in changed}
            if names <= DECISIVE.keys():
                paths = {path for name in names for path in DECISIVE[name]}
                mine, theirs = _decisive(cell, paths), _decisive(base, paths)
            if names <= UNCOUNTED or not (mine or theirs):
                state = "not counted"
            else:
                state = "not live" if mine == theirs else "live"
            if state == "live":  # by what moved; the others would hide it
                moved = [k for k in mine | theirs if mine.get(k) != theirs.get(k)]
                mine, theirs = ({k: c[k] for k in moved if k in c} for c in (mine, theirs))
            option = ", ".join(changed)
            found.append(Liveness(cell.label, option, _listed(mine), _listed(theirs), state))
    return found


def _knobs(cell: Cell, group: str) -> dict[str, str]:
    """The knobs of a group as one writes them, and under "" the option."""
    knobs = below(cell.timed[0], f"config.{group}")
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
    counters = below(cell.timed[0], f"liveness.{group}")
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
