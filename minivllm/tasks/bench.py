"""task=bench: measure one cell, or one job of a sweep's plan."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from minivllm import plug_ins
from minivllm.bench import identity, profile, storage
from minivllm.bench.arrivals import check_span, check_times
from minivllm.bench.display import Display
from minivllm.bench.driver import require_one_completion
from minivllm.bench.folder_lock import folder_lock
from minivllm.bench.gpu import is_torch_for_gpus
from minivllm.bench.measurement import SIMULATED, Measurement
from minivllm.bench.supervisor import Outcome, Progress
from minivllm.bench.supervisor import run as supervise
from minivllm.config import OPTIONS, build
from minivllm.errors import BadInput
from minivllm.peers import presence, tables
from minivllm.redaction import learn
from minivllm.tasks.ending import conclude, refuse_unwritable
from minivllm.threads import refuse_absent_cores
from minivllm.tracking.base import SafeTracker
from minivllm.untrusted import MAX_TEXT, read_json

# Engines that compute with the torch of this interpreter.
OWN_TORCH = (
    "minivllm.bench.engines.MinivllmEngine",
    "minivllm.peers.transformers.TransformersEngine",
    "minivllm.peers.transformers_continuous.TransformersContinuousEngine",
)


def run(config: dict[str, Any]) -> int:
    """Measure, and for a lone run print a summary and build the report.

    Args:
        config: the resolved configuration.

    Returns:
        0 if every measurement is ok and there is a report, else 1.

    Raises:
        BadInput: this cannot be measured; nothing has been written then.
        KeyboardInterrupt: Ctrl-C; what had finished is kept, and reported for a lone run.
    """
    sweep = config.get("sweep") or {}
    if sweep.get("plan"):
        if sweep.get("cwd"):
            _go_to(sweep["cwd"])
        return _exit_code(_run_job(Path(sweep["plan"]), int(sweep.get("job") or 0)))
    return _run_lone(config)


def _exit_code(outcomes: Sequence[Outcome]) -> int:
    return 0 if all(outcome.status == "ok" for outcome in outcomes) else 1


def _go_to(folder: str) -> None:
    """Be where the sweep was started: a launcher may start its jobs elsewhere, and paths may be relative."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise BadInput(
            f"{socket.gethostname()} has no folder {folder} ({error.strerror}): jobs need the folder that the"
            " sweep was started in, and its runs_dir, under the same path"
        ) from None


def _run_job(path: Path, job: int) -> list[Outcome]:
    """Measure one job of a plan. The sweeper reports."""
    try:
        whole = storage.private(path)  # where there are secrets
        there = whole if whole.exists() else path
        plan = read_json(there, str(there), limit=MAX_TEXT)
        entries = plan if isinstance(plan, list) else plan["jobs"]
        jobs = [[Measurement.from_dict(item) for item in items] for items in entries]
        measurements = jobs[job]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise BadInput(f"sweep.plan={path}, sweep.job={job}: no such job can be read ({error})") from error
    before, total = sum(map(len, jobs[:job])), sum(map(len, jobs))
    for measurement in measurements:
        learn(measurement.config)
    with Display(before, total) as display:
        config = measurements[0].config if measurements else {}
        return supervise(measurements, tracked(display, config))


def tracked(display: Display, config: dict[str, Any]) -> Progress:
    """What the supervisor tells of its progress to: the display, and of each record to the tracker."""
    tracker = SafeTracker(config)

    def hear(event: dict[str, Any]) -> None:
        display.update(event)
        if event["event"] in ("done", "failed"):  # between measurements
            tracker.record(event["measurement"].path)

    return hear


def refuse_sweep_settings(config: dict[str, Any], allowed: Sequence[str] = ()) -> None:
    """Raise BadInput for what only a sweep can do, asked of a task that measures by itself; `allowed` it can do, too."""
    settings = {key for key, value in (config.get("sweep") or {}).items() if value} - set(allowed)
    asked = [key for key in ("name", "fresh", "retry", "dry_run") if key in settings]
    if asked:
        instead = (
            "name= names records and report of a single run"
            if asked[0] == "name"
            else "add -m to the command"
        )
        raise BadInput(f"sweep.{asked[0]} is for sweeps: {instead}")
    identity.refuse_goal(config)
    if config["measure"].get("target_ci") is not None:
        raise BadInput("measure.target_ci is for sweeps: add -m to the command")
    if "ablation" in config:
        raise BadInput("+ablation is a sweep of the sweeper `plan`: leave out hydra/sweeper=...")


