"""Checks before anything is written or loaded, and the listener to a measurement's progress."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minivllm.bench import profile
from minivllm.bench.display import Display
from minivllm.bench.driver import require_one_completion
from minivllm.bench.hardware.gpu import is_torch_for_gpus
from minivllm.bench.records import identity
from minivllm.bench.records.measurement import SIMULATED
from minivllm.bench.supervisor import EventListener
from minivllm.bench.workloads.arrivals import check_span, check_times
from minivllm.bench.workloads.options import ImagesOptions
from minivllm.cache.options import PagedOptions
from minivllm.config import plug_ins
from minivllm.config.compose import OPTIONS, build
from minivllm.config.groups import Config
from minivllm.config.support import support_of
from minivllm.engines import installed
from minivllm.engines.supported_knobs import require_supported
from minivllm.errors import BadInput
from minivllm.experiments.ending import require_writable_reports
from minivllm.experiments.filling import with_number
from minivllm.parallel.handover import require_folder
from minivllm.platform.threads import validate_cores
from minivllm.processes.handover import require_splittable
from minivllm.processes.ray_cluster import require_ray
from minivllm.tracking.base import SafeTracker

if TYPE_CHECKING:
    from minivllm.models.config import ModelConfig
    from minivllm.models.load.source import Source


def tracked(display: Display, config: dict[str, Any]) -> EventListener:
    """The supervisor's listener: passes progress on to the display, and records to the tracker."""
    tracker = SafeTracker(config)

    def hear(event: dict[str, Any]) -> None:
        display.update(event)
        if event["event"] in ("done", "failed"):  # between measurements
            tracker.record(event["measurement"].path)

    return hear


def checked_single_run(
    config: dict[str, Any],
    filling: bool = False,
    further: Callable[[dict[str, Any]], None] | None = None,
) -> tuple[dict[str, Any], str]:
    """Check the configuration of a single run, and print its warnings.

    Args:
        config, filling: as of `check`.
        further: a task's own check, before the model is looked at.

    Returns:
        The configuration with `model.weights` settled, and the fingerprint of the weights.

    Raises:
        BadInput: it has a setting of sweeps, this machine cannot run it, or no report could be
            written; or see `check`.
    """
    _require_no_sweep(config)
    require_hardware(config)
    require_writable_reports(config)
    if further is not None:
        further(config)
    config, fingerprint, warnings = check(config, filling)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    return config, fingerprint


def _require_no_sweep(config: dict[str, Any]) -> None:
    """Raise BadInput for a setting of sweeps."""
    view = Config.of(config)
    given = [key for key in ("name", "fresh", "retry") if getattr(view.sweep, key)]
    if given:
        instead = (
            "name= names records and report of a single run"
            if given[0] == "name"
            else "add -m to the command"
        )
        raise BadInput(f"sweep.{given[0]} is for sweeps: {instead}")
    identity.require_no_objective(config)
    if view.measure.target_ci is not None:
        raise BadInput("measure.target_ci is for sweeps: add -m to the command")
    if "ablation" in config:
        raise BadInput("+ablation is a sweep of the sweeper `plan`: leave out hydra/sweeper=...")


def require_hardware(config: dict[str, Any]) -> None:
    """Raise BadInput for a GPU that the installed torch cannot use, or for cores that this process
    may not use.

    Sweeps leave this out, because their jobs may run on other machines.
    """
    view = Config.of(config)
    if view.target("engine") != SIMULATED:
        validate_cores(config["runtime"])
    device, support = view.runtime.device, support_of(config)
    if device.startswith("cuda") and support.own_torch and not is_torch_for_gpus():
        raise BadInput(
            f"runtime.device={device}: the installed torch supports no GPU; use runtime.device=cpu"
        )


