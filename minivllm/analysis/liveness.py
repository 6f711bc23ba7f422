"""Whether a knob did anything, by the counters that it keeps of its own work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minivllm.analysis.ablation.design import AGAIN
from minivllm.analysis.cell import Cell
from minivllm.analysis.format import show, sig
from minivllm.analysis.rows import below, differing, tells
from minivllm.config.groups import OPTIONS
from minivllm.platform.support import ServerOptions

# Groups whose options are optimisations of the engine and count their own work.
LIVE_GROUPS = (
    *("quant", "pruning", "attention", "batching"),
    *("cache", "decoding", "speculative", "runtime", "parallel"),
)
# Those of them whose counters say all that was done; sizes of weights may be equal by chance.
DONE_GROUPS = ("attention", "batching", "cache", "speculative", "runtime", "parallel")
# Knobs whose work one counter shows by itself; others of their group may move for another reason.
DECISIVE = {
    "batching.aging_s": ("batching.requests_overtaken",),
    "batching.chunked_prefill": ("batching.prefill_chunks", "batching.step_tokens_at_most"),
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
    "decoding.structured_outputs": ("decoding.grammar_masks",),
    "decoding.beam_width": ("decoding.beam_rounds", "batching.forks"),
    "decoding.deadline_ms": ("batching.requests_shed", "batching.requests_overtaken"),
    "decoding.n": ("batching.forks",),
    "decoding.priority": ("batching.requests_overtaken",),
    "parallel.backend": ("parallel.backend",),
    "parallel.disaggregated": ("parallel.tokens_handed_over",),
    "parallel.handover": ("parallel.files_handed_over",),
    "parallel.load_weight": ("parallel.overloads_avoided",),
    "parallel.replicas": ("parallel.replicas",),
    "parallel.router": ("parallel.assignment",),
    "parallel.tensor": ("parallel.ranks", "parallel.collectives"),
    "runtime.compile": ("runtime.compiled",),
    "runtime.cpu_kernels": ("runtime.cpu_kernels",),
    "runtime.cuda_graphs": ("runtime.graph_replays",),
    "runtime.fused_kernels": ("runtime.modules_fused", "decoding.drawn_fused"),
    "runtime.kernel_choice": ("quant.kernels",),
    "runtime.linear_kernel": ("quant.kernels",),
    "runtime.moe": ("runtime.mixtures_grouped",),
    "runtime.native_layers": ("runtime.native_layers",),
    "runtime.overlap": ("runtime.overlap_steps",),
    "runtime.trim_last_layer": ("runtime.rows_trimmed",),
}
# Knobs whose work no counter shows, whatever has moved.
UNCOUNTED = {
    *("attention.split_size", "cache.offload_dir", "quant.threshold"),
    *(
        "runtime.device",
        "runtime.threads",
        "runtime.cores",
        "runtime.determinism",
        "runtime.profile",
    ),
    "runtime.passes",  # a user's own: their counters have their names
    *("decoding.seed", "decoding.early_stopping", "decoding.length_penalty", "decoding.logprobs"),
    *(
        "decoding.prompt_logprobs",
        "decoding.max_tokens",
        "decoding.stop",
        "decoding.stop_token_ids",
        "decoding.ignore_eos",
    ),
}
# Options of which no counter shows what they do; those of their group may be equal by chance.
UNCOUNTED_OPTIONS = {"batching=static"}  # the requests that wait for a batch to end


@dataclass(frozen=True)
class Liveness:
    """Whether a knob that differs from the baseline's did anything, by its own counters."""

    label: str
    option: str  # as one writes it: "quant=nf4", "cache.block_size=32"
    mine: dict[str, Any]  # counters; of a live one those that moved
    theirs: dict[str, Any]  # the baseline's
    verdict: str  # "live" | "not live" | "not counted"

    @property
    def counters(self) -> str:
        """What the cell counted, in words."""
        return _listed(self.mine)

    @property
    def baseline(self) -> str:
        """What the baseline counted."""
        return _listed(self.theirs)


def liveness(cells: list[Cell]) -> list[Liveness]:
    """Did the counters move, in each cell and each engine group that differ from the first cell?"""
    if len(cells) < 2:
        return []
    base, results = cells[0], []
    if not base.ok:
        return []
    groups = (*LIVE_GROUPS, "engine")
    prefixes = [name for group in groups for name in (f"config.{group}.", f"choices.{group}")]
    moving = differing([cell.timed[0] for cell in cells if cell.ok], tuple(prefixes))
    settings = {group: _settings(moving, group) for group in groups}
    server = _server(base)
    if base.simulated or "choices.engine" in moving:
        del settings["engine"]  # what a simulation goes by, or all that two engines differ in
    for cell in cells[1:]:
        for group, fields in settings.items() if cell.ok else ():
            reported = _reported_by_both(fields, base, cell)
            knobs, at_first = _knobs(cell, reported), _knobs(base, reported)
            if knobs == at_first:
                continue
            changed = _changed(group, knobs, at_first)
            names = {name.partition("=")[0] for name in changed}
            if group == "engine" and server is None:  # a user's class may count its own work
                mine, theirs = _counters(cell, group), _counters(base, group)
            elif group == "engine" or names <= DECISIVE.keys():
                paths = {path for name in names for path in _decisive_of(name, server)}
                mine, theirs = _decisive(cell, paths), _decisive(base, paths)
            else:
                mine, theirs = _counters(cell, group), _counters(base, group)
            if names <= UNCOUNTED or not (mine or theirs):
                state = "not counted"
            elif mine != theirs:
                state = "live"
            else:
                options = {*changed, *_changed(group, at_first, knobs)}
                state = "not counted" if options & UNCOUNTED_OPTIONS else "not live"
            if state == "live":  # by what moved; the others would hide it
                moved = [k for k in mine | theirs if mine.get(k) != theirs.get(k)]
                mine, theirs = ({k: c[k] for k in moved if k in c} for c in (mine, theirs))
            option = ", ".join(changed)
            results.append(Liveness(cell.label, option, mine, theirs, state))
    return results


