"""What of a recorded configuration says something of what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from minivllm.config.support import is_elsewhere, is_told, supported_settings


def told_config(record: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a record without what says nothing of what was measured: settings that
    its engine does not support, and so left at their defaults. A server's model has the server's
    name for it."""
    config = record.get("config") or {}
    if (settings := _supported(record)) is None:
        return dict(config)
    told = {
        group: {name: value for name, value in node.items() if is_told(settings, group, name)}
        if isinstance(node, dict)
        else node
        for group, node in config.items()
    }
    options = config.get("choices") or {}
    told["choices"] = {group: name for group, name in options.items() if is_told(settings, group)}
    if served := record.get("served_model"):
        told["choices"]["model"] = served
    return told


def told_columns(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns without those that say nothing of what was measured, as in `told_config`, with
    the settings that its engine supports in `supported`."""
    engine = {key: columns.get(f"config.engine.{key}") for key in ("_target_", "command", "steps")}
    drafts = {
        key: columns[name]
        for key in ("num_speculative_tokens", "acceptance")
        if (name := f"config.speculative.{key}") in columns
    }
    part = {"engine": engine, "speculative": drafts}
    settings = _supported({"supported": columns.get("supported"), "config": part})
    columns["supported"] = settings
    if settings is None:
        return columns
    for name in _untold(tuple(columns), tuple(settings)):
        del columns[name]
    if (served := columns.get("served_model")) is not None:
        columns["choices.model"] = served
    if not is_told(settings, "runtime", "threads"):
        columns["provenance.threads"] = None  # those of the client
    if is_elsewhere(part):  # older records have the client's
        columns["memory.host_rss_peak"] = None
    return columns


@lru_cache(maxsize=1024)  # thousands of records have the same fields
def _untold(names: tuple[str, ...], settings: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the columns that are settings which are not supported."""
    untold = []
    for name in names:
        kind, _, path = name.partition(".")
        group, _, knob = path.partition(".")
        if kind in ("config", "choices") and not is_told(settings, group, knob.partition(".")[0]):
            untold.append(name)
    return tuple(untold)


def _supported(record: Mapping[str, Any]) -> list[str] | None:
    """What a record, or of an older one its engine, says that it supports."""
    settings: list[str] | None = record.get("supported")
    return supported_settings(record.get("config") or {}) if settings is None else settings
