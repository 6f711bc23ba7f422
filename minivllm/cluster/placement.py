"""Where the replicas of an engine run on one machine: each has its share of the cores, or a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minivllm.errors import BadInput
from minivllm.platform.threads import shares, usual_threads, wanted_cores


def placements(
    runtime: Mapping[str, Any], replicas: int, gpus: Sequence[int]
) -> list[dict[str, Any]]:
    """The group `runtime` of each replica.

    On a CPU each replica is pinned to its share of `runtime.cores`, with a thread for each physical
    core of the share, so that replicas do not wait for one another's turns; `runtime.threads` is
    the number of each. Where there are fewer cores than replicas they share them, one thread each.

    Args:
        runtime: of the whole.
        replicas: how many.
        gpus: numbers of the GPUs that `runtime.device` names; none: the replicas compute on CPUs.

    Raises:
        BadInput: there are fewer GPUs than replicas.
    """
    if gpus:
        if len(gpus) < replicas:
            raise BadInput(
                f"runtime.device={runtime['device']}: {replicas} replicas need a GPU each; name as "
                f"many, such as runtime.device=cuda:0-{replicas - 1}, or set "
                f"parallel.replicas={len(gpus)}"
            )
        return [{**runtime, "device": f"cuda:{gpu}"} for gpu in gpus[:replicas]]
    cores = wanted_cores(dict(runtime))
    if len(cores) < replicas:
        threads = runtime.get("threads") or usual_threads() or 1
        return [{**runtime, "threads": threads}] * replicas
    return [{**runtime, "cores": ",".join(map(str, share))} for share in shares(cores, replicas)]
