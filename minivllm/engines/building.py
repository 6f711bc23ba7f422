"""Builds the engine under test that a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from minivllm.config.compose import build
from minivllm.engines.base import BenchEngine
from minivllm.engines.replicas.replicated import ReplicatedEngine, is_replicated
from minivllm.engines.simulated.cluster import (
    SimulatedCluster,
    is_simulated_cluster,
)
from minivllm.engines.support.supported_knobs import require_supported
from minivllm.platform.plug_ins import locate


def build_target(config: Mapping[str, Any], progress: Callable[[int, int], None]) -> BenchEngine:
    """The engine that `engine` names, or several of them behind a router (`parallel.replicas`).

    Args:
        config: the resolved configuration.
        progress: told how far the weights are, as (done, total).

    Raises:
        BadInput: it cannot be built as configured, or does not support a knob that is set.
    """
    locate(str(config["engine"]["_target_"]))  # which declares what it supports
    require_supported(config)
    if is_replicated(config):
        return ReplicatedEngine(config, progress)
    if is_simulated_cluster(config):
        return SimulatedCluster(config)
    engine: BenchEngine = build(config["engine"], {"progress": progress}, config=config)
    return engine
