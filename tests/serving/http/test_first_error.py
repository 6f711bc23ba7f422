"""Lists of bodies stop at their first error; everything else has all of its errors."""

from __future__ import annotations

import pytest
from pydantic import Field, ValidationError

from minivllm.serving.http.first_error import FirstErrorModel
from minivllm.serving.openai.completions import CompletionBody


class Part(FirstErrorModel):
    """A model within others."""

    numbers: list[int]
    name: str


class Whole(FirstErrorModel):
    """A model of every kind of field that holds others."""

    parts: list[Part] | None = None
    either: list[str] | list[list[int]] | None = None
    named: dict[str, list[int]] | None = None


@pytest.mark.parametrize(
    ("value", "errors"),
    [
        ({"parts": [{"numbers": ["a"] * 50, "name": 1}] * 50}, 2),
        ({"parts": [1] * 50}, 1),
        ({"either": [{}] * 50}, 2),
        ({"either": [["a"] * 50] * 50}, 2),
        ({"named": {"a": ["x"] * 50, "b": [1]}}, 1),
    ],
)
def test_a_list_of_wrong_items_has_one_error(value: dict[str, object], errors: int) -> None:
    with pytest.raises(ValidationError) as error:
        Whole.model_validate(value)
    assert error.value.error_count() == errors


def test_right_values_stay_as_they_are() -> None:
    body = CompletionBody.model_validate({"model": "m", "prompt": [[1, 2], [3]], "stop": ["a"]})
    assert body.prompt == [[1, 2], [3]] and body.stop == ["a"]


class Typed(FirstErrorModel):
    """A model of every kind of scalar."""

    whole: int = Field(1, ge=1)
    number: float | None = None
    flag: bool = False
    ids: list[int] = []


@pytest.mark.parametrize(
    "value",
    [
        *({name: wrong} for name in ("whole", "number") for wrong in (True, "1", [1], {})),
        *({"flag": wrong} for wrong in (1, 0, "true", 0.0)),
        *({"ids": [wrong]} for wrong in (True, "1", 1.5)),
        *({"whole": wrong} for wrong in (1.5, 0, 0.0, None)),
    ],
)
def test_no_value_stands_for_one_of_another_type(value: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Typed.model_validate(value)


def test_whole_numbers_may_be_written_as_json_writes_them() -> None:
    found = Typed.model_validate({"whole": 16.0, "number": 3, "flag": True, "ids": [1, 2]})
    assert found == Typed(whole=16, number=3.0, flag=True, ids=[1, 2])
    kinds = {
        name: one["type"]
        for name, one in Typed.model_json_schema()["properties"].items()
        if "type" in one
    }
    assert kinds == {"whole": "integer", "flag": "boolean", "ids": "array"}
