"""Classes that have moved: a `_target_` of a user's option file or of an old record keeps its
meaning and its ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# The names of a module or a class, from that of the first release to today's; of those that a
# `_target_` names.
CHAINS: tuple[tuple[str, ...], ...] = (
    ("minivllm.bench.arrivals", "minivllm.bench.workloads.arrivals"),
    (
        "minivllm.bench.engines",
        "minivllm.bench.targets.minivllm",
        "minivllm.engines.minivllm.engine",
    ),
    (
        "minivllm.bench.files",
        "minivllm.bench.workloads.file",
        "minivllm.bench.workloads.from_file.file",
    ),
    ("minivllm.bench.multi_turn", "minivllm.bench.workloads.multi_turn"),
    ("minivllm.bench.shared_prefix", "minivllm.bench.workloads.shared_prefix"),
    (
        "minivllm.bench.simulated",
        "minivllm.bench.targets.simulated",
        "minivllm.bench.targets.simulation.simulated",
        "minivllm.engines.simulated.engine",
    ),
    (
        "minivllm.bench.targets.interpreters.openvino",
        "minivllm.engines.openvino.engine",
    ),
    ("minivllm.bench.targets.servers.llamacpp", "minivllm.engines.llamacpp.engine"),
    ("minivllm.bench.targets.servers.sglang", "minivllm.engines.sglang.engine"),
    ("minivllm.bench.targets.servers.vllm_server", "minivllm.engines.vllm.server"),
    (
        "minivllm.bench.traces",
        "minivllm.bench.workloads.trace",
        "minivllm.bench.workloads.from_file.trace",
    ),
    ("minivllm.bench.workloads", "minivllm.bench.workloads.synthetic"),
    *(
        (
            f"minivllm.engine.batching.{policy}",
            f"minivllm.extras.batching.{policy}",
            f"minivllm.extras.scheduling.batching.{policy}",
        )
        for policy in ("Dynamic", "Sequential", "Static")
    ),
    ("minivllm.engine.params", "minivllm.engine.options"),
    *(
        (f"minivllm.extras.speculative.{name}", f"minivllm.extras.speculative.proposers.{name}")
        for name in ("draft", "early_exit", "ngram", "suffix")
    ),
    ("minivllm.models.loading", "minivllm.models.load.loading"),
    *(
        (f"minivllm.peers.{old}", f"minivllm.bench.targets.{old}", f"minivllm.engines.{new}")
        for old, new in (
            ("openai", "openai.engine"),
            ("transformers", "transformers.engine"),
            ("transformers_continuous", "transformers.continuous"),
            ("vllm", "vllm.engine"),
        )
    ),
)
# Knobs that classes had, with the one value that is left of each, for ids; records may hold others.
FORMER_KNOBS = {
    f"minivllm.passes.pruning.methods.{method}": {"pattern": "unstructured"}
    for method in ("Magnitude", "Wanda")
}
MOVED = {name: chain[-1] for chain in CHAINS for name in chain[:-1]}
_FIRST = {name: chain[0] for chain in CHAINS for name in chain[1:]}


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
