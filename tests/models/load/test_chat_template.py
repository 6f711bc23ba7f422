"""Chat templates run in a process of their own, which may neither stay for ever nor take all
memory."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from minivllm.errors import BadInput
from minivllm.models.load import chat_template
from minivllm.models.load.chat_template import Conversation, variables_of, variables_question
from minivllm.platform.processes.mortal import MortalProcess

MESSAGES = [{"role": "user", "content": "hi"}]


def render(template: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    return Conversation.of(template, messages, variables).text()


def variables(template: str) -> frozenset[str]:
    child: MortalProcess = chat_template._renderer(os.getpid())
    return variables_of(json.loads(child.ask(variables_question(template), 60)))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ '%010000000000d' % 5 }}", "needs more than 1 GiB"),
        ("{% for i in range(70) %}{{ 'a' * 1000000 }}{% endfor %}", "more than 64 MiB of text"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ ().__class__.__bases__ }}", "unsafe"),
        ("{{ messages[3].content }}", "has no element 3|no attribute|undefined"),
    ],
)
def test_a_template_that_cannot_be_used_is_one_line(template: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        render(template, MESSAGES, {})
    assert render("{{ messages[0].content }}", MESSAGES, {}) == "hi"


def test_a_template_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0.5)
    loop = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(BadInput, match=r"did not end within 0\.5 s"):
        render(loop, MESSAGES, {})
    monkeypatch.undo()
    assert render("{{ x }}", MESSAGES, {"x": "é"}) == "é"


def test_what_json_cannot_say_is_refused() -> None:
    with pytest.raises(BadInput, match="must be made of JSON's values"):
        render("", [{"role": "user", "content": {1, 2}}], {})


def test_variables_are_what_a_template_reads_and_does_not_set() -> None:
    template = (
        "{% set own = 1 %}{% macro say(x) %}{{ x ~ own }}{% endmacro %}{{ say(date) | tojson }}"
        "{% for m in messages %}{{ strftime_now('%Y') }}{{ raise_exception('no') }}{% endfor %}"
    )
    assert variables(template) == {"date", "messages"}
    with pytest.raises(BadInput, match="the chat template is wrong: Expected an expression"):
        variables("{% if %}")