def refuse_absent_hardware(config: dict[str, Any]) -> None:
    """Raise BadInput for a GPU that the installed torch cannot use, or cores that are not there. Not for sweeps: their jobs
    may run elsewhere."""
    if config["engine"]["_target_"] != SIMULATED:
        refuse_absent_cores(config["runtime"])
    device = str(config["runtime"]["device"])
    if device.startswith("cuda") and config["engine"]["_target_"] in OWN_TORCH and not is_torch_for_gpus():
        raise BadInput(
            f"runtime.device={device}: the torch that is installed knows no GPU; use runtime.device=cpu"
        )


def _run_lone(config: dict[str, Any]) -> int:
    refuse_sweep_settings(config, allowed=("dry_run",))
    refuse_absent_hardware(config)
    refuse_unwritable(config)
    config, fingerprint, warnings = check(config)
    root = Path(config.get("runs_dir") or "runs")
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    if (config.get("sweep") or {}).get("dry_run"):
        from minivllm.ablation.preview import show_lone

        show_lone(_measurements(root, config.get("name") or "<time>", config, fingerprint))
        return 0
    with run_folder(root, config.get("name")) as name:
        return _measure_into(root, name, config, fingerprint)


def _measurements(root: Path, name: str, config: dict[str, Any], fingerprint: str) -> list[Measurement]:
    return identity.expand(config, name, identity.cell_name(config), root, fingerprint)


def _measure_into(root: Path, name: str, config: dict[str, Any], fingerprint: str) -> int:
    """Measure a lone run into its folder; the exit code."""
    measurements = _measurements(root, name, config, fingerprint)
    code, reported, refused = 1, False, False
    try:
        with Display() as display:
            code = _exit_code(supervise(measurements, tracked(display, config), lone=True))
    except BadInput:
        refused = True
        raise
    finally:
        if not refused:
            out_dir = Path(config.get("reports_dir") or "reports") / name
            reported = conclude(root / name, out_dir, config) is not None
    return code or int(not reported)


def check(config: dict[str, Any]) -> tuple[dict[str, Any], str, list[str]]:
    """What can be told before anything is written or loaded.

    Returns:
        The configuration with `model.weights` settled (so that the worker does not ask the hub again), the
        fingerprint of the weights, and warnings for the user.

    Raises:
        NotInstalled: the engine is not there.
        BadInput: a user's own class cannot be imported or does not take its knobs, the engine does not honour a knob, the model is not there or not supported, its context is too short, a request
            cannot fit it, a request would have several completions, there are no experts to group, or quality is wanted of
            random weights or with a text that cannot be read, or the tracker is not installed.
    """
    plug_ins.check(config)
    presence.require(config["engine"], (config.get("choices") or {}).get("engine"))
    tables.refuse(config)
    simulated = config["engine"].get("_target_") == SIMULATED
    if simulated:
        profile.refuse(config)
    SafeTracker(config)
    model, wanted = config["model"], identity.quality_wanted(config)
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
                    arrival, config["workload"].get("num_requests"), measure["seed"], measure["timeout_s"]
                )
    if model.get("_target_") not in OPTIONS:
        return config, identity.digest(model), []
    from minivllm.models.config import ModelConfig, require_experts
    from minivllm.models.source import resolve

    node, source = resolve(model, allow_random=not wanted)
    architecture = ModelConfig.from_dict(source.config)
    require_experts(config["runtime"].get("moe", "auto"), architecture.num_experts)
    longest = architecture.context(model.get("max_model_len"))
    if workload is not None and hasattr(workload, "check_lengths") and not identity.quality_alone(config):
        workload.check_lengths(longest)
    if wanted:
        from minivllm.bench import reference

        reference.refuse_random(source.weights)
        reference.read_text(config["quality"])
        reference.window_and_stride(config["quality"], longest)
    warnings = [] if simulated else list(source.warnings)  # of weights, of which a simulation has none
    return {**config, "model": node}, source.fingerprint, warnings


@contextlib.contextmanager
def run_folder(root: Path, given: str | None) -> Iterator[str]:
    """Hold the folder of a lone run, and give its name; see `folder_name`. Raises BadInput also where another run has it."""
    name = folder_name(root, given)
    with folder_lock(root / name, "run", "name"):
        yield name


def folder_name(root: Path, given: str | None) -> str:
    """The name of a lone run's folder, which is made.

    Args:
        root: folder of all records.
        given: the name that the user wants; None is the time, made unique: such a run always measures anew.

    Raises:
        BadInput: the folder cannot be made, or something else has its name.
    """
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    name, count = given or stamp, 1
    while True:
        try:
            (root / name).mkdir(parents=True, exist_ok=given is not None)
            return name
        except FileExistsError as error:
            if given is not None:
                raise BadInput(
                    f"name={given}: {root / given} is not a folder; choose another name"
                ) from error
            count += 1
            name = f"{stamp}-{count}"
        except OSError as error:
            raise BadInput(f"runs_dir={root}: no folder for records can be made ({error})") from None
