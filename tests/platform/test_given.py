"""Values that a caller gives by name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm import SamplingParams
from minivllm.engine.options import StructuredOutputs
from minivllm.errors import LONGEST, BadInput
from minivllm.platform.given import (
    FLOAT32,
    Range,
    biases,
    known_fields_only,
    named,
    texts,
    token_ids,
    whole,
)

WHOLE = Range(0, 9, "in [0, 9]", whole=True, as_float=True)


@known_fields_only
@dataclass(frozen=True)
class Sample:
    first: int = 1
    second: int = 2


def test_an_unknown_field_is_named_with_the_nearest_one() -> None:
    assert Sample(3, second=4) == Sample(first=3, second=4)
    with pytest.raises(BadInput, match="Sample has no field secnd; did you mean second"):
        Sample(secnd=4)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", [None, 3, ("json",)])
def test_a_name_that_is_no_text_is_bad_input(name: Any) -> None:
    with pytest.raises(BadInput, match=r"x=.* must have names of fields, and .* is none"):
        named("x", Sample, {"first": 1, name: 2})
    with pytest.raises(BadInput, match=r"structured_outputs=.* must have names of fields"):
        StructuredOutputs.of({name: None})
    with pytest.raises(BadInput, match=r"^x\.secnd: no such field; did you mean second\?$"):
        named("x", Sample, {"first": 1, "secnd": 2})
    assert named("x", Sample, {"first": 1}) == {"first": 1}


@pytest.mark.parametrize("value", [3, 3.0, np.int64(3), torch.tensor(3).item()])
def test_whole_numbers_come_in_several_types(value: Any) -> None:
    found = WHOLE.number("x", value)
    assert found == 3 and type(found) is int


@pytest.mark.parametrize(
    "value", [None, True, "3", 2.5, 10, -1, float("nan"), float("inf"), 10**400, [3]]
)
def test_other_values_are_no_whole_number_in_range(value: Any) -> None:
    with pytest.raises(BadInput, match=r"x=.* must be "):
        WHOLE.number("x", value)


def test_token_ids_come_from_lists_tensors_and_arrays() -> None:
    for ids in ([1, 2], (1, 2), torch.tensor([1, 2]), np.array([1, 2]), range(1, 3)):
        assert token_ids("x", ids) == (1, 2)
    assert token_ids("x", None) is None and token_ids("x", []) == ()
    for wrong in (5, [1.0], ["a"], [None]):
        with pytest.raises(BadInput, match="must be token ids"):
            token_ids("x", wrong)  # type: ignore[arg-type]


def test_texts_are_one_or_several() -> None:
    assert (
        texts("x", None) == texts("x", []) == ()
        and texts("x", " ") == (" ",)
        and texts("x", ["a", "b"]) == ("a", "b")
    )
    for wrong in (5, "", [""], [None], ["\ud800"]):
        with pytest.raises(BadInput, match="must be non-empty strings"):
            texts("x", wrong)  # type: ignore[arg-type]


def test_biases_are_numbers_that_float32_holds() -> None:
    assert biases("x", {"3": 1, 4: FLOAT32}) == {3: 1.0, 4: FLOAT32} and biases("x", None) is None
    for wrong in ({3: 1e39}, {3: 10**400}, {3: float("nan")}, {"a": 1}, {1.5: 1}, [3], 3):
        with pytest.raises(BadInput, match=r"x=.* must be "):
            biases("x", wrong)


@pytest.mark.parametrize(
    "name", ["include_stop_str_in_output", "skip_special_tokens", "ignore_eos"]
)
def test_a_switch_is_true_or_false_and_no_text(name: str) -> None:
    for wrong in ("false", 0, None):
        with pytest.raises(BadInput, match=f"decoding.{name}=.* must be true or false"):
            SamplingParams(**{name: wrong})
    with pytest.raises(BadInput, match=r"decoding.token_mask=5 must be a function"):
        SamplingParams(token_mask=5)  # type: ignore[arg-type]


ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)


@settings(max_examples=300)
@given(
    st.dictionaries(
        st.sampled_from(sorted(SamplingParams.__dataclass_fields__)),
        ANYTHING | st.lists(ANYTHING, max_size=3) | st.dictionaries(ANYTHING, ANYTHING, max_size=2),
        max_size=3,
    )
)
def test_whatever_is_given_as_params_is_taken_or_refused_in_one_line(
    fields: dict[str, Any],
) -> None:
    try:
        SamplingParams(**fields)
    except BadInput as error:
        assert "\n" not in str(error)


def test_an_error_is_one_line_that_can_be_printed_however_long_the_value() -> None:
    error = str(BadInput(f"x={[math.nan] * 100_000} of\nfile \udcff must be finite"))
    assert error.startswith("x=[nan, ") and error.endswith("of file \\udcff must be finite")
    assert len(error) < LONGEST + 10


def test_a_whole_number_may_be_written_as_json_of_others_does() -> None:
    assert [type(whole(value)) for value in (16.0, -0.0, 1e300)] == [int, int, int] and whole(
        16.0
    ) == 16
    for value in (16.5, math.inf, -math.inf, True, "16.0", None, 3):
        assert whole(value) is value
    assert math.isnan(whole(math.nan))
