"""Classes that have moved: a `_target_` of a user's option file or of an old record keeps its
meaning and its ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# The module, or the class, of the first release -> where it lies today; of those that a `_target_`
# names.
MOVED = {
    "minivllm.bench.arrivals": "minivllm.bench.workloads.arrivals",
    "minivllm.bench.engines": "minivllm.bench.targets.minivllm",
    "minivllm.bench.files": "minivllm.bench.workloads.file",
    "minivllm.bench.multi_turn": "minivllm.bench.workloads.multi_turn",
    "minivllm.bench.shared_prefix": "minivllm.bench.workloads.shared_prefix",
    "minivllm.bench.simulated": "minivllm.bench.targets.simulated",
    "minivllm.bench.traces": "minivllm.bench.workloads.trace",
    "minivllm.bench.workloads": "minivllm.bench.workloads.synthetic",
    "minivllm.engine.batching.Dynamic": "minivllm.extras.batching.Dynamic",
    "minivllm.engine.batching.Sequential": "minivllm.extras.batching.Sequential",
    "minivllm.engine.batching.Static": "minivllm.extras.batching.Static",
    "minivllm.engine.params": "minivllm.engine.options",
    "minivllm.models.loading": "minivllm.models.load.loading",
    "minivllm.peers.openai": "minivllm.bench.targets.openai",
    "minivllm.peers.transformers": "minivllm.bench.targets.transformers",
    "minivllm.peers.transformers_continuous": "minivllm.bench.targets.transformers_continuous",
    "minivllm.peers.vllm": "minivllm.bench.targets.vllm",
}
_FIRST = {today: first for first, today in MOVED.items()}


def present(target: str) -> str:
    """The `_target_` that a class has today."""
    return _moved(target, MOVED)


def first(target: str) -> str:
    """The `_target_` that a class had at first, which identities of cells are computed from."""
    return _moved(target, _FIRST)


def _moved(target: str, table: Mapping[str, str]) -> str:
    module, _, name = target.rpartition(".")
    return table.get(target) or (f"{table[module]}.{name}" if module in table else target)


def with_targets(config: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """A configuration, or the one of a record, whose groups' `_target_`s are changed."""
    return {
        group: {**node, "_target_": change(node["_target_"])}
        if isinstance(node, dict) and isinstance(node.get("_target_"), str)
        else node
        for group, node in config.items()
    }
