"""The knobs of `parallel`: on how many engines and devices a model runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from minivllm.errors import BadInput
from minivllm.platform.options import Options, knob, option
from minivllm.platform.plug_ins import names_class

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
    """parallel.

    Args:
        tensor: ranks that share the model, each with a part of every matrix in a process of its
            own; on a GPU each has one.
        replicas: engines that share one queue.
        backend: what starts the replicas: this program as processes of this machine, or a Ray
            cluster as actors.
        router: the policy that gives each request to a replica; or a class of the user's own.
        load_weight: of `prefix_aware`, see `minivllm.processes.router.PrefixAware`.
        disaggregated: whether prompts and answers are computed by different replicas.
        prefill_replicas: how many of them compute prompts, where `disaggregated`.
        handover: what keys and values are handed over through, where `disaggregated`.
    """

    group = "parallel"
    tensor: int = knob(1, at_least=1, at_most=1024, unasked=True)
    replicas: int = knob(1, at_least=1, at_most=MOST_REPLICAS, unasked=True)
    backend: Literal["processes", "ray"] = knob("processes", unasked=True)
    router: Routers | dict[str, Any] = knob("least_tokens", unasked=True)
    load_weight: float = knob(0.1, at_least=0, unasked=True)
    disaggregated: bool = knob(False, unasked=True)
    prefill_replicas: int = knob(1, at_least=1, unasked=True)
    handover: Literal["memory", "file"] = knob("memory", unasked=True)

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


def require_prefixes(parallel: Mapping[str, Any], cache: Mapping[str, Any]) -> None:
    """Raise BadInput for what goes by cached prefixes where the cache has none.

    Args:
        parallel: the knobs of the group.
        cache: those of its group; what a class of the user's own does is not known.
    """
    routed = parallel["replicas"] > 1 and parallel["router"] == "prefix_aware"
    own = str(cache.get("_target_")).startswith("minivllm.")
    if own and not cache.get("prefix_caching"):
        if routed:
            raise BadInput(NO_PREFIXES)
        if parallel["disaggregated"]:
            raise BadInput(HANDED_OVER)
