"""Tools of chat templates that take none, as texts of the messages."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.errors import BadInput
from minivllm.models.load.messages import RESULT_ROLES
from minivllm.models.load.source import EMBEDDED
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.models.load.tool_texts import (
    SYSTEM,
    CallForm,
    GenericCall,
    instructions,
    takes_tools_in_system,
    tool_texts,
    with_calls_in_content,
)
from tests.serving.chat_checkpoint import TEMPLATE

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Roles take turns, and the first one is the user's.
ALTERNATING = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
    "{% elif (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must "
    "alternate, not ' ~ m.role) }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
# A turn of the system is left out.
DROPPING = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
WITHOUT_TOOLS = (CHATML, ALTERNATING, DROPPING)
# Of Phi-4-mini-instruct.
IN_SYSTEM = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and "
    "message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + "
    "'<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}{{ '<|' + message['role'] "
    "+ '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt "
    "%}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)

FUNCTION = {"name": "größe", "parameters": {"type": "object", "properties": {"a": {}}}}
TOOLS = [
    {"type": "function", "function": FUNCTION},
    {"type": "function", "function": {"name": "g"}},
]
TEXT = instructions(TOOLS)
USER, SYSTEM_TURN = {"role": "user", "content": "u"}, {"role": "system", "content": "s"}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": "a", "type": "function", "function": function}


def result(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "a", "content": content}


def written(template: str, *messages: dict[str, Any], tools: Any = TOOLS, **further: Any) -> str:
    tokenizer = Tokenizer(EMBEDDED)
    tokenizer.chat_template = template
    return tokenizer.chat_text(list(messages), tools=tools, **further)


def test_the_text_has_every_function_and_a_call_s_form() -> None:
    lines = TEXT.splitlines()
    assert json.dumps(FUNCTION, ensure_ascii=False) in lines and '{"name": "g"}' in lines
    begin = lines.index("<tool_call>")
    assert lines[begin + 2] == "</tool_call>" and '"arguments"' in lines[begin + 1]
    assert TEXT.strip() == TEXT


def test_tools_are_in_the_turn_of_the_system() -> None:
    end = "<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    assert written(CHATML, USER) == f"<|im_start|>system\n{TEXT}{end}"
    assert written(CHATML, SYSTEM_TURN, USER) == f"<|im_start|>system\ns\n\n{TEXT}{end}"
    assert written(CHATML, SYSTEM_TURN, USER, tools=[]) == f"<|im_start|>system\ns{end}"


def test_a_template_without_a_turn_of_the_system_has_tools_in_the_user_s() -> None:
    said = {"role": "assistant", "content": "b"}
    for template in (ALTERNATING, DROPPING):
        found = written(template, USER, said, {"role": "user", "content": "c"})
        assert found == f"[user]{TEXT}\n\nu[assistant]b[user]c"
    assert written(DROPPING, SYSTEM_TURN, USER) == f"[user]{TEXT}\n\nu"
    assert written(DROPPING, said, USER) == f"[user]{TEXT}[assistant]b[user]u"


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (ALTERNATING, [SYSTEM_TURN, USER], "no system role"),  # of the client, as without tools
        (ALTERNATING, [USER, USER], "roles must alternate, not user"),
        ("{{ raise_exception('never') }}", [USER], "never"),
        ("{% if %}", [USER], "Expected an expression"),
    ],
)
def test_a_template_that_fails_says_why(template: str, messages: Any, words: str) -> None:
    with pytest.raises(BadInput, match=f"the chat template rejects this conversation: {words}"):
        written(template, *messages)


def test_calls_and_results_are_turns_that_every_template_takes() -> None:
    calling = {"role": "assistant", "content": "so", "tool_calls": [call("f", x="é"), call("g")]}
    written_calls = ('{"name": "f", "arguments": {"x": "é"}}', '{"name": "g", "arguments": {}}')
    texts = [f"<tool_call>\n{one}\n</tool_call>" for one in written_calls]
    answers = ["<tool_response>\n1\n</tool_response>", "<tool_response>\n</tool_response>"]
    calls, results = "\n".join(texts), "\n".join(answers)
    history = [USER, calling, result("1"), result("")]
    for tools, first in ((TOOLS, f"{TEXT}\n\nu"), (None, "u")):
        begin = f"[user]{first}[assistant]so\n{calls}[user]{results}"
        assert written(ALTERNATING, *history, tools=tools) == begin
        found = written(ALTERNATING, *history, {"role": "user", "content": "c"}, tools=tools)
        assert found == f"{begin}\nc"
        more = [*history, {"role": "assistant", "content": "b"}, USER]
        assert written(ALTERNATING, *more, tools=tools) == f"{begin}[assistant]b[user]u"
    alone = [USER, {"role": "assistant", "content": "", "tool_calls": [call("g")]}]
    assert written(CHATML, *alone, tools=None, add_generation_prompt=False).endswith(
        f"<|im_start|>assistant\n{texts[1]}<|im_end|>\n"
    )


def test_an_answer_that_is_begun_goes_on_behind_tools() -> None:
    begun = {"role": "assistant", "content": "It is"}
    for template in WITHOUT_TOOLS:
        found = written(template, USER, begun, continue_final_message=True)
        assert found.endswith("It is") and TEXT in found


def test_images_stay_where_they_are() -> None:
    image = {"type": "image", "placeholder": "<image>"}
    said = {"role": "assistant", "content": [image], "tool_calls": [call("f")]}
    (one,) = with_calls_in_content([said], GenericCall("<", ">"))
    text = '<{"name": "f", "arguments": {}}>'
    assert one == {"role": "assistant", "content": [image, {"type": "text", "text": text}]}
    assert said["content"] == [image]
    seen = result([{"type": "text", "text": "see "}, image])
    found = written(DROPPING, {"role": "user", "content": [image]}, said, seen)
    assert found.startswith(f"[user]{TEXT}\n\n<image>[assistant]<image>\n<tool_call>")
    assert found.endswith("[user]<tool_response>\nsee <image>\n</tool_response>")


@pytest.mark.parametrize("role", ["tool", "function"])
def test_results_without_calls_and_the_role_of_developers_are_turns_that_are_known(
    role: str,
) -> None:
    """No message has calls, and there are no tools."""
    messages = [{**result("r"), "role": role}, USER]
    text = "<tool_response>\nr\n</tool_response>\nu"
    assert written(ALTERNATING, *messages, tools=None) == f"[user]{text}"
    developer = {**SYSTEM_TURN, "role": "developer"}
    for tools, more in ((None, ""), (TOOLS, f"\n\n{TEXT}")):
        assert written(CHATML, developer, *messages, tools=tools) == (
            f"<|im_start|>system\ns{more}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
    knows = "{% if false %}developer{{ tools }}{% endif %}" + CHATML
    found = written(knows, developer, *messages, add_generation_prompt=False)
    assert [line.partition("start|>")[2] for line in found.splitlines() if "start|>" in line] == [
        "developer",
        role,
        "user",
    ]


@pytest.mark.parametrize("tools", ["f", [3], [{"function": {1, 2}}], [{"function": "f"}], 5])
@pytest.mark.parametrize("template", [CHATML, IN_SYSTEM])
def test_what_are_no_tools_is_one_line(template: str, tools: Any) -> None:
    with pytest.raises(BadInput, match="tools must be a list of objects that describe functions"):
        written(template, USER, tools=tools)


def test_a_template_with_tools_gets_them_as_it_takes_them() -> None:
    said = {"role": "assistant", "content": "", "tool_calls": [call("f")]}
    messages = [USER, said, result("r")]
    assert tool_texts(TEMPLATE, messages, TOOLS) == (messages, TOOLS, "", None)
    assert written("{{ tools | length }}{{ messages | length }}", *messages) == "23"
    listed = f'<|tool|>[{json.dumps(FUNCTION, ensure_ascii=False)}, {{"name": "g"}}]<|/tool|>'
    end = "<|end|><|user|>u<|end|><|assistant|>"
    assert written(IN_SYSTEM, USER) == f"<|system|>{SYSTEM}{listed}{end}"
    assert written(IN_SYSTEM, SYSTEM_TURN, USER) == f"<|system|>s{listed}{end}"


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


def test_a_form_of_calls_has_three_parts() -> None:
    form: CallForm = GenericCall()
    assert (form.before, form.after, form.arguments_key) == (
        "<tool_call>\n",
        "\n</tool_call>",
        "arguments",
    )


TURN = st.sampled_from(
    [
        USER,
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "", "tool_calls": [call("f"), call("g", x=1)]},
        result("r"),
        {**result("r"), "role": "function"},
        result([{"type": "text", "text": "t"}, {"type": "image", "placeholder": "i"}]),
    ]
)


@given(st.lists(TURN, min_size=1, max_size=8), st.booleans())
def test_nothing_of_a_conversation_is_lost(messages: list[dict[str, Any]], has_tools: bool) -> None:
    """Whatever its turns: no role that a template may not know, no key of tools, every text once;
    roles that took turns around results still do."""
    given = json.dumps(messages)
    found = tool_texts(CHATML, messages, TOOLS if has_tools else None)
    assert json.dumps(messages) == given and found.tools is None
    for turns in (found.messages, found.without_system or found.messages):
        assert {one["role"] for one in turns} <= {"system", "user", "assistant"}
        assert not any(one.keys() & {"tool_calls", "tool_call_id"} for one in turns)
        text = json.dumps(turns)
        results = given.count('"tool"') + given.count('"role": "function"')
        assert text.count("<tool_response>") - has_tools == results
        assert text.count('"name\\": \\"f\\"') == given.count('"name": "f"')
        # Side by side stand only turns of one role that stood so before.
        before = ["user" if one["role"] in RESULT_ROLES else one["role"] for one in messages]
        now = [one["role"] for one in turns if one["role"] != "system"]
        assert doubled(now) <= doubled(before)


def doubled(roles: list[str]) -> int:
    return sum(one == other for one, other in pairwise(roles))
