"""Arguments that a model writes between XML tags, as JSON of the types that a schema names."""

from __future__ import annotations

import json
from typing import Any

# As the chat template writes Python's constants.
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_NAMES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


def as_json(text: str, schema: Any) -> str:
    """The value of an argument as JSON: a string, unless its schema allows what its text is.

    Args:
        text: between the tags.
        schema: of the argument; None where it has none.
    """
    written = json.dumps(text, ensure_ascii=False)
    kinds = _kinds(schema)
    if schema is None or kinds == {"string"}:
        return written
    plain = _CONSTANTS.get(text.strip(), text.strip())
    try:
        found = json.loads(plain, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return written
    fits = not kinds or any(name in kinds for name in _NAMES[type(found)])
    return plain if fits or "string" not in kinds else written


def _refuse(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity are no JSON


def _kinds(schema: Any) -> set[str]:
    """The types that a schema names."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    kinds = {named} if isinstance(named, str) else set(named if isinstance(named, list) else ())
    for key in ("anyOf", "oneOf"):
        members = schema.get(key)
        for one in members if isinstance(members, list) else ():
            kinds |= _kinds(one)
    return {kind for kind in kinds if isinstance(kind, str)}
