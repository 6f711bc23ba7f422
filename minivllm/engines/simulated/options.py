"""The knobs of engine=simulated, and what it supports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from minivllm.platform.options import knob, option
from minivllm.platform.support import ALL, EngineOptions, Knobs, Support

_PROPOSERS = tuple(
    f"minivllm.extras.speculative.proposers.{name}"
    for name in (
        "ngram.NgramProposer",
        "suffix.SuffixProposer",
        "draft.DraftProposer",
        "early_exit.EarlyExitProposer",
    )
)
_DRAFTS = (
    *("num_speculative_tokens", "adaptive", "acceptance"),
    *("model", "quant", "lm_head", "exit_layer", "head_tokens"),
)
_LOOKUPS = (
    *("prompt_lookup_max", "prompt_lookup_min", "max_tree_depth", "max_spec_factor"),
    *("min_token_prob", "max_cached_requests", "max_cached_tokens"),
)
# What a simulation computes with: the real scheduler and block pool, and costs that are counted
# from an architecture.
_BY_ROOFLINE = {
    "model": Knobs(("path", "weights", "max_model_len", "seed", "rope_scaling", "architecture")),
    "quant": Knobs(
        ("dtype", "lm_head"),
        tuple(
            f"minivllm.quant.{name}"
            for name in ("int8.Int8", "int8_mixed.Int8Mixed", "fp8.FP8", "nf4.NF4", "int4.Int4")
        ),
        "quant.dtype and lm_head",
    ),
    "pruning": Knobs(
        ("layers", "num_layers", "mlp", "heads"),
        tuple(
            f"minivllm.passes.pruning.methods.{name}" for name in ("LayerPruning", "WidthPruning")
        ),
        "pruning=layers or width",
    ),
    "batching": Knobs(ALL, ALL),
    "cache": Knobs(
        (
            *("block_size", "num_blocks", "num_sequences", "memory_fraction", "prefix_caching"),
            *("swap_space_gb", "offload_gb", "offload_disk_gb", "kv_dtype"),
            *("eviction", "eviction_budget", "eviction_sinks", "eviction_window"),
        ),
        ALL,
        "cache.* but offload_dir",
    ),
    "decoding": Knobs(("max_tokens", "ignore_eos", "priority", "deadline_ms")),
    "speculative": Knobs(_DRAFTS, _PROPOSERS, "speculative.* of how many tokens are drafted"),
    "runtime": Knobs(("trim_last_layer",)),
    "parallel": Knobs(
        (
            *("tensor", "replicas", "router", "load_weight"),
            *("disaggregated", "prefill_replicas"),
        ),
        says="parallel.* but backend and handover: a file's speed is set by engine.link_gb_s and "
        "engine.link_us",
    ),
}
# The groups whose knobs records must share for their steps to be fitted
# (simulation/recorded_steps.py).
_BY_RECORDS = {
    **dict.fromkeys(("quant", "pruning", "attention", "runtime"), Knobs(ALL, ALL)),
    "speculative": Knobs((*_DRAFTS, *_LOOKUPS), _PROPOSERS, "speculative.* but verify and pruning"),
}


@option("minivllm.engines.simulated.engine.SimulatedEngine")
@dataclass(frozen=True)
class SimulatedOptions(EngineOptions):
    """engine=simulated."""

    support = Support("engine=simulated", _BY_ROOFLINE, replicated=True)
    steps: str | None = None
    """Records to fit the time of a step to: a run's folder, or a glob; null: from the roofline,
    below."""
    bandwidth_gb_s: float | None = knob(None, above=0)
    """Memory bandwidth of the machine to simulate, 10^9 bytes a second."""
    tflops: float | None = knob(None, above=0)
    """Matrix rate of the machine to simulate, 10^12 operations a second."""
    overhead_ms: float = knob(0.0, at_least=0)
    """Time of every step in addition to the roofline's."""
    memory_gb: float | None = knob(None, above=0)
    """Memory for weights and cache, 10^9 bytes; null: enough for max_num_seqs full sequences."""
    host_gb_s: float | None = knob(None, above=0)
    """How fast blocks go to host memory and back, swapped or offloaded, 10^9 bytes a second; null:
    in no time."""
    link_gb_s: float | None = knob(None, above=0, unasked=True)
    """Bandwidth of each device's link to others, 10^9 bytes a second, for parallel.tensor and for
    keys and values with parallel.disaggregated, which take no time where this is null."""
    link_us: float = knob(0.0, at_least=0, unasked=True)
    """Latency of a collective or of a handover, microseconds."""
    driver_us: Literal["measured"] | float = knob(0.0, at_least=0, unasked=True)
    """What the driving process takes of a replica's core for each token, microseconds; 0: it has
    its own; measured: by records of replicas below steps."""
    step_rows: int = knob(100_000, at_least=2)
    """Most rows of steps.parquet; of more steps it keeps every second, fourth, ..."""

    @classmethod
    def supported(cls, config: Mapping[str, Any]) -> Support:
        """Step times that are fitted are those of records with the same knobs; the roofline knows
        only what changes bytes and operations. Where drafts are judged, acceptance is that of
        records with the same sampling."""
        if config["engine"].get("steps") is None:
            return cls.support
        knobs = {**cls.support.knobs, **_BY_RECORDS}
        drafts = config.get("speculative") or {}
        if "num_speculative_tokens" in drafts and drafts.get("acceptance") is None:
            knobs["decoding"] = Knobs(ALL)
        return replace(cls.support, knobs=knobs)
