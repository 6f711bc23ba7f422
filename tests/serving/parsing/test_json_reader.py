"""The reader accepts what Python's json accepts, and stops at the first wrong character."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.serving.parsing.json_reader import MOST_DEPTH, Malformed, completed, value

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(), one, max_size=3),
    max_leaves=8,
)


def is_read(text: str) -> bool:
    """Whether a text is one value; a space shows the end of a number."""
    reader, taken = value(text[0], 0), 0
    try:
        next(reader)
        for char in text[1:] + " ":
            taken += 1
            reader.send(char)
    except StopIteration as end:
        return taken + (end.value == "") == len(text)
    except Malformed:
        pass
    return False


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_json_is_read(one: Any, ascii_only: bool, indent: int | None) -> None:
    assert is_read(json.dumps(one, ensure_ascii=ascii_only, indent=indent))


@given(VALUES, st.data())
def test_a_wrong_character_is_noticed_as_json_does(one: Any, data: st.DataObject) -> None:
    text = json.dumps(one)
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + data.draw(st.sampled_from('"{}[],:\\ 0-.eE\nx')) + text[at + 1 :]
    try:
        json.loads(changed)
        is_json = changed.strip() == changed
    except ValueError:
        is_json = False
    assert is_read(changed) == is_json


@pytest.mark.parametrize("text", ["NaN", "01", "1.", "+1", "'a'", '"\n"', '"\\x"', "[1,]", "{,}"])
def test_what_json_is_not(text: str) -> None:
    assert not is_read(text)


def test_brackets_inside_each_other_are_bounded() -> None:
    assert is_read("[" * MOST_DEPTH + "]" * MOST_DEPTH)
    assert not is_read("[" * (MOST_DEPTH + 2) + "]" * (MOST_DEPTH + 2))


@given(st.dictionaries(st.text(), VALUES, min_size=1), st.data())
def test_the_beginning_of_an_object_is_completed(one: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(one)
    found = json.loads(completed(text[: data.draw(st.integers(1, len(text)))]))
    assert json.loads(completed(text)) == one
    keys = list(found)
    assert keys == list(one)[: len(keys)]
    assert all(found[key] == one[key] for key in keys[:-1])


def test_a_member_that_is_not_whole_is_left_out() -> None:
    text = '{"a": [1, {"b": "x,\\"}"}], "c": 2}'
    assert completed('{"a": [1, {"b": "x,') == '{"a": [1, {}]}'
    assert completed(text[:-2]) == '{"a": [1, {"b": "x,\\"}"}]}'
    assert completed(text) == text
