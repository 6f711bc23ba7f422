"""The terminal's tables: whole figures at any width."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.table import Table

from minivllm.report.terminal import print_table, rich_table

NAME = "tiny-bf16-continuous-chat-poisson"
FIGURES = [("Output", "tok/s"), ("TTFT p50", "ms"), ("Host peak", "GB")]


def table() -> Table:
    made = rich_table(["cell"], FIGURES)
    made.add_row(NAME, "ok", "1,234", "56.7", "0.587")
    return made


def printed(width: int, terminal: bool) -> str:
    out = StringIO()
    print_table(table(), Console(file=out, width=width, force_terminal=terminal, color_system=None))
    return out.getvalue()


def test_a_pipe_gets_a_row_a_line_however_long() -> None:
    rows = [line for line in printed(20, terminal=False).splitlines() if "1,234" in line]
    assert len(rows) == 1
    assert rows[0].split() == [NAME, "ok", "1,234", "56.7", "0.587"]


def test_a_terminal_folds_names_before_it_gives_up_figures() -> None:
    text = printed(48, terminal=True)
    assert "0.587" in text and "56.7" in text and NAME not in text
    assert "no room" not in text
    assert max(map(len, text.splitlines())) <= 48


def test_what_does_not_fit_is_named_and_the_others_are_whole() -> None:
    text = printed(40, terminal=True)
    assert "1,234" in text and "56.7" in text and "0.5" not in text
    assert "no room here for Host peak" in text
    assert max(map(len, text.splitlines())) <= 40


def test_a_narrow_terminal_still_has_name_and_status() -> None:
    text = printed(20, terminal=True)
    assert "tiny-bf16-" in text and "ok" in text and "1,234" not in text
