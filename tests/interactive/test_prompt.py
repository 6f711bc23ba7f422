"""What is typed and piped in, of one line or of several."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from minivllm.interactive.prompt import joined, typed_texts


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[str]]]:
    """The texts that these keys make, until the end of the input."""
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):

        def texts(pressed: str) -> list[str]:
            keys.send_text(pressed + "\x04")
            return list(typed_texts(lambda: "a status"))

        yield texts


def test_a_backslash_joins_lines() -> None:
    lines = ["a\\", "b", "c", "d\\", "e\\"]
    assert list(joined(lines)) == ["a\nb", "c", "d\ne"]


def test_piped_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\\\n c\n"))
    assert list(typed_texts(lambda: "")) == ["a", "b\n c"]


@pytest.mark.parametrize(
    ("pressed", "texts"),
    [
        ("one\rtwo\r", ["one", "two"]),
        ("one\\\r two\r", ["one\n two"]),
        ("one\x1b\r two\r", ["one\n two"]),  # Alt-Enter
        ("\x1b[200~one\n\n two\\\nthree\x1b[201~!\r", ["one\n\n two\\\nthree!"]),  # pasted
        ("half\x03whole\r", ["whole"]),  # Ctrl-C clears the text
    ],
)
def test_keys(typed: Callable[[str], list[str]], pressed: str, texts: list[str]) -> None:
    assert typed(pressed) == texts