def check(config: dict[str, Any], filling: bool = False) -> tuple[dict[str, Any], str, list[str]]:
    """Check all of a configuration that can be checked before anything is written or loaded.

    Args:
        config: resolved.
        filling: whether a pilot is to find workload.num_requests=auto.

    Returns:
        The configuration with `model.weights` settled (so that the worker does not ask the hub
        again), the fingerprint of the weights, and warnings for the user.

    Raises:
        NotInstalled: the engine, or what starts its replicas, is not installed.
        BadInput: a user's own class cannot be imported or does not take its knobs; the engine does
            not support a knob; the model is missing, is not supported, has no experts to group,
            cannot be shared by the ranks, or takes no images where a knob or the workload has some;
            a request does not fit its context, or has several completions; quality is to be
            measured with random weights or an unreadable text; or the tracker is not installed.
    """
    plug_ins.check(config)
    installed.require(config)
    require_supported(config)
    require_ray(config.get("parallel") or {})
    view = Config.of(config)
    simulated = view.target("engine") == SIMULATED
    if simulated:
        profile.validate(config)
    SafeTracker(config)
    model, with_quality = config["model"], identity.quality_wanted(config)
    if view.target("decoding") in OPTIONS and not identity.quality_alone(config):
        params = build(config["decoding"])
        require_one_completion(params)
        if view.parallel.disaggregated:
            require_splittable(params)
    require_folder(view.parallel, config.get("cache") or {})
    workload = _check_load(with_number(config, 1) if filling else config, simulated)
    if view.target("model") not in OPTIONS:
        return config, identity.digest(model), []
    from minivllm.extras.speculative.fit import require_drafts_fit
    from minivllm.models.load.source import resolve
    from minivllm.passes.pruning.options import CalibrationOptions
    from minivllm.passes.pruning.texts import text_file

    if isinstance(view.pruning, CalibrationOptions):
        text_file(view.pruning)
    node, source = resolve(model, allow_random=not with_quality)
    architecture = _check_model(config, workload, source)
    longest = architecture.context(view.model.max_model_len)
    require_drafts_fit(view.speculative, architecture, longest, not with_quality)
    if not identity.quality_alone(config):
        _require_room(workload, longest, architecture, config.get("cache") and view.cache)
    if with_quality:
        from minivllm.bench import quality_reference

        quality_reference.require_trained_weights(source.weights)
        quality_reference.read_text(view.quality)
        quality_reference.window_and_stride(view.quality, longest)
    # The warnings are about weights, and a simulation loads none.
    warnings = [] if simulated else list(source.warnings)
    return {**config, "model": node}, source.fingerprint, warnings


def _require_room(workload: Any, context: int, architecture: ModelConfig, cache: Any) -> None:
    """Raise BadInput if the longest request can never fit the context, or the blocks of a cache.

    Only a paged cache of a set size that keeps every token is judged: what others hold is known
    once the model is loaded.
    """
    if not hasattr(workload, "check_lengths"):
        return
    workload.check_lengths(context)
    blocks = cache.num_blocks if isinstance(cache, PagedOptions) else None
    if blocks is None or cache.eviction != "none" or any(architecture.windows):
        return
    room = blocks * cache.block_size
    try:
        workload.check_lengths(room + 1)  # a request's last token is never stored
    except BadInput:
        raise BadInput(
            f"cache.num_blocks={blocks} holds {room:,} tokens, fewer than the longest request of "
            f"workload={workload.name} may need: raise it, or ask for fewer tokens"
        ) from None


def _check_model(config: dict[str, Any], workload: Any, source: Source) -> ModelConfig:
    """Compare knobs with what the files of the model say, and return its sizes as they are pruned.
    Raises BadInput."""
    from minivllm.models.config import ModelConfig, require_experts
    from minivllm.passes.pruning.shapes import pruned_config

    view, support = Config.of(config), support_of(config)
    whole = pruned_config(view.pruning, source.config)
    sizes = ModelConfig.from_dict(whole)
    require_experts(view.runtime.moe, sizes.num_experts)
    if view.parallel.tensor > 1 and support.own_torch:
        from minivllm.passes.shard_sizes import require_shares

        require_shares(whole, view.parallel.tensor, view.quant, source.is_gguf)
    wants_images = isinstance(workload, ImagesOptions)
    if wants_images or view.vision.is_set:
        from minivllm.bench.workloads.images import NO_IMAGES
        from minivllm.extras.vision.pictures import fitting_processor

        users = view.target("engine") not in OPTIONS
        takes = "vision" in support.knobs and (support.own_torch or users)
        if (fitting_processor(view.vision, source) is None or not takes) and wants_images:
            raise BadInput(NO_IMAGES.format(name=workload.name))
    return sizes


def _check_load(config: dict[str, Any], simulated: bool) -> Any:
    """Check the arrival times against the workload, and return the workload; None where it is a
    user's own class, which only the worker builds."""
    view = Config.of(config)
    if view.target("workload") not in OPTIONS:
        return None
    workload = build(config["workload"])
    if view.target("arrival") not in OPTIONS:
        return workload
    arrival = build(config["arrival"])
    check_times(arrival, workload)
    if not simulated:  # a simulation's clock does not wait
        measure = view.measure
        num_requests = getattr(view.workload, "num_requests", None)  # conversations have none
        check_span(arrival, num_requests, measure.seed, measure.timeout_s, measure.sent_s)
    return workload
