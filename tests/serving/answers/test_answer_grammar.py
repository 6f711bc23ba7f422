"""Grammars of whole answers: what they allow of a model's own words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from minivllm.engine.options import StructuredOutputs
from minivllm.extras.masks.structured import Grammars
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.serving.answers.answer_grammar import answer_grammar
from minivllm.serving.errors import ApiError
from minivllm.serving.openai.tools import Tools
from minivllm.serving.parsing.tool_forms import GENERIC, HERMES, LLAMA

FUNCTION: dict[str, Any] = {
    "name": "f",
    "parameters": {
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
TOOLS = [
    {"type": "function", "function": FUNCTION},
    {"type": "function", "function": {"name": "g"}},
]
AUTO, STRICT = Tools(TOOLS, "auto"), Tools(TOOLS, "auto", strict=True)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a":2}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
ASKED = StructuredOutputs(json={"enum": [7]})


@pytest.fixture(scope="module")
def tokenizer(chat_folder: Path) -> Tokenizer:
    return Tokenizer(chat_folder)


def allows(tokenizer: Tokenizer, grammar: StructuredOutputs | None, text: str) -> bool:
    """Whether a grammar allows a text as a whole answer."""
    assert grammar is not None
    matcher = Grammars(tokenizer, tokenizer.fast.get_vocab_size()).compile(grammar).deep_copy()
    ids = tokenizer.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("asked", "text", "wrong"),
    [
        (ASKED, "7", "8"),
        (StructuredOutputs(json_object=True), '{"a": [1]}', "[1]"),
        (StructuredOutputs(choice=("a b", 'c"d')), 'c"d', "a"),
        (StructuredOutputs(regex=r"a/\d\/\\"), "a/5/\\", "a/5/"),
        (StructuredOutputs(regex="a\nb"), "a\nb", "a b"),
    ],
)
def test_a_form_may_follow_thoughts(
    tokenizer: Tokenizer, asked: StructuredOutputs, text: str, wrong: str
) -> None:
    for begins, thoughts in ((False, "<think>\nso {.</think>\n\n"), (True, "so {.</think>\n\n")):
        grammar = answer_grammar(asked, None, HERMES, tokenizer, begins)
        assert allows(tokenizer, grammar, thoughts + text)
        assert not allows(tokenizer, grammar, thoughts + wrong)
        assert allows(tokenizer, grammar, text) is not begins
        assert not allows(tokenizer, grammar, f"so {text}")


def test_tools_that_may_be_called_stand_beside_a_form(tokenizer: Tokenizer) -> None:
    grammar = answer_grammar(ASKED, AUTO, HERMES, tokenizer, False)
    for text in ("7", CALL, OTHER, f"<think>x</think>{CALL}"):
        assert allows(tokenizer, grammar, text), text
    for text in ("8", CALL.replace("2", "3"), f"{CALL}7"):
        assert not allows(tokenizer, grammar, text), text
    assert answer_grammar(None, AUTO, HERMES, tokenizer, True) is None


def test_tools_that_must_be_called(tokenizer: Tokenizer) -> None:
    grammar = answer_grammar(ASKED, Tools(TOOLS, "required"), HERMES, tokenizer, False)
    assert allows(tokenizer, grammar, CALL) and allows(tokenizer, grammar, OTHER)
    assert not allows(tokenizer, grammar, "7")
    grammar = answer_grammar(None, Tools(TOOLS, "required", "g"), HERMES, tokenizer, False)
    assert allows(tokenizer, grammar, OTHER) and not allows(tokenizer, grammar, CALL)


def test_strict_tools_leave_text_free_and_bind_calls(tokenizer: Tokenizer) -> None:
    grammar = answer_grammar(None, STRICT, HERMES, tokenizer, False)
    for text in ("", "any {text}", f"so:\n{CALL}\n{OTHER}", f"<think>x</think>y{CALL}"):
        assert allows(tokenizer, grammar, text), text
    for text in ("a <", "<tool_x", "<tool_cal>"):
        assert allows(tokenizer, grammar, text), text
    torn = [f"so: {'<tool_call>'[:end]}" for end in range(2, 11)]
    for text in (CALL.replace("2", "3"), "x<tool_call>y", f"{CALL} x", *torn):
        assert not allows(tokenizer, grammar, text), text
    # Tags may be spelled by other tokens, which bind no less.
    grammars = Grammars(tokenizer, tokenizer.fast.get_vocab_size())
    for body, right in ((CALL, True), (CALL.replace("2", "3"), False)):
        inner = body.removeprefix("<tool_call>").removesuffix("</tool_call>")
        texts = ["so:\n<tool_", "call>", inner, "</tool_", f"call>\n{OTHER}"]
        ids = [token for text in texts for token in tokenizer.encode(text)]
        assert ids.count(tokenizer.fast.token_to_id("<tool_call>")) == 1  # of OTHER
        one = grammars.compile(grammar).deep_copy()  # type: ignore[arg-type]
        assert (one.try_consume_tokens(ids) == len(ids)) is right
    alone = Tools(TOOLS, "auto", parallel=False, strict=True)
    one = answer_grammar(None, alone, HERMES, tokenizer, False)
    assert allows(tokenizer, one, CALL) and not allows(tokenizer, one, f"{CALL}\n{OTHER}")


@pytest.mark.parametrize("tools", [AUTO, STRICT, Tools(TOOLS, "required", "g")])
@pytest.mark.parametrize("asked", [ASKED, None])
def test_generic_calls_are_bound_as_others(tokenizer: Tokenizer, asked: Any, tools: Any) -> None:
    found = answer_grammar(asked, tools, GENERIC, tokenizer, False)
    assert found == answer_grammar(asked, tools, HERMES, tokenizer, False)


@pytest.mark.parametrize(
    ("asked", "tools", "form", "begins", "words"),
    [
        (StructuredOutputs(grammar='start: "a"'), AUTO, HERMES, False, "without tools"),
        (StructuredOutputs(grammar='start: "a"'), None, None, True, "without thoughts"),
        (None, STRICT, LLAMA, False, "calls have no marker"),
        (StructuredOutputs(json={"minProperties": 3}), None, None, False, "minProperties=3"),
    ],
)
def test_what_cannot_be_asked_is_said(
    tokenizer: Tokenizer, asked: Any, tools: Any, form: Any, begins: bool, words: str
) -> None:
    with pytest.raises(ApiError, match=words):
        answer_grammar(asked, tools, form, tokenizer, begins)


def test_thoughts_that_a_tokenizer_has_no_tokens_for(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = "minivllm.serving.answers.answer_grammar.THINK_CLOSE"
    monkeypatch.setattr(named, "</no token of this model>")
    for asked, tools, param in ((ASKED, None, "text.format"), (None, STRICT, "tools")):
        with pytest.raises(ApiError, match="cannot be set with this chat template") as error:
            answer_grammar(asked, tools, HERMES, tokenizer, True, "text.format")
        assert error.value.param == param


def test_a_client_s_own_grammar_is_left_alone(tokenizer: Tokenizer) -> None:
    asked = StructuredOutputs(grammar='start: "a"')
    assert answer_grammar(asked, None, HERMES, tokenizer, False) is asked


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"type": "strin"}, "Invalid type: strin"),
    ({"properties": {"a": {"type": "string", "pattern": "(["}}}, "unclosed character class"),
    ({"$ref": "#/nowhere"}, "Pointer '/nowhere' does not exist"),
]


@pytest.mark.parametrize(("schema", "fault"), WRONG)
def test_the_fault_of_a_schema_is_told_without_the_grammar_around_it(
    tokenizer: Tokenizer, schema: dict[str, Any], fault: str
) -> None:
    wrong = {"type": "function", "function": {"name": "w", "parameters": schema}}
    for asked, tools, param in (
        (StructuredOutputs(json=schema), None, "response_format"),
        (None, Tools([*TOOLS, wrong], "required"), "tools[2].parameters"),
    ):
        with pytest.raises(ApiError, match=re.escape(fault)) as error:
            answer_grammar(asked, tools, HERMES, tokenizer, False)
        assert error.value.status == 400 and error.value.param == param
        assert not re.search("start|%json|x-guidance", error.value.message)
