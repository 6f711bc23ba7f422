"""Tools reach templates that take them in a message."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from minivllm.models.load.chat_template import Conversation
from minivllm.serving.answers.chat_model import ChatModel
from minivllm.serving.answers.tool_messages import (
    SYSTEM,
    takes_tools_in_system,
    with_calls_in_content,
)
from minivllm.serving.parsing.tool_forms import PHI4
from tests.serving.chat_checkpoint import TEMPLATE

# Of Phi-4-mini-instruct.
IN_SYSTEM = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and "
    "message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + "
    "'<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}{{ '<|' + message['role'] "
    "+ '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt "
    "%}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]


class _Tokenizer:
    """A template, whose texts are their own tokens."""

    chat_template = IN_SYSTEM

    def token_id(self, text: str) -> int | None:
        return 1 if text in (PHI4.begin, PHI4.end) else None

    def decode(self, token_ids: str, skip_special_tokens: bool = True) -> str:
        return token_ids


class _Service:
    """Writes conversations as text."""

    tokenizer = _Tokenizer()
    pictures = None

    def require_tokenizer(self) -> _Tokenizer:
        return self.tokenizer

    def require_templates(self) -> _Service:
        return self

    async def token_ids(
        self, messages: list[dict[str, Any]], client: str, /, **variables: Any
    ) -> str:
        known = {"add_generation_prompt": True, **variables}
        return Conversation.of(IN_SYSTEM, messages, known).text()


def written(*messages: dict[str, Any], tools: Any = TOOLS) -> str:
    model = ChatModel(cast(Any, _Service()))
    assert model.form is not None and model.form.name == "phi4"
    return cast(str, asyncio.run(model.prompt(list(messages), tools)).token_ids)


def test_tools_are_a_text_of_the_system_message() -> None:
    listed = '<|tool|>[{"name": "f", "parameters": {"type": "object"}}]<|/tool|><|end|>'
    user = {"role": "user", "content": "u"}
    end = "<|user|>u<|end|><|assistant|>"
    assert written(user) == f"<|system|>{SYSTEM}{listed}{end}"
    system = {"role": "system", "content": "s"}
    assert written(system, user) == f"<|system|>s{listed}{end}"
    assert written(system, user, tools=None) == f"<|system|>s<|end|>{end}"


def test_calls_of_earlier_turns_are_in_their_texts() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    said = {"role": "assistant", "content": "so ", "tool_calls": [call, call]}
    result = {"role": "tool", "tool_call_id": "a", "content": "r"}
    text = '<|tool_call|>[{"name": "f", "arguments": {"x": "é"}}]<|/tool_call|>'
    found = written({"role": "user", "content": "u"}, said, result, tools=None)
    assert found == (
        f"<|user|>u<|end|><|assistant|>so {text}{text}<|end|><|tool|>r<|end|><|assistant|>"
    )


@pytest.mark.parametrize(
    ("template", "in_system"),
    [
        (IN_SYSTEM, True),
        (TEMPLATE, False),
        ("{% if tools is not none %}{{ message.tools }}{% endif %}", False),
        ("{{ messages }}", False),
    ],
)
def test_where_a_template_takes_tools(template: str, in_system: bool) -> None:
    assert takes_tools_in_system(template) == in_system


def test_calls_come_behind_pictures() -> None:
    image = {"type": "image", "placeholder": "<image>"}
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    said = {"role": "assistant", "content": [image], "tool_calls": [call]}
    (written_,) = with_calls_in_content([said], PHI4)
    text = f'{PHI4.before}{{"name": "f", "arguments": {{}}}}{PHI4.after}'
    assert written_ == {"role": "assistant", "content": [image, {"type": "text", "text": text}]}
    assert said["content"] == [image]
