"""The knobs of `parallel`: on how many engines and devices a model runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from minivllm.errors import BadInput
from minivllm.platform.devices import device_indices
from minivllm.platform.options import Options, knob, option
from minivllm.platform.plug_ins import names_class

OWN_ENGINE = "minivllm.engines.minivllm.engine.MinivllmEngine"
KERNELS = "minivllm.tasks.kernels.run"
CALIBRATED = {"LayerPruning": "layers", "WidthPruning": "width", "Wanda": "wanda"}
Routers = Literal["round_robin", "least_tokens", "prefix_aware", "session"]
MOST_REPLICAS = 1024
HANDED_OVER = (
    "parallel.disaggregated=true hands keys and values over through the prefix cache: set "
    "cache.prefix_caching=true"
)
NO_PREFIXES = (
    "parallel.router=prefix_aware goes by cached prefixes, and the replicas cache none: set "
    "cache.prefix_caching=true, or choose another parallel.router"
)


@option("parallel")
@dataclass(frozen=True)
class ParallelOptions(Options):
    """parallel."""

    group = "parallel"
    tensor: int = knob(1, at_least=1, at_most=1024, unasked=True)
    """Ranks that share the model, each with a part of every matrix in a process of its own, on a
    GPU of its own."""
    replicas: int = knob(1, at_least=1, at_most=MOST_REPLICAS, unasked=True)
    """Engines that share one queue, each in a process with its own copy of the weights."""
    backend: Literal["processes", "ray"] = knob("processes", unasked=True)
    """What starts the replicas: processes (of this machine), or ray (actors of RAY_ADDRESS's
    cluster, or of one that is started)."""
    router: Routers | dict[str, Any] = knob("least_tokens", unasked=True)
    """Policy that gives a request to a replica: round_robin, least_tokens, prefix_aware (cached
    prefix against load), session, or your own minivllm.processes.router.Router as
    {_target_: my_package.MyRouter, ...}."""
    load_weight: float = knob(0.1, at_least=0, unasked=True)
    """prefix_aware: how many cached tokens of the prompt a token of a replica's unfinished requests
    outweighs."""
    disaggregated: bool = knob(False, unasked=True)
    """Prompts and answers are computed by different replicas, and keys and values are
    transferred."""
    prefill_replicas: int = knob(1, at_least=1, unasked=True)
    """Replicas that compute prompts, with disaggregated=true."""
    handover: Literal["memory", "file"] = knob("memory", unasked=True)
    """With disaggregated=true, the way of keys and values: memory (in messages), or file (each
    prompt's in a file in cache.offload_dir)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.router, dict) and not names_class(self.router):
            raise self.bad(
                "router", "must be {_target_: my_package.MyRouter, ...}, its knobs beside"
            )
        if self.disaggregated and self.prefill_replicas >= self.replicas:
            raise self.bad(
                "prefill_replicas",
                f"must leave a replica for answers: parallel.replicas={self.replicas} must be "
                f"{self.prefill_replicas + 1} or more",
            )
        if self.handover == "file" and not self.disaggregated:
            raise self.bad("handover", "hands nothing over: set parallel.disaggregated=true")


def require_prefixes(parallel: Mapping[str, Any], prefix_caching: bool) -> None:
    """Raise BadInput for what goes by cached prefixes where the cache has none.

    Args:
        parallel: the knobs of the group.
        prefix_caching: whether the cache keeps prefixes.
    """
    if prefix_caching:
        return
    if parallel["replicas"] > 1 and parallel["router"] == "prefix_aware":
        raise BadInput(NO_PREFIXES)
    if parallel["disaggregated"]:
        raise BadInput(HANDED_OVER)


def require_tensor(checked: Mapping[str, Any]) -> None:
    """Check the other groups of a configuration with several ranks.

    Raises:
        BadInput: one asks for what ranks cannot do; names its knob.
    """
    parallel = checked["parallel"]
    size = parallel["tensor"]
    if size == 1 or checked.get("engine", {"_target_": OWN_ENGINE})["_target_"] != OWN_ENGINE:
        return
    what = f"parallel.tensor={size}"
    cache, runtime = checked["cache"], checked["runtime"]
    if checked.get("task", {}).get("_target_") == KERNELS:
        raise BadInput(f"{what}: task=kernels times whole kernels; use parallel.tensor=1")
    if cache.get("offload_disk_gb"):
        raise BadInput(
            f"{what}: a rank cannot say that its disk has failed; use cache.offload_disk_gb=0"
        )
    if runtime["determinism"] == "batch" and size > 2:
        raise BadInput(
            f"{what}: more than two ranks add up in an order that depends on the step, which "
            "runtime.determinism=batch forbids; use parallel.tensor=2, or runtime.determinism=run"
        )
    if runtime["profile"]:
        raise BadInput(f"{what}: runtime.profile traces one process; use parallel.tensor=1")
    if runtime["passes"]:
        raise BadInput(
            f"{what}: runtime.passes are applied to a whole model; use parallel.tensor=1"
        )
    device = str(runtime["device"])
    named = len(device_indices(device))
    if device.startswith("cuda:") and parallel["replicas"] == 1 and named != size:
        raise BadInput(
            f"{what}: runtime.device={device} must name {size} GPUs, one for each rank, such as "
            f"cuda:0-{size - 1}"
        )
    if checked["speculative"].get("head_tokens"):
        raise BadInput(
            f"{what}: the first rows of the head are not on every rank; use "
            "speculative.head_tokens=null"
        )
    pruning = checked["pruning"]
    method = str(pruning["_target_"]).rpartition(".")[2]
    if method in CALIBRATED and not pruning.get("layers"):
        raise BadInput(
            f"{what}: pruning={CALIBRATED[method]} is calibrated with a whole model; save the "
            "pruned model first, with scripts/save_pruned.py of minivllm's repository"
        )
