"""A chat with a server: which API is spoken, what is sent, and what goes wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minivllm import BadInput
from minivllm.config.compose import compose
from minivllm.errors import NotInstalled
from minivllm.interactive.answer import Answer
from minivllm.interactive.model import ChatDecoding, Turn
from tests.engines import fake_server

pytest.importorskip("aiohttp")

from minivllm.interactive.remote import RemoteModel

Talk = Callable[..., RemoteModel]


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Talk]:
    """Connect to a server with these settings, with these overrides; both end with the test."""
    closing: list[Callable[[], None]] = []

    def start(*overrides: str, **settings: Any) -> RemoteModel:
        server, url = fake_server.in_thread(path=str(tmp_path / "asked"), **settings)
        closing.append(server.shutdown)
        address = url.removesuffix("/v1")
        model = RemoteModel(compose(["preset=chat", f"task.url={address}", *overrides]))
        closing.append(model.close)
        return model

    yield start
    for close in reversed(closing):
        close()


def asked(folder: Path) -> list[dict[str, Any]]:
    """The requests so far."""
    return [json.loads(line) for line in (folder / "asked").read_text().splitlines()]


def ask(
    model: RemoteModel, text: str = "hi", decoding: ChatDecoding | None = None
) -> tuple[Answer, list[tuple[bool, str]]]:
    """An answer, and what it shows."""
    shown: list[tuple[bool, str]] = []
    turn = Turn(text, [{"role": "user", "content": "before"}], "be brief")
    answer = model.answer(
        turn, decoding or model.decoding, lambda *part: shown.append(part), lambda answer: None
    )
    return answer, shown


def test_a_chat(talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret-key")
    deltas = [
        *({"role": "assistant"}, {"reasoning_content": "well"}, {"reasoning_content": "?"}),
        *({"content": "Hel"}, {"content": "lo"}),
    ]
    model = talk("task.api_key_env=MY_KEY", chat=deltas)
    assert (model.is_base, model.name) == (False, "small")
    answer, shown = ask(model)
    assert shown == [(True, "well"), (True, "?"), (False, "Hel"), (False, "lo")]
    assert (answer.text, answer.num_tokens, answer.num_prompt_tokens) == ("Hello", 40, 9)
    assert answer.finish_reason == "stop" and "40 output tokens" in answer.summary()
    body = asked(tmp_path)[-1]
    assert body.pop("key") == "Bearer secret-key"
    assert body == {
        "at": "/v1/chat/completions",
        "model": "small",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 1024,
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "before"},
            {"role": "user", "content": "hi"},
        ],
    }


def test_thoughts_in_the_text_are_told_apart(talk: Talk) -> None:
    answer, shown = ask(talk(chat=[{"content": "<think>a</th"}, {"content": "ink>b"}]))
    assert shown == [(True, "a"), (False, "b")] and answer.text == "b"


def test_a_base_model_completes(talk: Talk, tmp_path: Path) -> None:
    model = talk("decoding.max_tokens=3")
    assert model.is_base
    answer, shown = ask(model, "def f")
    assert shown[0] == (False, "def f") and answer.text == "xxx"
    assert (answer.num_tokens, answer.finish_reason) == (3, "length")
    body = asked(tmp_path)[-1]
    assert (body["at"], body["prompt"]) == ("/v1/completions", "def f") and "messages" not in body


def test_a_server_that_counts_nothing(talk: Talk) -> None:
    answer, _ = ask(talk("decoding.max_tokens=3", usage=False))
    assert "3 pieces of text" in answer.summary() and "prompt" not in answer.summary()


@pytest.mark.parametrize(
    ("overrides", "sent"),
    [
        ((), {"max_tokens": 1024}),
        (("decoding.seed=3", "decoding.stop=[x]"), {"max_tokens": 1024, "seed": 3, "stop": ["x"]}),
        (("decoding=greedy",), {"max_tokens": 1024, "temperature": 0.0, "top_p": 1.0}),
    ],
)
def test_only_what_the_user_sets_is_sent(
    talk: Talk, tmp_path: Path, overrides: tuple[str, ...], sent: dict[str, Any]
) -> None:
    ask(talk(*overrides, chat=[{"content": "a"}]))
    rest = ("at", "key", "model", "stream", "stream_options", "messages")
    assert {name: v for name, v in asked(tmp_path)[-1].items() if name not in rest} == sent


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (("quant=nf4",), "leave quant=nf4 out"),
        (("model=qwen3",), "leave model=qwen3 out"),
        (("cache.block_size=32",), "leave cache.block_size out"),
        (("decoding.n=2",), "decoding.n must be 1"),
        (("decoding.logprobs=1",), "decoding.logprobs is not sent"),
        (("task.served_model_name=large",), "it serves small"),
    ],
)
def test_knobs_that_a_server_cannot_be_given(
    talk: Talk, overrides: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(BadInput, match=complaint):
        talk(*overrides, chat=[])


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"fault": "refuse"}, "rejects requests: .*chat/completions.*not for you"),
        ({"models": "{}"}, "is task.url right"),
        ({"redirect": "http://localhost:1/"}, "the final address in task.url"),
    ],
)
def test_servers_that_cannot_be_used(talk: Talk, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        talk(**settings)


def test_no_server() -> None:
    with pytest.raises(BadInput, match="no server answers"):
        RemoteModel(compose(["preset=chat", "task.url=http://127.0.0.1:1"]))


def test_an_answer_that_breaks_off_is_one_line(talk: Talk) -> None:
    model = talk("decoding.max_tokens=6", fault="die")
    with pytest.raises(BadInput, match="closed the stream"):
        ask(model)
    model = talk(chat=[{"content": "a"}], fault="endless")
    with pytest.raises(BadInput, match="closed the stream"):
        ask(model)


def test_ctrl_c_stops_an_answer_and_the_next_one_is_whole(talk: Talk) -> None:
    model = talk(chat=[{"content": "a"}, "silence", {"content": "b"}])
    shown: list[str] = []

    def show(is_thought: bool, text: str) -> None:
        shown.append(text)
        raise KeyboardInterrupt

    answer = model.answer(Turn("hi"), model.decoding, show, lambda answer: None)
    assert (answer.text, answer.finish_reason, shown) == ("a", "abort", ["a"])
    assert ask(model)[0].text == "ab"


def test_without_aiohttp_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minivllm.engines.openai.client", None)
    with pytest.raises(NotInstalled, match=r"pip install -e '\.\[peers\]'"):
        RemoteModel(compose(["preset=chat", "task.url=http://127.0.0.1:1"]))
