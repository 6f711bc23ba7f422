"""Values between XML tags become JSON of the types that their schema names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minivllm.serving.parsing.xml_values import as_json


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("12", {"type": "string"}, "12"),
        ("12", {"type": "integer"}, 12),
        ("12", {"type": "number"}, 12),
        ("True", {"type": "boolean"}, True),
        ("true", {"type": "string"}, "true"),
        ("None", {"type": ["string", "null"]}, None),
        ("12", {"type": ["string", "null"]}, "12"),
        ("12", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 12),
        ('[1, {"a": 2}]', {"type": "array"}, [1, {"a": 2}]),
        ("not JSON", {"type": "object"}, "not JSON"),
        ("NaN", {"type": "number"}, "NaN"),
        ("2", {"enum": [1, 2]}, 2),
        ("12", None, "12"),
        (" lines\n ", {"type": "string"}, " lines\n "),
        ("1", {"type": 5}, 1),
        ("1.5", {"type": "integer"}, 1.5),
    ],
)
def test_a_value_has_the_type_of_its_schema(text: str, schema: Any, value: Any) -> None:
    assert json.loads(as_json(text, schema)) == value


PYTHONS = {"True": "true", "False": "false", "None": "null"}


@given(
    st.text() | st.sampled_from([*PYTHONS]),
    st.sampled_from([None, {}, {"type": "string"}, {"type": "object"}]),
)
@example("\xa01", {})
def test_any_text_becomes_json(text: str, schema: Any) -> None:
    found = json.loads(as_json(text, schema))
    if not isinstance(found, str):
        assert json.loads(PYTHONS.get(text.strip(), text.strip())) == found
    else:
        assert found == text or json.dumps(found, ensure_ascii=False) == text.strip()


def test_brackets_too_deep_to_read_are_text() -> None:
    text = "[" * 100_000
    assert json.loads(as_json(text, {"type": "array"})) == text
