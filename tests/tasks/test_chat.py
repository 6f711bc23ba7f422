"""The conversation: its commands, its history, and models that cannot chat."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from minivllm.llm import LLM
from minivllm.tasks.chat import TerminalChat
from tests.reference import make_checkpoint

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with a tokenizer of single characters and a chat template."""
    path = tmp_path_factory.mktemp("chat")
    make_checkpoint(path, max_position_embeddings=96)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:128]
    fast = FastTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.save(str(path / "tokenizer.json"))
    return path


class Screen:
    """Collects what a chat shows."""

    def __init__(self) -> None:
        self.spoken = ""
        self.notes: list[str] = []

    def write(self, is_thought: bool, text: str) -> None:
        self.spoken += text


@pytest.fixture
def talk(folder: Path) -> Callable[..., tuple[TerminalChat, Screen]]:
    """Start a chat, with or without a template."""

    def start(template: str | None = TEMPLATE) -> tuple[TerminalChat, Screen]:
        llm = LLM(
            str(folder),
            quant="fp32",
            overrides=["decoding.max_tokens=6", "decoding.ignore_eos=true"],
        )
        assert llm.tokenizer is not None
        llm.tokenizer.chat_template = template
        screen = Screen()
        return TerminalChat(llm, screen.write, screen.notes.append), screen

    return start


def test_the_checkpoint_s_decoding_is_said_once(
    folder: Path, tmp_path: Path, cli: Callable[..., Any]
) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "max_new_tokens": 4}')
    command = [f"model.path={tmp_path}", "model=hf", "quant=fp32", "task.prompt=ab"]
    done = cli("preset=generate", *command)
    assert (
        done.code == 0
        and done.err.count("generation_config.json sets temperature=0.6, max_tokens=4") == 1
    )
    assert (
        "generation_config.json"
        not in cli("preset=generate", *command, "decoding=greedy", "decoding.max_tokens=4").err
    )


def test_a_turn_is_answered_and_remembered(
    talk: Callable[..., tuple[TerminalChat, Screen]],
) -> None:
    chat, screen = talk()
    assert chat.handle("hi")
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]
    assert "6 output tokens" in screen.notes[-1]
    assert "TTFT" in screen.notes[-1]
    first = chat.answers[-1].num_prompt_tokens
    chat.handle("hi")
    assert chat.answers[-1].num_prompt_tokens > first
    chat.handle("/reset")
    assert chat.messages == []
    chat.handle("hi")
    assert chat.answers[-1].num_prompt_tokens == first


def test_commands(talk: Callable[..., tuple[TerminalChat, Screen]]) -> None:
    chat, screen = talk()
    chat.handle("/system be brief")
    assert chat.system == "be brief"
    chat.handle("/params temperature=0.5 max_tokens=3 stop=[x]")
    assert (chat.params.temperature, chat.params.max_tokens, chat.params.stop) == (0.5, 3, ("x",))
    assert "max_tokens=3" in screen.notes[-1]
    chat.handle("hi")
    assert chat.answers[-1].num_tokens <= 3
    chat.handle("/stats")
    assert "1 answer, " in screen.notes[-1]
    for wrong, complaint in (
        ("/params top_p=7", "top_p=7"),
        ("/params heat=1", "heat=1"),
        ("/params stop=[a", "'[a' is no value"),
        ("/params stop=[5]", "non-empty strings"),
        ("/params n=3", "decoding.n must be 1"),
        ("/what", "/what"),
    ):
        assert chat.handle(wrong)
        assert complaint in screen.notes[-1]
    assert chat.params.n == 1
    assert chat.handle("")
    assert not chat.handle("/exit")


def test_a_conversation_longer_than_the_context_is_told_and_goes_on(
    talk: Callable[..., tuple[TerminalChat, Screen]],
) -> None:
    chat, screen = talk()
    assert chat.handle("x" * 200)
    assert "the context is 96" in screen.notes[-1]
    assert chat.messages == []
    assert chat.handle("hi")
    assert len(chat.messages) == 2


def test_a_base_model_completes(talk: Callable[..., tuple[TerminalChat, Screen]]) -> None:
    chat, screen = talk(None)
    assert chat.is_base
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


def test_piped_lines_through_the_command_line(
    cli: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/stats\n/exit\nnever\n"))
    result = cli(
        "preset=chat", "model=hf", f"model.path={folder}", "quant=fp32", "decoding.max_tokens=4"
    )
    assert result.code == 0
    assert "base model" in result.out
    assert "1 answer, " in result.out
    refused = cli("preset=chat", "model=qwen3", "model.weights=random")
    assert refused.code == 2
    assert "trained weights" in refused.err


def test_generate_writes_text_to_stdout_and_figures_to_stderr(
    cli: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = (
        "preset=generate",
        "model=hf",
        f"model.path={folder}",
        "quant=fp32",
        "decoding.max_tokens=4",
    )
    result = cli(*common, "task.prompt=def main():")
    assert result.code == 0
    assert result.out.startswith("def main():")
    assert " output tokens" in result.err
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert cli(*common).out.startswith("from a pipe")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    empty = cli(*common)
    assert (empty.code, "the prompt is empty" in empty.err) == (2, True)
