"""task=chat and task=generate from the command line."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.interactive.characters import TEMPLATE, character_folder

__all__ = ["character_folder"]


def test_the_checkpoint_s_decoding_is_said_once(
    character_folder: Path, tmp_path: Path, cli: Callable[..., Any]
) -> None:
    for path in character_folder.iterdir():
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


def test_piped_lines_through_the_command_line(
    cli: Callable[..., Any], character_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        "/help\nhello\n/compare quant=int8 quant.skip=[]\n/compare nf4\n/compare workload=chat\n"
    )
    lines += "/compare runtime.cores=0\n/compare 'a\n/compare\n/stats\n/exit\nnever\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    result = cli(
        *("preset=chat", "model=hf", f"model.path={character_folder}"),
        *("quant=fp32", "decoding.max_tokens=4"),
    )
    assert result.code == 0
    assert "base model" in result.out
    assert "--- quant=int8 quant.skip=[]" in result.out
    assert "the texts " in result.out
    for complaint in (
        "/compare [k=v ...]  answer with a second engine",
        "/compare nf4: ",
        "workload changes no answer",
        "runtime.cores holds for the whole process",
        "No closing quotation",
        "comparing: quant=int8",  # still
        "1 answer, ",
    ):
        assert complaint in result.out
    assert "never" not in result.out
    refused = cli("preset=chat", "model=qwen3", "model.weights=random")
    assert refused.code == 2
    assert "trained weights" in refused.err


def test_generate_writes_text_to_stdout_and_figures_to_stderr(
    cli: Callable[..., Any], character_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = (
        "preset=generate",
        "model=hf",
        f"model.path={character_folder}",
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
