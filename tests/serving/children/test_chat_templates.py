"""Conversations of clients are written in turns, by processes that a template may end."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from minivllm.models.load.source import EMBEDDED
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.platform.processes.mortal import MortalProcess
from minivllm.serving.children import child_turns
from minivllm.serving.children.chat_templates import ChatTemplates
from minivllm.serving.errors import ApiError

ENDLESS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% if message.content == 'slow' %}"
    f"{ENDLESS}{{% elif message.content == 'large' %}}{{{{ 'x' * 9999999999 }}}}{{% endif %}}"
    "{% endfor %}{{ raise_exception('no') if bad }}{{ client }}"
)


def user(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.fixture
def make() -> Iterator[Callable[[str], ChatTemplates]]:
    made = []

    def new(template: str) -> ChatTemplates:
        tokenizer = Tokenizer(EMBEDDED)
        tokenizer.chat_template = template
        made.append(ChatTemplates(tokenizer))
        return made[-1]

    yield new
    for one in made:
        one.turns.stop()


def test_ids_are_those_of_the_tokenizer(make: Callable[[str], ChatTemplates]) -> None:
    templates = make(TEMPLATE)
    known = {"client": "é", "add_generation_prompt": False}
    found = asyncio.run(templates.token_ids(user("a = 1"), "c", **known))
    assert found == templates._tokenizer.render_chat(user("a = 1"), **known)
    assert templates._tokenizer.decode(found) == "a = 1é"
    begun = [*user("x"), {"role": "assistant", "content": "so "}]
    found = asyncio.run(templates.token_ids(begun, "c", continue_final_message=True, client="no"))
    assert templates._tokenizer.decode(found) == "xso "


def test_what_a_template_rejects_or_dies_of_is_of_the_messages(
    make: Callable[[str], ChatTemplates], monkeypatch: pytest.MonkeyPatch
) -> None:
    templates = make(TEMPLATE)
    for content, more, words in (
        ("x", {"bad": True}, "the chat template rejects this conversation: no"),
        ("large", {}, "it needs more than 1 GiB of memory"),
        ("x", {"client": {1}}, "must be made of JSON's values"),
        ("slow", {}, "the conversation was not done within 0.5 s: make it smaller"),
    ):
        if content == "slow":
            monkeypatch.setattr(child_turns, "SECONDS", 0.5)
        with pytest.raises(ApiError, match=words) as caught:
            asyncio.run(templates.token_ids(user(content), "c", **more))
        assert (caught.value.status, caught.value.param) == (400, "messages")


def test_variables_are_read_once(make: Callable[[str], ChatTemplates]) -> None:
    templates = make(TEMPLATE)
    for _ in range(2):
        assert asyncio.run(templates.variables("c")) == {"messages", "bad", "client"}
        templates.turns._free = []  # none can be asked again
    with pytest.raises(ApiError, match="the chat template is wrong: Expected an expression"):
        asyncio.run(make("{% if %}").variables("c"))


def test_the_slow_conversations_of_one_client_let_another_have_its_turn(
    make: Callable[[str], ChatTemplates], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that is slow is ended by the test, before a clock does."""
    templates = make(TEMPLATE)
    quick_one = templates._tokenizer.conversation(user("x")).question
    asked: list[bytes] = []
    begun: queue.Queue[MortalProcess] = queue.Queue()
    ask = MortalProcess.ask

    def noted(self: MortalProcess, question: bytes, seconds: float) -> bytes:
        asked.append(question)
        begun.put(self)
        return ask(self, question, seconds)

    monkeypatch.setattr(MortalProcess, "ask", noted)

    async def end_one() -> None:
        process = await asyncio.to_thread(begun.get, True, 60)
        while process._process is None:  # it is being started
            await asyncio.sleep(0.01)
        process._process.kill()

    async def run() -> None:
        slow = [asyncio.ensure_future(templates.token_ids(user("slow"), "a")) for _ in range(6)]
        while len(asked) < child_turns.PROCESSES:
            await asyncio.sleep(0.01)
        quick = asyncio.ensure_future(templates.token_ids(user("x"), "b"))
        while "b" not in templates.turns._waiting:
            await asyncio.sleep(0.01)
        for _ in range(child_turns.PROCESSES):
            await end_one()
        assert await quick
        for one in slow:
            one.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        templates.turns.stop()

    asyncio.run(run())
    assert asked.index(quick_one) <= child_turns.PROCESSES + 1
