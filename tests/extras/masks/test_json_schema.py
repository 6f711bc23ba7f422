"""JSON schemas before they become grammars."""

from __future__ import annotations

import calendar
import json
import re
import sys
from typing import Any

import pytest

from minivllm.errors import BadInput, NotInstalled
from minivllm.extras.masks.json_schema import DATE, MOST_DEPTH, OPTIONS, guided_schema

INTEGER, STRING = {"type": "integer"}, {"type": "string"}


def guided(schema: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(guided_schema(json.dumps(schema)))
    assert found.pop("x-guidance") == OPTIONS
    return found


def test_a_pattern_that_lists_names_becomes_properties() -> None:
    schema = {
        "properties": {"score": {"multipleOf": 5}, "tags": STRING},
        "patternProperties": {"^score$": INTEGER, "^x": STRING},
    }
    assert guided(schema) == {
        "properties": {"score": {"allOf": [{"multipleOf": 5}, INTEGER]}, "tags": STRING},
        "patternProperties": {"^x": STRING},
    }
    assert guided({"anyOf": [schema]})["anyOf"][0] == guided(schema)
    needed = guided({"required": ["a", "b"], "patternProperties": {"^[ab]$": INTEGER}})
    assert needed["properties"] == {name: {"allOf": [INTEGER]} for name in "ab"}
    assert needed["patternProperties"] == {}
    # The name may stand in another part of the schema.
    parts = [{"patternProperties": {"^(é|b)$": INTEGER}}, {"required": ["b", "é"]}]
    assert set(guided({"allOf": parts})["allOf"][0]["properties"]) == {"b", "é"}


def test_names_and_patterns_are_compared_in_bounded_time() -> None:
    many = {
        "properties": dict.fromkeys((f"p{i}" for i in range(1000)), STRING),
        "patternProperties": dict.fromkeys((f"^q{i}$" for i in range(101)), STRING),
    }
    with pytest.raises(BadInput, match="1000 names and 101 patterns of properties: too many"):
        guided(many)


@pytest.mark.parametrize(
    ("pattern", "plain"),
    [
        ('^[^"]+$', r'^[^\x00-\x1f\x7f"]+$'),
        (r"[^\\a]", r"[^\x00-\x1f\x7f\\a]"),
        (r"\[^a][^\]]", r"\[^a][^\]]"),
        ("[^a]*", "[^a]*"),
        ('["]', '["]'),
        ('[^"', '[^"'),
    ],
)
def test_classes_without_quotes_have_no_control_characters(pattern: str, plain: str) -> None:
    assert guided({"pattern": pattern})["pattern"] == plain


def test_numbers_are_said_so_that_no_fraction_is_begun_in_vain() -> None:
    kinds = ["number", "null"]
    assert guided({"type": "number", "multipleOf": 2.0})["type"] == "integer"
    assert guided({"type": kinds, "multipleOf": 3})["type"] == ["integer", "null"]
    assert guided({"type": kinds, "multipleOf": 0.5})["type"] == kinds
    assert guided({"exclusiveMaximum": 0}) == {"maximum": -1e-9}
    assert guided({"exclusiveMaximum": 0.0, "maximum": -3}) == {"maximum": -3}
    assert guided({"exclusiveMaximum": 1}) == {"exclusiveMaximum": 1}


def test_infinite_bounds_are_none() -> None:
    """JSON may say 1e999, which is read as infinity."""
    assert guided({"exclusiveMaximum": 0, "maximum": float("inf")}) == {"maximum": -1e-9}
    assert guided({"maximum": float("inf"), "minimum": float("-inf")}) == {}
    bounds = {"exclusiveMaximum": float("inf"), "exclusiveMinimum": float("-inf")}
    assert guided({"type": "number", **bounds}) == {"type": "number"}
    properties = {"maximum": {"type": "null"}, "minimum": {"maximum": 1}}
    assert guided({"properties": properties}) == {"properties": properties}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": STRING}, "patternProperties": {"^a": STRING}},
        {"patternProperties": {"(": STRING}, "properties": {"a": STRING}},
        {"const": {"properties": {"a": 1}, "patternProperties": {"^a$": 1}, "minProperties": 9}},
        {"minProperties": 2, "required": ["a"]},
        {"minProperties": 5, "additionalProperties": False, "properties": {"a": STRING}},
    ],
)
def test_other_schemas_stay_as_they_are(schema: dict[str, Any]) -> None:
    found = guided(schema)
    assert {key: found[key] for key in schema} == schema


def test_true_allows_any_json_and_options_of_a_schema_do_not_count() -> None:
    assert guided(True) == {}
    assert guided({"x-guidance": {"lenient": True}}) == {}


def test_names_that_may_come_twice_are_not_counted() -> None:
    for schema in ({"minProperties": 2}, {"anyOf": [{"minProperties": 3, "required": ["a"]}]}):
        with pytest.raises(BadInput, match="at most one more can be guaranteed"):
            guided(schema)


def test_a_date_has_a_day_that_its_month_has() -> None:
    assert guided({"type": "string", "format": "date"}) == {"type": "string", "pattern": DATE}
    with_pattern = {"type": "string", "format": "date", "pattern": "^1"}
    assert guided(with_pattern) == with_pattern
    assert not re.fullmatch(DATE, "0000-01-01")
    for year in (*range(1, 410), 1900, 1996, 2000, 2023, 2024, 2100, 9999):
        for month in range(14):
            days = calendar.monthrange(year, month)[1] if 1 <= month <= 12 else 0
            for day in (0, 1, 9, 10, 28, 29, 30, 31, 32):
                text = f"{year:04}-{month:02}-{day:02}"
                assert bool(re.fullmatch(DATE, text)) == (1 <= day <= days), text


def test_nesting_is_bounded() -> None:
    schema: dict[str, Any] = {}
    for _ in range(MOST_DEPTH + 1):
        schema = {"not": schema}
    with pytest.raises(BadInput, match="levels"):
        guided(schema)


def test_without_llguidance_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(NotInstalled, match=r"pip install -e '\.\[structured\]'"):
        guided({"properties": {"a": STRING}, "patternProperties": {"^a$": STRING}})
