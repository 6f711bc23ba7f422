"""What a child says to grammars of clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from minivllm.engine.options import StructuredOutputs
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.serving.children.grammar_checks import GrammarRequest
from minivllm.serving.children.grammar_child import GrammarChild
from minivllm.serving.openai.tools import Tools
from tests.extras.masks.test_chains import schema_of
from tests.serving.answers.test_answer_grammar import HERMES

LONG = schema_of([[node + 1] for node in range(4000)] + [[]])


@pytest.fixture(scope="module")
def child(chat_folder: Path) -> GrammarChild:
    tokenizer = Tokenizer.load(chat_folder)
    assert tokenizer is not None
    return GrammarChild(tokenizer)


def test_grammars_that_are_right_come_back(child: GrammarChild) -> None:
    for form in ({"regex": "a+"}, {"choice": ["a", "b"]}, {"json_object": True}):
        answer = child.answer(GrammarRequest(StructuredOutputs.of(form)))
        assert StructuredOutputs.of(answer["outputs"]) == StructuredOutputs.of(form)
    assert child.answer(GrammarRequest(None, True)) == {"outputs": None}
    tools = Tools([{"type": "function", "function": {"name": "f"}}], "required")
    composed = child.answer(GrammarRequest(None, True, tools, HERMES, False, "response_format"))
    assert "tool_call" in composed["outputs"]["grammar"]


def test_wrong_ones_say_which_field_is_wrong(child: GrammarChild) -> None:
    status, message, _, _ = child.answer(GrammarRequest(StructuredOutputs(regex="(")))["error"]
    assert status == 400 and message.startswith("decoding.structured_outputs.regex: ")
    tool = {"type": "function", "function": {"name": "f", "parameters": LONG}}
    tools = Tools([tool], "required")
    _, message, _, param = child.answer(GrammarRequest(None, True, tools, HERMES))["error"]
    assert message.startswith("the schema of tool 'f': the JSON schema has a chain of")
    assert param == "tools[0].parameters"
    request = GrammarRequest(StructuredOutputs(json=LONG), True, field="response_format")
    assert "a chain of" in child.answer(request)["error"][1]
