"""JSON schemas as llguidance takes them, without what it would get wrong. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from minivllm.errors import BadInput, NotInstalled

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
MOST_DEPTH = 64  # levels of a schema


def guidance() -> Any:
    """The package llguidance. Raises NotInstalled where it is missing."""
    try:
        import llguidance
    except ImportError as error:
        raise NotInstalled(
            f"structured outputs need llguidance ({error}): pip install 'minivllm[structured]'"
        ) from error
    return llguidance


def is_tag(token: str) -> bool:
    """Whether llguidance takes an added token for a special one, whatever the tokenizer says."""
    return token.startswith("<") and token.endswith(">")


def guided_schema(text: str) -> str:
    """A JSON schema for llguidance: the same outputs, with bounded space, and without patterns of
    properties that are all in `properties` already.

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
    return json.dumps({**_guided(schema, 0), "x-guidance": OPTIONS})


def _guided(node: Any, depth: int) -> Any:
    if depth > MOST_DEPTH:
        raise BadInput(f"the JSON schema has more than {MOST_DEPTH} levels")
    if isinstance(node, list):
        return [_guided(item, depth + 1) for item in node]
    if not isinstance(node, dict):
        return node
    node = {
        key: value if key in _DATA else _guided(value, depth + 1) for key, value in node.items()
    }
    if isinstance(node.get("patternProperties"), dict):
        node = _without_empty_patterns(node)
    _require_countable(node)
    return node


def _without_empty_patterns(node: dict[str, Any]) -> dict[str, Any]:
    """A schema of objects without patterns that match named properties alone.

    The grammar would offer a comma for a further property, whose name can then not be written:
    https://github.com/guidance-ai/llguidance/issues/265.
    """
    named = node.get("properties")
    properties = dict(named) if isinstance(named, dict) else {}
    names = list(dict.fromkeys((*properties, *_names(node.get("required")))))
    patterns = dict(node["patternProperties"])
    for pattern, schema in list(patterns.items()):
        matched = tuple(name for name in names if not _is_empty(pattern, (), name))
        if matched and _is_empty(pattern, matched):
            del patterns[pattern]
            for name in matched:
                own = [properties[name]] if name in properties else []
                properties[name] = {"allOf": [*own, schema]}
    return {**node, "properties": properties, "patternProperties": patterns}


def _names(required: Any) -> list[str]:
    """The names of `required`, whatever it is."""
    given = required if isinstance(required, list) else []
    return list(dict.fromkeys(name for name in given if isinstance(name, str)))


@cache
def _bytes() -> Any:
    return guidance().LLTokenizer("byte")


def _is_empty(pattern: str, without: Iterable[str], name: str | None = None) -> bool:
    """Whether no property but `without` has a name that a pattern matches; with `name`, whether
    that one has none. A pattern that is none counts as not empty: the grammar tells what is
    wrong."""
    matcher = guidance().LLMatcher
    if name is not None:
        one = {"type": "string", "pattern": pattern, "enum": [name]}
        return bool(matcher.validate_grammar(matcher.grammar_from_json_schema(one)))
    probe = {
        "type": "object",
        "properties": dict.fromkeys(without, False),
        "patternProperties": {pattern: True},
        "additionalProperties": False,
        "minProperties": 1,
        "x-guidance": {"whitespace_flexible": False},
    }
    found = matcher(_bytes(), matcher.grammar_from_json_schema(probe), log_level=0)
    if found.is_error():
        return False
    found.consume_token(ord("{"))
    found.compute_bitmask()
    return bool(found.is_error())


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
