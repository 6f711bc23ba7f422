"""What `parallel.tensor` cannot be combined with, told when a configuration is composed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minivllm.errors import BadInput
from minivllm.platform.devices import device_indices

OWN_ENGINE = "minivllm.engines.minivllm.engine.MinivllmEngine"
KERNELS = "minivllm.tasks.kernels.run"
CALIBRATED = {"LayerPruning": "layers", "WidthPruning": "width", "Wanda": "wanda"}


def require_tensor(checked: Mapping[str, Any]) -> None:
    """Check the other groups of a configuration with several ranks.

    Raises:
        BadInput: one asks for what ranks cannot do; names its knob.
    """
    parallel = checked["parallel"]
    size = parallel["tensor"]
    if size == 1 or checked["engine"]["_target_"] != OWN_ENGINE:
        return
    what = f"parallel.tensor={size}"
    cache, runtime = checked["cache"], checked["runtime"]
    if checked["task"].get("_target_") == KERNELS:
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
