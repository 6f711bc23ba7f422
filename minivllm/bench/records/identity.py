"""Which measurements are the same one, and which cells may be compared."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from minivllm.bench.records import archive
from minivllm.bench.records.archive import record_files
from minivllm.bench.records.measurement import Measurement
from minivllm.bench.records.provenance import environment
from minivllm.bench.records.storage import STEPS
from minivllm.bench.workloads.from_file.tables import saved_files
from minivllm.config.groups import OPTIONS, TARGETLESS
from minivllm.config.moved import FORMER_KNOBS, first, present, with_targets
from minivllm.config.support import is_reported, supported_settings
from minivllm.errors import BadInput
from minivllm.extras.speculative.options import NOT_SPECULATING
from minivllm.passes.pruning.options import NOT_PRUNING, WORKLOAD
from minivllm.platform.files import sha256
from minivllm.platform.given import whole
from minivllm.platform.options import default_of
from minivllm.redaction import anonymous

ENGINE_GROUPS = (
    "model",
    "quant",
    "pruning",
    "attention",
    "batching",
    "cache",
    "decoding",
    "speculative",
    "vision",
    "engine",
    "runtime",
    "parallel",
)
# Options of groups that older records lack, where they mean what those did.
AS_BEFORE = frozenset((NOT_SPECULATING, NOT_PRUNING))
LOAD_GROUPS = ("workload", "arrival")
# Parts of `measure` that decide how a number is taken down or what is made of it, not the number.
NEUTRAL_MEASURE = frozenset(
    (
        "repeats",
        "target_ci",
        "max_repeats",
        "timeout_s",
        "max_error_rate",
        "isolation",
        "slo",
        "price",
        "quality",
        "roofline",
        "memory_limit_gb",
        "telemetry_interval_s",
        "metrics",
        "checks",
        "events",
        "events_mb",
    )
)
# Which pictures are rejected, and where those of requests are.
NEUTRAL_VISION = frozenset(("folder", "max_images", "max_image_mb", "max_megapixels"))
NEUTRAL_RUNTIME = frozenset(("profile",))  # what is done after the measured window
# Of `parallel`, where there are several replicas.
ROUTING = frozenset(("backend", "router", "load_weight"))
# What a checkpoint's fingerprint stands for.
NEUTRAL_MODEL = frozenset(("path", "package", "weights", "architecture", "seed"))
# Where a peer is found and how it is reached; which versions are there counts for the run.
NEUTRAL_ENGINE = frozenset(
    (
        *("python", "program", "port", "api_key_env"),
        *("start_timeout_s", "idle_timeout_s", "linger_s", "suspend"),
    )
)
NAMED_ALWAYS = ("model", "quant", "batching")
NAMED_IF_CHANGED = {
    "pruning": "none",
    "attention": "auto",
    "cache": "paged",
    "decoding": "greedy",
    "speculative": "none",
    "workload": "smoke",
    "arrival": "offline",
    "engine": "minivllm",
    "runtime": "default",
    "parallel": "none",
}
ID_LENGTH = 12
QUALITY_TASK = "minivllm.tasks.quality.run"


def _canonical(value: Any) -> Any:
    """The same value however it was written: 2.0 is 2, tuples are lists, keys are strings."""
    if isinstance(value, dict):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    return whole(value)


def digest(value: Any) -> str:
    """Hash of a JSON-able value, 12 hexadecimal digits; the order of keys does not matter."""
    text = json.dumps(_canonical(value), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


def _content(path: Any) -> Any:
    """The hash of a file's bytes, or of those of a folder's files (of a dataset or of sessions),
    which identifies it better than its name; other values as they are."""
    if not isinstance(path, str) or not os.path.exists(place := Path(os.path.expanduser(path))):
        return path
    if not place.is_dir():
        return sha256(place)
    files = saved_files(place) or sorted(place.glob("*.json"))
    below = {str(file.relative_to(place)): sha256(file) for file in files}
    return digest(below) if below else path


def _with_content(knobs: dict[str, Any]) -> dict[str, Any]:
    """A workload's knobs with what its files hold, at whatever depth there is a `path`."""
    return {
        key: _with_content(value)
        if isinstance(value, dict)
        else _content(value)
        if key == "path"
        else value
        for key, value in knobs.items()
    }


def _steps_content(place: str) -> Any:
    """What the recorded steps below a place hold, which tells a simulation apart better than their
    name."""
    try:
        records = record_files(place)
    except BadInput:  # the engine will say so
        return place
    return sorted({_steps_digest(record.parent / STEPS) for record in records})


