"""The check that an engine supports every knob that is set. Free of torch.

A knob that an engine does not support must not be set: a result under a configuration that was not
run is worse than none. What an engine supports is declared in its `options.py`; a user's own class
has it as its attribute `support`. What declares nothing supports nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any

from minivllm.bench.workloads.workload import Workload
from minivllm.config.compose import compose
from minivllm.config.groups import GROUPS, HARNESS, LLM_ROOT, OPTIONS, Config
from minivllm.config.support import support_of
from minivllm.errors import BadInput
from minivllm.platform.devices import device_indices
from minivllm.platform.options import default_of, written
from minivllm.platform.support import ALL, Knobs, Support


def require_supported(config: Mapping[str, Any], support: Support | None = None) -> None:
    """Compare a resolved configuration with the defaults, before its engine is started.

    Args:
        config: as `minivllm.config.compose.compose` returns it; groups that it lacks are not
            checked.
        support: what the engine declares; None looks it up.

    Raises:
        BadInput: a knob that the engine does not support is set away from its default; names it.
    """
    support = support or support_of(config)
    device = str((config.get("runtime") or {}).get("device"))
    parallel = config.get("parallel") or {}
    several = support.several_devices
    several |= any(
        support.supports("parallel", degree) and parallel.get(degree, 1) > 1
        for degree in ("replicas", "tensor")
    )
    if not several and re.search("[-,]", device):
        raise BadInput(
            f"runtime.device={device}: {support.engine} computes on one device; name one of them"
        )
    _require_one(config)
    choices = config.get("choices") or {}
    for group in GROUPS:
        if group not in HARNESS and isinstance(node := config.get(group), dict):
            _check(support, group, node, choices.get(group))


def _require_one(config: Mapping[str, Any]) -> None:
    parallel = config.get("parallel") or {}
    for knob in ("runtime.profile", "measure.events") if parallel.get("replicas", 1) > 1 else ():
        group, _, name = knob.partition(".")
        if (config.get(group) or {}).get(name):
            raise BadInput(f"{knob}=true is of one engine: leave it out, or parallel.replicas=1")


def require_line_sampling(config: Mapping[str, Any], workload: Workload) -> None:
    """Check the sampling that requests of a file have of their own.

    Args:
        config: the resolved configuration.
        workload: the requests.

    Raises:
        BadInput: a request sets what the engine does not support.
    """
    support = support_of(config)
    known = support.knobs.get("decoding", Knobs()).names
    if known == ALL:
        return
    for request in workload.requests:
        for name in request.sampling or ():
            if name not in known:
                raise BadInput(
                    f"request {request.request_id}: its line sets {name}, which is not supported "
                    f"by {support.engine}: leave it out, or set workload.line_sampling=false; "
                    f"it supports {', '.join(known) or 'none'}"
                )


def _check(support: Support, group: str, node: Mapping[str, Any], choice: Any) -> None:
    knobs, standard = support.knobs.get(group, Knobs()), defaults()[group]
    target = node.get("_target_")
    if target != standard.get("_target_"):
        if target not in knobs.targets and knobs.targets != ALL:
            usual = defaults()["choices"][group]
            raise _rejection(support, group, f"{group}={choice or target}", f"{group}={usual}")
        standard = _knob_defaults(str(target))
    # The knobs of a user's own class are its own matter.
    users = target is not None and target not in OPTIONS
    if knobs.names == ALL or (knobs.targets == ALL and users):
        return
    for name, value in node.items():
        if name == "_target_" or name in knobs.names:
            continue
        if name not in standard or value != standard[name]:
            usual = (
                f"{group}.{name}={written(standard[name])}" if name in standard else f"no {name}"
            )
            raise _rejection(support, group, f"{group}.{name}={written(value)}", usual)


def _rejection(support: Support, group: str, what: str, instead: str) -> BadInput:
    engine, knobs = support.engine, support.knobs
    advice = f"use {instead}" if group in knobs else f"leave it out, {engine} has its own {group}"
    return BadInput(f"{what} is not supported by {engine}: {advice}; it supports {_summary(knobs)}")


def _summary(groups: Mapping[str, Knobs]) -> str:
    """What an engine supports, for messages."""
    if not groups:
        return "engine.* alone, as its class declares no `support`"
    parts = [
        knobs.says
        or (
            f"{group}.*"
            if knobs.names == ALL
            else ", ".join(f"{group}.{name}" for name in knobs.names)
        )
        for group, knobs in groups.items()
    ]
    return ", ".join([*parts, "engine.*"])


def is_default(group: str, name: str, value: Any) -> bool:
    """Whether a knob has its default, which leaves the choice to the peer where units differ."""
    return bool(value == defaults()[group].get(name))


@cache
def defaults() -> dict[str, Any]:
    """The configuration of an engine without any override, composed once."""
    return compose([], root=LLM_ROOT)


def _knob_defaults(target: str) -> dict[str, Any]:
    """The knobs of an option that is not its group's default one, as its dataclass presets them;
    those that it needs have none."""
    items = fields(OPTIONS[target]) if target in OPTIONS else ()
    return {item.name: default_of(item) for item in items if default_of(item) is not MISSING}


def degrees(config: Config) -> tuple[int, int]:
    """The tensor and the data parallel degree: those of `parallel`; where it leaves both at 1, a
    rank for each GPU that `runtime.device` names.

    Raises:
        BadInput: `runtime.device` names another number of GPUs.
    """
    tensor, replicas = config.parallel.tensor, config.parallel.replicas
    device = config.runtime.device
    named, wanted = len(device_indices(device)), tensor * replicas
    if wanted == 1:
        return named, 1
    if ":" in device and named != wanted:
        raise BadInput(
            f"parallel.tensor={tensor} with parallel.replicas={replicas} takes {wanted} GPUs, and "
            f"runtime.device={device} names {named}"
        )
    return tensor, replicas
