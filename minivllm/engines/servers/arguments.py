"""Command-line arguments of a server, from a dictionary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def merged(made: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments that are made of knobs, with those of the user's own, which win; "_" in a name is
    "-", as servers write it."""
    own = {str(name).lstrip("-").replace("_", "-"): value for name, value in (given or {}).items()}
    return {**made, **own}


def words(arguments: Mapping[str, Any], negated: bool) -> list[str]:
    """The words of a command line.

    Args:
        arguments: by name, without dashes in front. True is the name alone; False is `--no-NAME`,
            or nothing; None is nothing; a list is the name with several words; a dictionary is
            JSON; anything else is one word.
        negated: whether the program knows `--no-NAME`.
    """
    line: list[str] = []
    for name, value in arguments.items():
        if value is None or (value is False and not negated):
            continue
        if isinstance(value, bool):
            line.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list | tuple):
            line += [f"--{name}", *map(str, value)]
        elif isinstance(value, Mapping):
            line += [f"--{name}", json.dumps(dict(value))]
        else:
            line += [f"--{name}", str(value)]
    return line