def undistinguished(cells: list[Cell]) -> list[list[Cell]]:
    """Cells that may have run as one configuration: they differ in their arm alone, or in knobs
    whose counters are equal. Those that are so to the first cell by their knobs are *not live*, and
    left out; so is the copy of the baseline that an ablation measures for its noise."""
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        if cell.timed and cell.arm != AGAIN:
            groups.setdefault(_ran(cell), []).append(cell)
    found = []
    for group in groups.values():
        same = [cell for cell in group if cell.varying == group[0].varying]
        group = same if group[0] is cells[0] else group
        if len(group) > 1:
            found.append(group)
    return found


def _ran(cell: Cell) -> tuple[object, ...]:
    """What a cell did by its counters, where its knobs have some, else by what was set."""
    parts: dict[str, object] = {}
    for field in cell.columns:
        path = field.split(".")
        group = path[1] if path[0] in ("config", "choices") and len(path) > 1 else ""
        counters = _counters(cell, group) if group in DONE_GROUPS else {}
        knob, option = ".".join(path[1:]), f"{group}={cell.first(f'choices.{group}')}"
        if not counters or knob in UNCOUNTED or option in UNCOUNTED_OPTIONS:
            parts[field] = cell.named(field)
        else:
            parts[f"liveness.{group}"] = tuple(sorted(counters.items()))
    return tuple(parts.items())


def _server(cell: Cell) -> type[ServerOptions] | None:
    """The options of the server that a cell measured; None for another engine."""
    cls = OPTIONS.get(str(cell.timed[0].get("config.engine._target_")))
    return cls if cls is not None and issubclass(cls, ServerOptions) else None


def _decisive_of(knob: str, server: type[ServerOptions] | None) -> tuple[str, ...]:
    """The counters that show a knob's work by themselves; none where nothing counts it."""
    if knob in DECISIVE or server is None:
        return DECISIVE[knob]
    own = knob.removeprefix("engine.")
    head, _, argument = own.rpartition(".")
    name = argument.lstrip("-").replace("-", "_")
    return server.decisive.get(f"{head}.{name}" if head else name, ())


def _settings(moving: set[str], group: str) -> dict[str, str]:
    """Those of the moving fields that are knobs of a group, by the knob's name, and under "" its
    option."""
    start = f"config.{group}."
    knobs = {name.removeprefix(start): name for name in moving if name.startswith(start)}
    option = f"choices.{group}"
    return knobs | {"": option} if knobs or option in moving else {}


def _reported_by_both(settings: dict[str, str], base: Cell, cell: Cell) -> dict[str, str]:
    """Those of the settings that say something of both cells: two engines may support others."""
    rows = base.timed[0], cell.timed[0]
    return {name: key for name, key in settings.items() if all(tells(row, key) for row in rows)}


def _knobs(cell: Cell, settings: dict[str, str]) -> dict[str, str]:
    """What a cell has for each of the settings, as one writes it; under "" the option."""
    row = cell.timed[0]
    knobs = {
        name: show(value)
        for name, field in settings.items()
        if (value := row.get(field)) is not None
    }
    return knobs | {"": show(cell.first(settings[""]) if "" in settings else None)}


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
    if len(cell.timed) == 1:  # as a mean would be rounded; most are whole numbers
        fractions = [k for k, v in counters.items() if type(v) is float and not v.is_integer()]
        return counters | {k: round(counters[k], 9) for k in fractions} if fractions else counters
    return {
        name: _mean(cell, f"liveness.{group}.{name}", first) for name, first in counters.items()
    }


def _mean(cell: Cell, counter: str, first: Any) -> Any:
    """The mean of a counter over blocks; of one that is words what the first block has."""
    mean = cell.mean(counter)
    return first if mean is None else round(mean, 9)


def _decisive(cell: Cell, paths: set[str]) -> dict[str, Any]:
    """The counters of these names, those that were counted."""
    row, means = cell.timed[0], {}
    for path in sorted(paths):
        counter = f"liveness.{path}"
        if (first := row.get(counter)) is not None:
            means[path.partition(".")[2]] = _mean(cell, counter, first)
    return means


def _listed(counters: dict[str, Any]) -> str:
    shown = (f"{k} {_counter(v)}" for k, v in sorted(counters.items()))
    return ", ".join(shown) or "none"


def _counter(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() else sig(value, 4)
    return str(value)
