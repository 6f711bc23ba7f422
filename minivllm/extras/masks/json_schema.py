"""JSON schemas as llguidance takes them, without what it would get wrong. Torch-free."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from minivllm.errors import BadInput, NotInstalled, install
from minivllm.extras.masks.chains import require_short_schema
from minivllm.platform.values import is_number

# Space between the parts of a text: bounded, since a model may go on with it for ever.
MOST_SPACE = 32
OPTIONS = {
    "whitespace_flexible": False,
    "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MOST_SPACE}}}",
    "lenient": False,
    "coerce_one_of": False,
}
# Keywords whose values are data, not schemas.
_DATA = ("const", "enum", "default", "examples")
# Bounds that every number keeps: JSON's 1e999 is read as infinity, which cannot be written again.
_NO_BOUNDS = {
    "maximum": math.inf,
    "exclusiveMaximum": math.inf,
    "minimum": -math.inf,
    "exclusiveMinimum": -math.inf,
}
MOST_DEPTH = 64  # levels of a schema
MOST_PAIRS = 100_000  # of a pattern and a name, which take up to a second to compare
# Days that months have: the grammar of the format alone takes a 30th of February.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_FOURTH = "0[48]|[2468][048]|[13579][26]"
DATE = (
    f"^(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|(?:[0-9]{{2}}(?:{_FOURTH})|(?:{_FOURTH})00)-02-29)$"
)
_CONTROL = r"\x00-\x1f\x7f"


def guidance() -> Any:
    """The package llguidance. Raises NotInstalled where it is missing."""
    try:
        import llguidance
    except ImportError as error:
        raise NotInstalled(
            f"structured outputs need llguidance ({error}): {install('structured')}"
        ) from error
    return llguidance


def is_tag(token: str) -> bool:
    """Whether llguidance takes an added token for a special one, whatever the tokenizer says."""
    return token.startswith("<") and token.endswith(">")


def guided_schema(text: str) -> str:
    """A JSON schema for llguidance: what it would get wrong is written in another way, and space is
    bounded.

    Args:
        text: of the schema.

    Raises:
        BadInput: outputs of llguidance's grammar need not satisfy the schema, or it is no schema.
        NotInstalled: llguidance is missing.
    """
    schema = json.loads(text)
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise BadInput("a JSON schema must be an object")
    names: dict[str, None] = {}
    patterns: list[str] = []
    _collect(schema, names, patterns, 0)
    if len(names) * len(patterns) > MOST_PAIRS:
        raise BadInput(
            f"the JSON schema has {len(names)} names and {len(patterns)} patterns of properties: "
            "too many"
        )
    require_short_schema(schema)
    return json.dumps({**_guided(schema, [*names]), "x-guidance": OPTIONS})


@lru_cache(64)
def require_schema(guided: str) -> None:
    """Raise BadInput where a schema by itself is wrong, as `guided_schema` has written it: within a
    larger grammar the error would show that grammar."""
    matcher = guidance().LLMatcher
    if fault := matcher.validate_grammar(matcher.grammar_from_json_schema(guided)):
        raise BadInput(fault)


def _collect(node: Any, names: dict[str, None], patterns: list[str], depth: int) -> None:
    """Collect the names of properties in all of a schema, and the patterns that may list some."""
    if depth > MOST_DEPTH:
        raise BadInput(f"the JSON schema has more than {MOST_DEPTH} levels")
    for item in node if isinstance(node, list) else ():
        _collect(item, names, patterns, depth + 1)
    if not isinstance(node, dict):
        return
    if isinstance(node.get("properties"), dict):
        names |= dict.fromkeys(node["properties"])
    names |= dict.fromkeys(_names(node.get("required")))
    if isinstance(node.get("patternProperties"), dict):
        patterns += filter(_may_list, node["patternProperties"])
    for key, value in node.items():
        if key not in _DATA:
            _collect(value, names, patterns, depth + 1)


def _names(required: Any) -> list[str]:
    """The names of `required`, whatever it is."""
    given = required if isinstance(required, list) else []
    return list(dict.fromkeys(name for name in given if isinstance(name, str)))


def _guided(node: Any, names: Sequence[str]) -> Any:
    if isinstance(node, list):
        return [_guided(item, names) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: value if key in _DATA else _guided(value, names) for key, value in node.items()}
    if isinstance(node.get("pattern"), str):
        node["pattern"] = _with_plain_classes(node["pattern"])
    elif node.get("format") == "date":
        del node["format"]
        node["pattern"] = DATE
    if isinstance(node.get("patternProperties"), dict):
        node = _without_listing_patterns(node, names)
    _require_countable(node)
    return _with_plain_numbers(node)


def _with_plain_numbers(node: dict[str, Any]) -> dict[str, Any]:
    """A schema of numbers: multiples of a whole number are whole numbers, what is below 0 is below
    the largest number with nine decimals, and an infinite bound is none.

    Else the grammar of a range of multiples would offer a fraction and then no digit of it, and
    that of the others -0.
    """
    node = {key: value for key, value in node.items() if value != _NO_BOUNDS.get(key, math.nan)}
    step, kinds = node.get("multipleOf"), node.get("type")
    if is_number(step) and step % 1 == 0:
        if kinds == "number":
            node["type"] = "integer"
        elif isinstance(kinds, list):
            node["type"] = ["integer" if kind == "number" else kind for kind in kinds]
    if is_number(node.get("exclusiveMaximum")) and node["exclusiveMaximum"] == 0:
        del node["exclusiveMaximum"]
        most = node.get("maximum", 0)
        node["maximum"] = min(most, -1e-9) if is_number(most) else most
    return node


def _with_plain_classes(pattern: str) -> str:
    """A pattern whose negated classes that leave out a quote or a backslash leave out control
    characters, too: else the grammar would take the escapes of both for those of a control
    character."""
    parts: list[str] = []
    start: int | None = None  # of the class that is read
    at = 0
    while at < len(pattern):
        size = 2 if pattern[at] == "\\" else 1
        if start is None and pattern[at] == "[":
            start = at
        elif start is None:
            parts.append(pattern[at : at + size])
        elif pattern[at] == "]":
            parts.append(_plain_class(pattern[start : at + 1]))
            start = None
        at += size
    return "".join(parts) + ("" if start is None else pattern[start:])


def _plain_class(text: str) -> str:
    if not text.startswith("[^"):
        return text
    try:
        keeps = all(re.fullmatch(text, character) for character in '"\\')
    except re.error:
        keeps = False
    return text if keeps else f"[^{_CONTROL}{text[2:]}"


def _without_listing_patterns(node: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A schema of objects where patterns that match but some of these names are these properties.

    Where other parts of the schema name them, the grammar would offer a comma for a further
    property, whose name could then not be written:
    https://github.com/guidance-ai/llguidance/issues/265.
    """
    properties = dict(node["properties"]) if isinstance(node.get("properties"), dict) else {}
    patterns: dict[str, Any] = {}
    for pattern, schema in node["patternProperties"].items():
        matched = _listed(pattern, names)
        if not matched:
            patterns[_with_plain_classes(pattern)] = schema
        for name in matched:
            own = [properties[name]] if name in properties else []
            properties[name] = {"allOf": [*own, schema]}
    return {**node, "properties": properties, "patternProperties": patterns}