def _steps_digest(path: Path) -> str:
    """The hash of a table of steps, be it in an archive; the path where there is none."""
    if archive.holder(path) is None:
        return str(path)
    with archive.open_file(path, str(path)) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def decisive_runtime(runtime: dict[str, Any]) -> dict[str, Any]:
    """What of `runtime` may change the numbers."""
    return {
        key: value
        for key, value in requested("runtime", runtime).items()
        if key not in NEUTRAL_RUNTIME
    }


def decisive_parallel(parallel: dict[str, Any]) -> dict[str, Any]:
    """What of `parallel` may change the numbers: with one replica no router does."""
    knobs = requested("parallel", parallel)
    if not knobs.get("disaggregated"):
        knobs.pop("prefill_replicas", None)
    return {k: v for k, v in knobs.items() if k not in ROUTING or knobs.get("replicas", 1) != 1}


def requested(group: str, knobs: dict[str, Any]) -> dict[str, Any]:
    """A group's knobs without the unasked ones at their defaults, and with what null means: see
    `knob`. Older records, which lack newer knobs, compare equal so."""
    unasked, null_means = _declared(group, present(str(knobs.get("_target_"))))
    return {
        key: null_means.get(key) if value is None else value
        for key, value in knobs.items()
        if key not in unasked or value != unasked[key]
    }


