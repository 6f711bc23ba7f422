"""Counters that scheduler and cache keep of their own work, whoever carries their plans out."""

from __future__ import annotations

from minivllm.cache.manager import CacheManager
from minivllm.engine.scheduler import Scheduler

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


def since(base: Counters, now: Counters) -> Counters:
    """What was counted between two readings."""
    return {
        group: {name: count - base[group][name] for name, count in counters.items()}
        for group, counters in now.items()
    }