def _may_list(pattern: str) -> bool:
    return pattern.startswith("^") and pattern.endswith("$")


def _listed(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that a pattern matches if it matches nothing else; else none."""
    if not _may_list(pattern) or not names or not _has_no_other(pattern, names):
        return []
    strings = _matcher({"type": "string", "pattern": pattern})
    if strings.is_error():
        return []
    return [
        name for name in names if _takes(strings.deep_copy(), json.dumps(name, ensure_ascii=False))
    ]


def _takes(matcher: Any, text: str) -> bool:
    """Whether a text is one of a grammar."""
    ids = list(text.encode(errors="replace"))
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


@cache
def _bytes() -> Any:
    return guidance().LLTokenizer("byte")


def _matcher(schema: dict[str, Any]) -> Any:
    """Of a schema without space, over bytes."""
    matcher = guidance().LLMatcher
    options = {"whitespace_flexible": False}
    grammar = matcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    return matcher(_bytes(), grammar, log_level=0)


def _has_no_other(pattern: str, names: Iterable[str]) -> bool:
    """Whether a pattern matches nothing but some of these names. A pattern that is none may match
    anything: the grammar tells what is wrong."""
    others = _matcher(
        {
            "type": "object",
            "properties": dict.fromkeys(names, False),
            "patternProperties": {pattern: True},
            "additionalProperties": False,
            "minProperties": 1,
        }
    )
    if others.is_error():
        return False
    others.consume_token(ord("{"))
    others.compute_bitmask()
    return bool(others.is_error())


def _require_countable(node: Mapping[str, Any]) -> None:
    """Raise BadInput where two properties more than the required ones are needed, of free names:
    the grammar would let one name come twice."""
    least, num_required = node.get("minProperties", 0), len(_names(node.get("required")))
    is_open = node.get("additionalProperties") is not False or node.get("patternProperties")
    if isinstance(least, int | float) and is_open and least > num_required + 1:
        raise BadInput(
            f"minProperties={least} with {num_required} required properties: at most one more can "
            "be guaranteed where names are free; name properties in `required`"
        )
