"""What a simulation knows of a model: its architecture, its costs, and how long its steps take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from minivllm.bench.metrics.roofline import causal_pairs, in_windows
from minivllm.cache.eviction.policies import Eviction
from minivllm.config.groups import Config
from minivllm.engine.step import ScheduledRequest
from minivllm.engines.simulated.options import SimulatedOptions
from minivllm.engines.simulated.recorded_steps import fit_records, measured_driver_us
from minivllm.engines.simulated.step_times import (
    FittedTimes,
    RooflineTimes,
    StepTimes,
    communication,
    rank_costs,
)
from minivllm.errors import BadInput
from minivllm.models.config import ModelConfig
from minivllm.models.costs import architecture_costs, trims
from minivllm.models.load.source import Source, resolve
from minivllm.passes.pruning.shapes import pruned_config

UNLIMITED = 1 << 60  # bytes


class SimulatedModel(NamedTuple):
    """One rank of a model; without `parallel.tensor` the whole of it."""

    config: ModelConfig
    source: Source
    costs: dict[str, Any]  # see architecture_costs
    weight_bytes: int
    step_times: StepTimes


def simulated_model(
    config: Mapping[str, Any], options: SimulatedOptions, kv_dtype: str
) -> SimulatedModel:
    """The model that a configuration names.

    Args:
        config: the resolved configuration.
        options: the knobs of the engine.
        kv_dtype: see CacheOptions.

    Raises:
        BadInput: neither records nor a roofline are given, or they do not fit the configuration; or
            the links between ranks are not given.
    """
    view = Config.of(config)
    source = resolve(config["model"], allow_random=True)[1]
    model = ModelConfig.from_dict(pruned_config(view.pruning, source.config))
    trimmed = trims(config["runtime"])
    costs, weight_bytes = architecture_costs(model, config["quant"], kv_dtype, trimmed)
    if (ranks := view.parallel.tensor) > 1:
        costs = rank_costs(costs, ranks, model.num_kv_heads)
        weight_bytes //= ranks
    times: FittedTimes | RooflineTimes
    driver_us = options.driver_us
    if options.steps is not None:
        times = fit_records(options.steps, config, of_replicas=not driver_us)
    elif options.bandwidth_gb_s is not None and options.tflops is not None:
        limits = options.bandwidth_gb_s * 1e9, options.tflops * 1e12
        between = communication(options, model, ranks, costs["dtype"])
        times = RooflineTimes(costs, *limits, options.overhead_ms, between)
    else:
        raise BadInput(
            "engine=simulated needs to know how long a step takes: set engine.steps=RUNS to "
            "records of this model, or engine.bandwidth_gb_s and engine.tflops for a roofline"
        )
    if driver_us and view.parallel.replicas == 1:
        raise BadInput(
            f"engine.driver_us={driver_us} is of a process that several replicas share "
            "their cores with: set parallel.replicas, or leave it out"
        )
    if driver_us == "measured":
        driver_us = measured_driver_us(options.steps, config)
    times = replace(times, driver_ms=driver_us / 1e3)
    return SimulatedModel(model, source, costs, weight_bytes, times)


def free_memory(options: SimulatedOptions, weight_bytes: int) -> int:
    """Bytes that weights leave on the simulated machine. Raises BadInput if they leave none."""
    if options.memory_gb is None:
        return UNLIMITED
    free = int(options.memory_gb * 1e9) - weight_bytes
    if free <= 0:
        raise BadInput(
            f"engine.memory_gb={options.memory_gb:g} does not hold the weights, which are "
            f"{weight_bytes / 1e9:.3g} GB: raise it, or choose a quant with fewer bits"
        )
    return free


def windowed_reads(
    costs: dict[str, Any], scheduled: Sequence[ScheduledRequest], context: float, pairs: float
) -> tuple[float, float]:
    """Tokens of context that a step reads, and its prompts' pairs: means over layers with and
    without a window."""
    window, near, near_pairs = costs["window"], 0, 0.0
    for part in scheduled:
        held = part.seq_len
        near += min(held, window)
        if part.prefill:
            near_pairs += causal_pairs(held, part.num_tokens, window)
    return in_windows(costs, context, near), in_windows(costs, pairs, near_pairs)


def require_no_scores(eviction: Eviction) -> None:
    """Raises BadInput if an eviction policy goes by what a simulation does not compute."""
    if eviction.scored:
        raise BadInput(
            f"cache.eviction={eviction.name} goes by attention scores, and nothing is computed in "
            "a simulation: use cache.eviction=streaming, or engine=minivllm"
        )
