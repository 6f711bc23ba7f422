"""Counters of scheduler and cache, the same for a real and a simulated engine, and of passes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from minivllm.cache.manager import CacheManager
from minivllm.engine.scheduler import Scheduler
from minivllm.extras.speculative.proposer import SpeculationCounters
from minivllm.extras.speculative.speculation import Speculator
from minivllm.passes.pruning.options import PASS

if TYPE_CHECKING:
    from minivllm.passes.base import PassReport

Counters = dict[str, dict[str, float]]


def scheduling_counters(scheduler: Scheduler, cache: CacheManager) -> Counters:
    """What has been counted since they were made, by group."""
    return {
        "batching": {
            "preemptions": float(scheduler.num_preemptions),
            "prefill_chunks": float(scheduler.num_chunks),
            "requests_shed": float(scheduler.num_shed),
            "forks": float(scheduler.num_forks),
            "requests_deferred": float(scheduler.num_deferred),
            "admissions_held": float(scheduler.num_held),
            "requests_overtaken": float(scheduler.num_overtaken),
            "waits": float(scheduler.num_waits),
        },
        "cache": {
            "blocks_allocated": float(cache.pool.allocated_total),
            **{name: float(count) for name, count in vars(cache.counters).items()},
        },
    }


def draft_counters(speculator: Speculator | None) -> dict[str, float | str]:
    """What drafts did since they were last counted from 0; None: there are none."""
    counters = SpeculationCounters() if speculator is None else speculator.counters
    return {
        "drafts": float(counters.num_drafts),
        "draft_tokens": float(counters.num_draft_tokens),
        "accepted_tokens": float(counters.num_accepted_tokens),
    }


def since(base: Counters, now: Counters) -> Counters:
    """What was counted between two readings."""
    return {
        group: {name: count - base[group][name] for name, count in counters.items()}
        for group, counters in now.items()
    }


def pruning_counters(
    reports: Sequence[PassReport], linear_bytes: int, linear_values: int
) -> dict[str, dict[str, float | str]]:
    """What pruning left out, under the group's name; nothing where it left out nothing.

    `realised_bytes` are those of the linear layers as stored, which a dense kernel reads, zeros
    included; `nonzero_bytes` the share of them that is not 0.

    Args:
        reports: of passes.
        linear_bytes: of the linear layers without the head, as stored.
        linear_values: weights and biases in them.
    """
    report = next((one for one in reports if one.name == PASS), None)
    if report is None:
        return {}
    zeroed = report.counters.get("zeroed", 0)
    removed = {
        f"{name}_removed": float(count)
        for name, count in report.counters.items()
        if name != "zeroed"
    }
    stored = {
        "realised_bytes": float(linear_bytes),
        "nonzero_bytes": linear_bytes * (1 - zeroed / linear_values),
    }
    return {"pruning": {**removed, "weights_zeroed": float(zeroed), **stored}}


def pass_counters(
    reports: Sequence[PassReport], own: Collection[str], has_experts: bool
) -> dict[str, float]:
    """What passes did to the model: each under the name of its knob's work, a user's own under its
    own name.

    Args:
        reports: in order.
        own: names of minivllm's passes.
        has_experts: the model has mixtures that could be grouped.
    """
    changed = {report.name: report.count for report in reports}
    counted = {report.name: report.counters for report in reports}
    fused = changed.get("fuse", 0)
    # fused first, and grouped then
    experts = counted.get("grouped", {}).get("experts", 0) if fused else 0
    counters = {
        "modules_fused": float(fused - experts),
        "native_layers": float(changed.get("native", 0)),
        "compiled": float(changed.get("compile", 0)),
        "compiled_graphs": float(counted.get("compile", {}).get("graphs", 0)),
        **({"mixtures_grouped": float(changed.get("grouped", 0))} if has_experts else {}),
    }
    for report in reports:
        if report.name not in own:  # the same class may be there twice
            counts = {"": report.count, "_bytes": report.bytes}
            counts |= {f"_{name}": count for name, count in report.counters.items()}
            for ending, count in counts.items():
                key = f"pass_{report.name}{ending}"
                counters[key] = counters.get(key, 0.0) + count
    return counters
