"""The conversation: its commands, its history, and models that cannot chat."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from minivllm.interactive.chat import COMPARE, HELP, TerminalChat
from minivllm.interactive.local import LocalModel
from minivllm.interactive.screen import Screen
from minivllm.llm import LLM
from tests.interactive.characters import TEMPLATE, character_folder

__all__ = ["character_folder"]


class Shown(Screen):
    """Collects what a chat shows."""

    def __init__(self) -> None:
        super().__init__(Console(file=io.StringIO()))
        self.spoken = ""
        self.notes: list[str] = []

    def write(self, is_thought: bool, text: str) -> None:
        self.spoken += text

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def talk(character_folder: Path) -> Callable[..., tuple[TerminalChat, Shown]]:
    """Start a chat, with or without a template."""

    def start(template: str | None = TEMPLATE) -> tuple[TerminalChat, Shown]:
        llm = LLM(
            str(character_folder),
            quant="fp32",
            overrides=["decoding.max_tokens=6", "decoding.ignore_eos=true"],
        )
        assert llm.tokenizer is not None
        llm.tokenizer.chat_template = template
        screen = Shown()
        return TerminalChat(LocalModel(llm), screen), screen

    return start


def test_a_template_without_roles_is_announced(
    talk: Callable[..., tuple[TerminalChat, Shown]],
) -> None:
    for template, is_announced in (("{{ messages[0].content }}", True), (TEMPLATE, False)):
        model = talk(template)[0].model
        assert isinstance(model, LocalModel)
        assert ("continues texts" in " ".join(model.notices())) == is_announced


def test_a_turn_is_answered_and_remembered(
    talk: Callable[..., tuple[TerminalChat, Shown]],
) -> None:
    chat, screen = talk()
    assert chat.handle("hi")
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]
    assert "6 output tokens" in screen.notes[-1]
    assert "fp32" in chat.status() and "KV cache" in chat.status()
    assert "TTFT" in screen.notes[-1]
    first = chat.answers[-1].num_prompt_tokens
    chat.handle("hi")
    assert chat.answers[-1].num_prompt_tokens > first
    chat.handle("/reset")
    assert chat.messages == []
    chat.handle("hi")
    assert chat.answers[-1].num_prompt_tokens == first


def test_commands(talk: Callable[..., tuple[TerminalChat, Shown]]) -> None:
    chat, screen = talk()
    chat.handle("/system be brief")
    assert chat.system == "be brief"
    chat.handle("/params temperature=0.5 max_tokens=3 stop=[x]")
    params = chat.decoding.params
    assert (params.temperature, params.max_tokens, params.stop) == (0.5, 3, ("x",))
    assert "max_tokens=3" in screen.notes[-1]
    chat.handle("hi")
    assert chat.answers[-1].num_tokens <= 3
    chat.handle("/stats")
    assert "1 answer, " in screen.notes[-1]
    for wrong, complaint in (
        ("/params top_p=7", "top_p=7"),
        ("/params heat=1", "heat=1"),
        ("/params temperatur=1", "write name=value; did you mean temperature?"),
        ("/params stop=[a", "'[a' is no value"),
        ("/params stop=[5]", "non-empty strings"),
        ("/params n=3", "decoding.n must be 1"),
        ("/what", "/what"),
        ("/compare quant=nf4", "/compare is for engines"),
    ):
        assert chat.handle(wrong)
        assert complaint in screen.notes[-1]
    for offering in ("/help", "/compar"):  # nothing here can be compared with
        chat.handle(offering)
        assert "/compare" not in screen.notes[-1]
    assert chat.decoding.params.n == 1
    assert chat.handle("")
    assert not chat.handle("/exit")


@pytest.mark.parametrize("width", [30, 80, 0])
def test_a_note_is_wrapped_between_words_on_a_terminal(width: int) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=width > 0, width=width or 30, no_color=True)
    text = HELP.format(compare=COMPARE)
    Screen(console).note(text)
    lines = re.sub(r"\x1b\[\d*m", "", file.getvalue()).splitlines()
    if width == 30:
        assert max(map(len, lines)) <= 30
        assert " ".join(lines).split() == text.split()
    else:  # it fits 80 columns, and a file has whole lines whatever its width
        assert lines == text.splitlines() and max(map(len, lines)) <= 80


def test_a_conversation_longer_than_the_context_is_told_and_goes_on(
    talk: Callable[..., tuple[TerminalChat, Shown]],
) -> None:
    chat, screen = talk()
    assert chat.handle("x" * 200)
    assert "the context is 96" in screen.notes[-1]
    assert chat.messages == []
    assert chat.handle("hi")
    assert len(chat.messages) == 2


def test_a_base_model_completes(talk: Callable[..., tuple[TerminalChat, Shown]]) -> None:
    chat, screen = talk(None)
    assert chat.model.is_base
    chat.handle("def f")
    assert screen.spoken.startswith("def f")
    assert chat.messages == []
    chat.handle("/system be brief")
    assert "no system prompt" in screen.notes[-1] and chat.system is None
    before = screen.spoken
    assert chat.handle("/statz")
    assert (
        screen.notes[-1]
        == "unknown command /statz; did you mean /stats? (/help lists the commands)"
    )
    assert not chat.handle("/quit")
    chat.handle("x" * 200)
    assert "the context is 96" in screen.notes[-1]
    assert screen.spoken == before
