"""What clients ask of the form of an answer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from minivllm.engine.options import StructuredOutputs
from minivllm.extras.masks.structured import Grammars
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.serving.answers.structured import call_rules, of_text_format, structured_outputs
from minivllm.serving.errors import ApiError
from tests.serving.chat_checkpoint import END

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_formats_of_openai() -> None:
    of_chat = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    assert structured_outputs(of_chat) == StructuredOutputs(json=SCHEMA)
    of_responses = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    assert of_text_format(of_responses) == StructuredOutputs(json=SCHEMA)
    for ask in (structured_outputs, of_text_format):
        assert ask({"type": "json_object"}) == StructuredOutputs(json_object=True)
        assert ask({"type": "text"}) is None and ask(None) is None


def test_forms_of_vllm() -> None:
    assert structured_outputs(None, {"regex": "a+"}) == StructuredOutputs(regex="a+")
    assert structured_outputs({"type": "text"}, {"choice": ["a", "b"]}) == StructuredOutputs(
        choice=("a", "b")
    )


@pytest.mark.parametrize(
    ("asked", "given", "param", "message"),
    [
        ({"type": "xml"}, None, "response_format.type", "must be text, json_object or json_schema"),
        ("json", None, "response_format.type", "must be"),
        ({"type": "json_schema"}, None, "response_format.schema", "must be a JSON schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": "x"}},
            None,
            "response_format.json_schema.schema",
            "must be a JSON schema",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}},
            None,
            "response_format.json_schema.strict",
            "true or false",
        ),
        ({"type": "json_object"}, {"regex": "a"}, "structured_outputs", "give either"),
        (None, {"regex": "a", "json_object": True}, "structured_outputs", "exactly one"),
        (None, {"regexp": "a"}, "structured_outputs.regexp", "did you mean regex"),
        (None, {"choice": []}, "structured_outputs.choice", "must be a list of texts"),
        (None, {"choice": [1]}, "structured_outputs.choice", "non-empty strings"),
        (None, {"json": "{"}, "structured_outputs.json", "no JSON"),
        (None, {"json": "[]"}, "structured_outputs.json", "must be a JSON schema"),
        (None, {"grammar": 3}, "structured_outputs.grammar", "non-empty strings"),
        (None, "a+", "structured_outputs", "must be a dictionary"),
    ],
)
def test_another_form_is_a_400_that_names_the_field(
    asked: Any, given: Any, param: str, message: str
) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        structured_outputs(asked, given)
    assert caught.value.status == 400 and caught.value.param == param
    assert "decoding" not in caught.value.message


class Form(NamedTuple):
    """A form of tool calls."""

    before: str
    after: str
    arguments_key: str


TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"location": {"$ref": "#/$defs/place"}},
        "required": ["location"],
        "additionalProperties": False,
        "$defs": {"place": {"enum": ["Paris", "Graz"]}},
    },
    "get_time": None,
}


@pytest.mark.parametrize(
    "form",
    [
        Form("<tool_call>\n", "\n</tool_call>", "arguments"),
        Form("", "", "parameters"),
        Form(f"[TOOL_CALLS]{END}[", f"]{END}", "arguments"),
    ],
)
def test_a_forced_call_is_one_of_these_tools(chat_folder: Path, form: Form) -> None:
    tokenizer = Tokenizer(chat_folder)
    rules = ["start: tool_call", *call_rules(TOOLS, form, tokenizer)]
    outputs = StructuredOutputs(grammar="\n".join(rules))
    matcher = Grammars(tokenizer, tokenizer.fast.get_vocab_size()).compile(outputs)
    rng, seen = random.Random(3), set()
    for _ in range(20):
        one, ids = matcher.deep_copy(), []
        while not one.is_stopped():
            bits = one.compute_bitmask()
            ids.append(rng.choice([i for i in range(8 * len(bits)) if bits[i >> 3] >> (i & 7) & 1]))
            assert one.consume_token(ids[-1])
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert text.startswith(form.before) and text.endswith(form.after)
        assert ids.count(tokenizer.special_id("eos_token")) == (form.before + form.after).count(END)
        call = json.loads(text.removeprefix(form.before).removesuffix(form.after))
        assert list(call) == ["name", form.arguments_key]
        arguments = call[form.arguments_key]
        if call["name"] == "get_weather":
            assert arguments in ({"location": "Paris"}, {"location": "Graz"})
        else:
            assert call["name"] == "get_time" and arguments == {}
        seen.add(call["name"])
    assert seen == {*TOOLS}


def test_a_tool_s_wrong_schema_is_a_400(chat_folder: Path) -> None:
    form = Form("", "", "arguments")
    with pytest.raises(ApiError, match="'get_time': a JSON schema must be an object") as caught:
        call_rules({"get_weather": SCHEMA, "get_time": [1]}, form, Tokenizer(chat_folder))
    assert caught.value.param == "tools[1].parameters"
