"""Metrics of the user's own, as `measure.metrics` names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minivllm.bench.metrics.latency import Metric
from minivllm.platform.plug_ins import make_own

OTHERWISE = "no metric: derive it from minivllm.bench.metrics.latency.Metric or Distribution"


def own_metrics(nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, Metric]:
    """The metrics by their names in the record's `metrics.own`.

    Args:
        nodes: `measure.metrics`.

    Raises:
        BadInput: there is no such class, it does not take its knobs, or it is no metric.
    """
    return {
        name: make_own(f"measure.metrics.{name}", node, Metric, OTHERWISE)
        for name, node in nodes.items()
    }