@cache
def _declared(group: str, target: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The defaults of an option's unasked knobs, and what its nulls mean."""
    cls = TARGETLESS.get(group) or OPTIONS.get(target)
    items = fields(cls) if cls else ()
    unasked = {item.name: default_of(item) for item in items if item.metadata.get("unasked")}
    return unasked, {item.name: item.metadata.get("null_means") for item in items}


def cell_id(config: dict[str, Any], fingerprint: str) -> str:
    """Identity of what is compared: everything that may change the numbers, and nothing else.

    Args:
        config: the resolved configuration.
        fingerprint: of the checkpoint, or of architecture and seed for random weights.

    Returns:
        12 hexadecimal digits.
    """
    config = with_targets(anonymous(config), first)  # a secret's value is no part of it
    parts: dict[str, Any] = {
        group: FORMER_KNOBS.get(config[group].get("_target_"), {}) | requested(group, config[group])
        for group in (*ENGINE_GROUPS, *LOAD_GROUPS)
        if config.get(group) and config[group].get("_target_") not in AS_BEFORE
    }
    model = {
        key: value for key, value in parts.get("model", {}).items() if key not in NEUTRAL_MODEL
    }
    parts["model"] = {**model, "fingerprint": fingerprint}
    if parts.get("runtime"):
        parts["runtime"] = decisive_runtime(parts["runtime"])
    parallel = decisive_parallel(parts.pop("parallel", {}))
    parts |= {"parallel": parallel} if parallel else {}
    vision = {k: v for k, v in parts.pop("vision", {}).items() if k not in NEUTRAL_VISION}
    if vision:  # older records lack the group
        parts["vision"] = vision
    if parts.get("workload"):
        parts["workload"] = _with_content(parts["workload"])
    if parts.get("engine", {}).get("steps"):
        parts["engine"] = {
            **parts["engine"],
            "steps": _steps_content(str(parts["engine"]["steps"])),
        }
    parts["engine"] = {k: v for k, v in parts.get("engine", {}).items() if k not in NEUTRAL_ENGINE}
    if file := parts["engine"].get("gguf"):
        parts["engine"]["gguf"] = Path(file).name  # wherever it lies
    decoding = parts.get("decoding", {})  # of these the workload decides, for each request
    parts["decoding"] = {k: v for k, v in decoding.items() if k not in ("max_tokens", "ignore_eos")}
    measure = requested("measure", config.get("measure") or {})
    parts["measure"] = {key: value for key, value in measure.items() if key not in NEUTRAL_MEASURE}
    return digest(parts)


def engine_id(config: dict[str, Any]) -> str:
    """Equal for configurations that one loaded engine can serve in turn."""
    parts = {group: config.get(group) for group in ENGINE_GROUPS}
    drafts = (config.get("speculative") or {}).get("pruning")
    if any((one or {}).get("calibration") == WORKLOAD for one in (config.get("pruning"), drafts)):
        parts["calibration"] = [config.get("workload"), (config.get("measure") or {}).get("seed")]
    return digest(parts)


@cache
def code_hash() -> str:
    """Hash of the package's sources, so that a change of the code measures again."""
    root = Path(__file__).resolve().parents[2]
    total = hashlib.sha256()
    for path in sorted(path for ending in ("py", "cpp", "h") for path in root.rglob(f"*.{ending}")):
        total.update(str(path.relative_to(root)).encode())
        total.update(path.read_bytes())
    return total.hexdigest()[:ID_LENGTH]


@cache
def environment_hash(device: str, python: str | None = None) -> str:
    """Hash of what the numbers stand on besides the code: the device, its driver, the packages."""
    return digest(environment(device, python))


def require_no_objective(config: dict[str, Any]) -> None:
    """Raise BadInput for the goal of a search where nothing is searched."""
    if (config.get("sweep") or {}).get("objective") is not None:
        raise BadInput("sweep.objective is for a search: add preset=tune")


def quality_alone(config: dict[str, Any]) -> bool:
    """Whether quality is measured and speed is not."""
    return bool((config.get("task") or {}).get("_target_") == QUALITY_TASK)


def quality_wanted(config: dict[str, Any]) -> bool:
    """Whether quality is measured."""
    return quality_alone(config) or bool((config.get("measure") or {}).get("quality"))


def quality_id(config: dict[str, Any]) -> str | None:
    """Identity of what is measured of quality, and whether alone; None where nothing is.

    It is no part of a cell, whose speed it does not change. But a record without quality, or with
    that of another text, does not stand for one with it.
    """
    if not quality_wanted(config):
        return None
    knobs = config.get("quality") or {}
    return digest([quality_alone(config), {**knobs, "text": _content(knobs.get("text"))}])


def profile_wanted(config: dict[str, Any]) -> bool:
    """Whether some steps are traced after the measurement; a record without a trace does not stand
    for one with it."""
    return bool((config.get("runtime") or {}).get("profile"))


def own_id(config: dict[str, Any]) -> str | None:
    """Identity of the metrics and checks of the user's own; None where there are none. They change
    nothing that is measured, but a record without them does not stand for one with them."""
    measure = config.get("measure") or {}
    own = {kind: named for kind in ("metrics", "checks") if (named := measure.get(kind))}
    return digest(own) if own else None


def events_wanted(config: dict[str, Any]) -> bool:
    """Whether the steps are observed; a record without events does not stand for one with them."""
    return bool((config.get("measure") or {}).get("events"))


def run_id(
    cell: str,
    device: str,
    arm: str,
    block: int,
    quality: str | None = None,
    python: str | None = None,
    profiled: bool = False,
    own: str | None = None,
    observed: bool = False,
) -> str:
    """Identity of one measurement of a cell: where, with what code, for which arm, which block.

    Args:
        cell: from `cell_id`.
        device: `runtime.device`.
        arm: its name.
        block: its number.
        quality: from `quality_id`.
        python: the interpreter that the engine computes in, where that is another one.
        profiled: from `profile_wanted`.
        own: from `own_id`.
        observed: from `events_wanted`.
    """
    what = [cell, code_hash(), environment_hash(device, python), arm, block]
    further = [part for part in (quality, own) if part is not None]
    return digest(what + further + ["profile"] * profiled + ["events"] * observed)


def cell_name(config: dict[str, Any]) -> str:
    """A readable name that is safe in a file system, such as "qwen3-nf4-continuous"."""
    choices = {
        group: str(option) for group, option in (config.get("choices") or {}).items() if option
    }
    peer = choices.get("engine", "minivllm") not in (
        "minivllm",
        "simulated",
    )  # batches as it does; the option says nothing of it
    always = [group for group in NAMED_ALWAYS if not (peer and group == "batching")]
    settings = supported_settings(config)
    words = [
        choices[group] for group in always if group in choices and is_reported(settings, group)
    ]
    if not is_reported(settings, "model"):  # a server's own
        words = [str(config["engine"].get("model") or ""), *words]
    words += [choices[g] for g, usual in NAMED_IF_CHANGED.items() if choices.get(g, usual) != usual]
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(filter(None, words))).strip("-.")
    return name[:80] or "cell"


def expand(
    config: dict[str, Any],
    sweep: str,
    arm: str,
    root: str | Path,
    fingerprint: str,
    position: int = 0,
    blocks: int | None = None,
) -> list[Measurement]:
    """The measurements of one cell, one a block.

    Args:
        config: the resolved configuration of the cell.
        sweep: name of the record folder.
        arm: the cell's name within its sweep.
        root: the folder of all records (`runs_dir`).
        fingerprint: of the checkpoint, from `models.source.resolve`.
        position: of the arm within its sweep.
        blocks: how many; None is `measure.repeats`.
    """
    cell = cell_id(config, fingerprint)
    device = (config.get("runtime") or {}).get("device") or "auto"
    quality, python = quality_id(config), (config.get("engine") or {}).get("python")
    measurements = []
    for block in range(blocks or (config.get("measure") or {}).get("repeats") or 1):
        run = run_id(
            *(cell, device, arm, block, quality, python, profile_wanted(config)),
            own=own_id(config),
            observed=events_wanted(config),
        )
        directory = Path(root) / sweep / f"{cell_name(config)}-{run}"
        measurements.append(
            Measurement(run, cell, sweep, arm, block, str(directory), config, position)
        )
    return measurements
