"""What the engine of a configuration supports, and so which settings say something of what was
measured. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from minivllm.config import plug_ins
from minivllm.config.groups import OPTIONS
from minivllm.platform.support import ALL, ENGINE_GROUPS, EVERY_KNOB, EngineOptions, Knobs, Support


def support_of(config: Mapping[str, Any]) -> Support:
    """What the engine of a resolved configuration declares, built in or a class of the user's own.

    Raises:
        BadInput: the user's class cannot be imported, or declares something else.
    """
    target = str(config["engine"].get("_target_"))
    if (options := _options(target)) is not None:
        return options.supported(config)
    name = f"engine={(config.get('choices') or {}).get('engine') or target}"
    found = plug_ins.declared(target)
    if isinstance(found, str):
        inherited = _options(found)
        assert inherited is not None  # `declaration` says so
        found = replace(inherited.supported(config), engine="")
    found = _without_replicas(found or Support())
    return found if found.engine else replace(found, engine=name)


def _without_replicas(support: Support) -> Support:
    """What a class of the user's own supports: no replicas that are built around the project's own
    class alone, nor those that it has not named."""
    if not support.replicated and support.knobs.get("parallel", Knobs()).names != ALL:
        return support
    alone = Knobs(("tensor",) if support.supports("parallel", "tensor") else ())
    return replace(support, knobs={**support.knobs, "parallel": alone})


def _options(target: str) -> type[EngineOptions] | None:
    options = OPTIONS.get(target, object)
    return options if issubclass(options, EngineOptions) else None


def supported_settings(config: Mapping[str, Any]) -> list[str] | None:
    """The settings of an engine's groups that say something of what is measured: "quant" for the
    option of a group, "quant.dtype" for a knob, "batching.*" for every one. What a server does that
    is known by its answers alone is not known from the option of `model`.

    Returns:
        None: all of them; or the class of the user's own has not been looked at.
    """
    support = _known_support(config)
    if support is None or support.knobs == EVERY_KNOB:
        return None
    settings = [group for group in support.knobs if group != "model" or not support.remote]
    for group, knobs in support.knobs.items():
        names = ("*",) if knobs.names == ALL else knobs.names
        settings += [f"{group}.{name}" for name in names]
    return settings


def is_remote(config: Mapping[str, Any]) -> bool:
    """Whether what is measured is a server of which only its answers are known."""
    support = _known_support(config)
    return support is not None and support.remote


def is_elsewhere(config: Mapping[str, Any]) -> bool:
    """Whether that server was not started for the measurement, so that its processes are not
    known."""
    return is_remote(config) and (config.get("engine") or {}).get("command") is None


def _known_support(config: Mapping[str, Any]) -> Support | None:
    """See `support_of`; None of a class that has not been looked at."""
    target = str((config.get("engine") or {}).get("_target_"))
    known = _options(target) is not None or plug_ins.is_looked_up(target)
    return support_of(config) if known else None


def is_reported(settings: Sequence[str] | None, group: str, name: str = "") -> bool:
    """Whether a setting of a configuration says something of what was measured.

    Args:
        settings: as of `supported_settings`.
        group: of the configuration.
        name: the knob; "" is the option.
    """
    if settings is None or group not in ENGINE_GROUPS:
        return True
    known = _known(tuple(settings))
    if name in ("", "_target_"):
        return group in known
    return f"{group}.{name}" in known or f"{group}.*" in known


@lru_cache(maxsize=256)
def _known(settings: tuple[str, ...]) -> frozenset[str]:
    return frozenset(settings)
