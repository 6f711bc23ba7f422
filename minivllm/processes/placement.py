"""Where the replicas of an engine run: on one machine each has its share of the cores, or a GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from minivllm.errors import BadInput
from minivllm.platform.threads import shares, usual_threads, wanted_cores

# What a replica has in place of the knobs of all.
ALONE = {"replicas": 1, "disaggregated": False, "handover": "memory", "backend": "processes"}


def placements(
    runtime: Mapping[str, Any], replicas: int, gpus: Sequence[int], ranks: int = 1
) -> list[dict[str, Any]]:
    """The group `runtime` of each replica.

    On a CPU each replica is pinned to its share of `runtime.cores`, with a thread for each physical
    core of the share, which its ranks divide, so that replicas do not wait for one another's turns;
    `runtime.threads` is the number of each. Where there are fewer cores than replicas they share
    them, one thread each.

    Args:
        runtime: of the whole.
        replicas: how many.
        gpus: numbers of the GPUs that `runtime.device` names; none: the replicas compute on CPUs.
        ranks: of each replica, each of which needs a GPU of its own.

    Raises:
        BadInput: there are too few GPUs; or torchrun has started this process as a rank.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise BadInput(
            f"parallel.replicas={replicas}: torchrun starts the ranks of one engine; start "
            "replicas without it, or set parallel.replicas=1"
        )
    if gpus:
        if len(gpus) < (needed := replicas * ranks):
            each = "a GPU each" if ranks == 1 else f"{ranks} GPUs each"
            possible = len(gpus) // ranks
            raise BadInput(
                f"runtime.device={runtime['device']}: {replicas} replicas need {each}; name as "
                f"many, such as runtime.device=cuda:0-{needed - 1}"
                + (f", or set parallel.replicas={possible}" if possible else "")
            )
        parts = [gpus[first : first + ranks] for first in range(0, needed, ranks)]
        return [{**runtime, "device": f"cuda:{','.join(map(str, part))}"} for part in parts]
    cores = wanted_cores(dict(runtime))
    if len(cores) < replicas:
        threads = runtime.get("threads") or usual_threads() or 1
        return [{**runtime, "threads": threads}] * replicas
    return [{**runtime, "cores": ",".join(map(str, share))} for share in shares(cores, replicas)]


def reservation(runtime: Mapping[str, Any]) -> dict[str, Any]:
    """The group `runtime` of a replica that a cluster places: its GPUs are those that it is given,
    and its threads are as many as it reserves CPUs.

    Raises:
        BadInput: cores or GPUs of one machine are named.
    """
    if runtime.get("cores") is not None:
        raise BadInput(
            f"runtime.cores={runtime['cores']}: the cluster of RAY_ADDRESS chooses the machine of "
            "a replica; leave it out"
        )
    if ":" in (device := str(runtime["device"])):
        raise BadInput(
            f"runtime.device={device}: the cluster of RAY_ADDRESS chooses the GPU of a replica; "
            "use runtime.device=cuda"
        )
    return {**runtime, "threads": runtime.get("threads") or usual_threads() or 1}
