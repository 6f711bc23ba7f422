"""The form of tool calls is found by the chat template."""

from __future__ import annotations

from typing import Any, cast

import pytest

from minivllm.serving.parsing.tool_forms import GENERIC, HERMES, described, tool_form


class _Tokenizer:
    """A chat template and special tokens."""

    def __init__(self, chat_template: str | None, *special: str) -> None:
        self.chat_template, self._special = chat_template, special

    def token_id(self, text: str) -> int | None:
        return self._special.index(text) if text in self._special else None


QWEN = (
    "{%- if tools %}return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags{%- endif %}"
)


@pytest.mark.parametrize(
    ("name", "template", "special"),
    [
        ("hermes", QWEN, ()),
        ("mistral", "{{ '[AVAILABLE_TOOLS]' + tools|tojson }} {{ '[TOOL_CALLS] [' }}", ()),
        ("llama", '{{ tools }} {"name": x, "parameters": y}', ("<|python_tag|>",)),
        ("granite", "{{ tools }} write <|tool_call|> and a list", ()),
        ("phi4", "<|tool|>{{ message['tools'] }}<|/tool|>", ("<|tool_call|>", "<|/tool_call|>")),
        ("functools", 'as functools[{"name": x}]{{ tools }}', ()),
        (None, None, ()),
        ("generic", "{{ messages }}", ("<tool_call>",)),
        ("generic", "{{ messages }}{{ mytools }}<tool_call>", ()),
        (None, "{{ tools }}", ()),
        ("qwen_coder", QWEN + "<function=f><parameter=x>", ()),
        (None, QWEN + "<arg_key>", ()),
        (None, '{{ tools }} {"name": x, "parameters": y}', ()),
    ],
)
def test_the_form_of_a_template(
    name: str | None, template: str | None, special: tuple[str, ...]
) -> None:
    form = tool_form(cast(Any, _Tokenizer(template, *special)))
    assert (form and form.name) == name
    if form is not None:
        assert form.begin_id == (0 if special else None)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages }}", "the generic form: the chat template takes no tools"),
        (QWEN, "tool calls have the hermes form"),
        ("{{ tools }}", "tools are refused"),
        (None, ""),
    ],
)
def test_one_line_says_which_form_it_is(template: str | None, words: str) -> None:
    found = described(cast(Any, _Tokenizer(template)))
    assert words in found and bool(found) == bool(words) and "\n" not in found


def test_the_generic_form_is_written_as_hermes() -> None:
    written = ("begin", "before", "after", "end", "arguments_key")
    assert [getattr(GENERIC, one) for one in written] == [getattr(HERMES, one) for one in written]
    assert described(None) == ""
