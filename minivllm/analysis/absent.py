"""Knobs that records lack because they are older than these: off, as they were before there was
such a knob."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from functools import cache, lru_cache
from typing import Any

from minivllm.config.groups import OPTIONS, TARGETLESS
from minivllm.config.support import is_reported
from minivllm.platform.options import default_of

OFF = ("none", "off")


def fill(rows: Sequence[dict[str, Any]]) -> None:
    """Give rows the knobs that others have and they lack, where a knob's default asks for nothing.

    So a record and one of a later version, which has more knobs and leaves them at their defaults,
    differ in nothing. A default that asks for something, as a new optimisation's does, is not what
    the older version did: it stays absent.
    """
    kinds = {tuple(row) for row in rows}
    if len(kinds) < 2:
        return
    known = frozenset(name for kind in kinds for name in kind if name.startswith("config."))
    for row in rows:
        names = tuple(row)
        for group in _groups(names):
            target = row.get(f"config.{group}._target_")
            for name, default in _defaults(group, target if isinstance(target, str) else ""):
                missing = name in known and name not in row and not _nested(names, name)
                if missing and is_reported(row.get("supported"), group, name.rpartition(".")[2]):
                    row[name] = default


@lru_cache(maxsize=4096)
def _groups(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.split(".")[1] for name in names if name.startswith("config.")))


@lru_cache(maxsize=4096)
def _nested(names: tuple[str, ...], name: str) -> bool:
    """Whether a row has values below the name, so that it does have the knob."""
    return any(other.startswith(f"{name}.") for other in names)


@cache
def _defaults(group: str, target: str) -> tuple[tuple[str, Any], ...]:
    """The fields of a row for those knobs of an option that ask for nothing at their default, with
    it."""
    option = TARGETLESS.get(group) or OPTIONS.get(target)
    defaults = {}
    for item in fields(option) if option else ():
        default = default_of(item)
        if default is MISSING:
            continue
        # Null may leave the choice to the engine, which is not to ask for nothing.
        is_off = default in OFF or (default is not None and not default)
        if is_off or item.metadata.get("unasked"):
            defaults[f"config.{group}.{item.name}"] = default
    return tuple(defaults.items())
