"""Errors that clients get: nothing of this process's memory, and the path of the wrong field."""

from __future__ import annotations

import io
import pickle

import pytest

from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput
from minivllm.serving.errors import ApiError, form_paths, internal, naming, overloaded


def test_an_error_holds_no_address_of_memory() -> None:
    for thing in (io.BytesIO(), object(), print, ApiError.of):
        for error in (
            ApiError(400, f"cannot read {thing!r}"),
            ApiError.of(BadInput(f"cannot read {thing!r}")),
            internal(f"{thing!r}"),
        ):
            assert "0x" not in error.message and "0x" not in str(error)
    assert (
        ApiError(400, f"cannot read {io.BytesIO()!r}").message == "cannot read <_io.BytesIO object>"
    )
    assert ApiError(400, "at 0 of <0x0A>").message == "at 0 of <0x0A>"


def test_it_is_the_same_in_another_process() -> None:
    for error in (overloaded("full", 3), ApiError(400, "temperature=3 is wrong"), internal("x")):
        again = pickle.loads(pickle.dumps(error))
        assert vars(again) == vars(error) and str(again) == str(error)


@pytest.mark.parametrize(
    ("message", "given", "param"),
    [
        ("decoding.top_p=9 must be in (0, 1]", None, "top_p"),
        ("structured_outputs.regex: wrong", None, "structured_outputs.regex"),
        ("request a-1: stop_token_ids must be in [0, 9)", None, "stop_token_ids"),
        ("stop needs a tokenizer, and this checkpoint has none", None, "stop"),
        ("request a-1: beam_width=4 samples at once must be", None, "beam_width"),
        ("the prompt is empty", "prompt", "prompt"),
        ("messages[0].content[1].text must be a text", "messages", "messages[0].content[1].text"),
        ("messages must be a list", "messages", "messages"),
        ("priority.", None, None),
    ],
)
def test_a_field_has_its_path(message: str, given: str | None, param: str | None) -> None:
    error = ApiError(400, message, param=given)
    assert error.param == param
    assert error.message == message.removeprefix("decoding.")


@pytest.mark.parametrize("name", ["max_tokens", "top_p", "logit_bias", "stop", "n", "cache_salt"])
def test_every_wrong_parameter_has_a_path(name: str) -> None:
    with pytest.raises(BadInput) as caught:
        SamplingParams(**{name: object()})
    error = ApiError.of(caught.value)
    assert error.param == name and "0x" not in error.message


def test_each_api_names_its_own_fields() -> None:
    paths = {**form_paths("text.format"), "stop": "stop_sequences", "prompt": "input"}
    paths["messages"] = "input"
    for message, given, expected, param in (
        ("structured_outputs.json: wrong", None, "text.format: wrong", "text.format"),
        ("stop=3 must be texts", None, "stop_sequences=3 must be texts", "stop_sequences"),
        ("structured_outputs: it has no end", None, "text.format: it has no end", "text.format"),
        ("stop needs a tokenizer", None, "stop_sequences needs a tokenizer", "stop_sequences"),
        ("messages[1].content has parts", "messages", "input has parts", "input"),
        ("the prompt is empty", "prompt", "the prompt is empty", "input"),
        ("n=0 must be 1", None, "n=0 must be 1", "n"),
        ("the engine is gone", None, "the engine is gone", None),
    ):
        with pytest.raises(ApiError) as caught, naming(paths):
            raise ApiError(400, message, param=given)
        assert (caught.value.message, caught.value.param) == (expected, param)
