"""What every task that measures begins with: checks before anything is written or loaded, and who
hears of its progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.bench import profile
from minivllm.bench.display import Display
from minivllm.bench.driver import require_one_completion
from minivllm.bench.hardware.gpu import is_torch_for_gpus
from minivllm.bench.records import identity
from minivllm.bench.records.measurement import SIMULATED
from minivllm.bench.supervisor import Progress
from minivllm.bench.targets import installed
from minivllm.bench.targets.supported_knobs import require_supported, support_of
from minivllm.bench.workloads.arrivals import check_span, check_times
from minivllm.config import plug_ins
from minivllm.config.compose import OPTIONS, build
from minivllm.errors import BadInput
from minivllm.platform.threads import validate_cores
from minivllm.tracking.base import SafeTracker


def tracked(display: Display, config: dict[str, Any]) -> Progress:
    """What the supervisor tells of its progress to: the display, and of each record to the
    tracker."""
    tracker = SafeTracker(config)

    def hear(event: dict[str, Any]) -> None:
        display.update(event)
        if event["event"] in ("done", "failed"):  # between measurements
            tracker.record(event["measurement"].path)

    return hear


def validate_single_run(config: dict[str, Any], allowed: Sequence[str] = ()) -> None:
    """Raise BadInput for what only a sweep can do, asked of a task that measures by itself;
    `allowed` it can do, too."""
    settings = {key for key, value in (config.get("sweep") or {}).items() if value} - set(allowed)
    asked = [key for key in ("name", "fresh", "retry", "dry_run") if key in settings]
    if asked:
        instead = (
            "name= names records and report of a single run"
            if asked[0] == "name"
            else "add -m to the command"
        )
        raise BadInput(f"sweep.{asked[0]} is for sweeps: {instead}")
    identity.require_no_objective(config)
    if config["measure"].get("target_ci") is not None:
        raise BadInput("measure.target_ci is for sweeps: add -m to the command")
    if "ablation" in config:
        raise BadInput("+ablation is a sweep of the sweeper `plan`: leave out hydra/sweeper=...")


def require_hardware(config: dict[str, Any]) -> None:
    """Raise BadInput for a GPU that the installed torch cannot use, or cores that are not there.
    Not for sweeps: their jobs may run elsewhere."""
    if config["engine"]["_target_"] != SIMULATED:
        validate_cores(config["runtime"])
    device, support = str(config["runtime"]["device"]), support_of(config["engine"])
    if device.startswith("cuda") and support and support.own_torch and not is_torch_for_gpus():
        raise BadInput(
            f"runtime.device={device}: the torch that is installed knows no GPU; use "
            "runtime.device=cpu"
        )


def check(config: dict[str, Any]) -> tuple[dict[str, Any], str, list[str]]:
    """What can be told before anything is written or loaded.

    Returns:
        The configuration with `model.weights` settled (so that the worker does not ask the hub
        again), the fingerprint of the weights, and warnings for the user.

    Raises:
        NotInstalled: the engine is not there.
        BadInput: a user's own class cannot be imported or does not take its knobs, the engine does
            not support a knob, the model is not there or not supported, its context is too short, a
            request cannot fit it, a request would have several completions, there are no experts to
            group, or quality is wanted of random weights or with a text that cannot be read, or the
            tracker is not installed.
    """
    plug_ins.check(config)
    installed.require(config["engine"], (config.get("choices") or {}).get("engine"))
    require_supported(config)
    simulated = config["engine"].get("_target_") == SIMULATED
    if simulated:
        profile.validate(config)
    SafeTracker(config)
    model, with_quality = config["model"], identity.quality_wanted(config)
    if config["decoding"].get("_target_") in OPTIONS and not identity.quality_alone(config):
        require_one_completion(build(config["decoding"]))
    workload = build(config["workload"]) if config["workload"].get("_target_") in OPTIONS else None
    if config["arrival"].get("_target_") in OPTIONS:
        arrival = build(config["arrival"])
        if workload is not None:
            check_times(arrival, workload)
            if not simulated:  # whose clock runs ahead
                measure = config["measure"]
                check_span(
                    arrival,
                    config["workload"].get("num_requests"),
                    measure["seed"],
                    measure["timeout_s"],
                )
    if model.get("_target_") not in OPTIONS:
        return config, identity.digest(model), []
    from minivllm.models.config import ModelConfig, require_experts
    from minivllm.models.load.source import resolve

    node, source = resolve(model, allow_random=not with_quality)
    architecture = ModelConfig.from_dict(source.config)
    require_experts(config["runtime"].get("moe", "auto"), architecture.num_experts)
    longest = architecture.context(model.get("max_model_len"))
    if (
        workload is not None
        and hasattr(workload, "check_lengths")
        and not identity.quality_alone(config)
    ):
        workload.check_lengths(longest)
    if with_quality:
        from minivllm.bench import quality_reference

        quality_reference.require_trained_weights(source.weights)
        quality_reference.read_text(config["quality"])
        quality_reference.window_and_stride(config["quality"], longest)
    # of weights, of which a simulation has none
    warnings = [] if simulated else list(source.warnings)
    return {**config, "model": node}, source.fingerprint, warnings
