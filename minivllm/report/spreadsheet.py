"""Tables as text that other programs open: nothing that a record says is run or breaks a row
there."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from minivllm.analysis.format import MISSING
from minivllm.platform.untrusted import printable

FORMULA = tuple(
    "=+-@\t\r\n\N{FULLWIDTH EQUALS SIGN}\N{FULLWIDTH PLUS SIGN}\N{FULLWIDTH HYPHEN-MINUS}"
)
FORMULA += ("\N{FULLWIDTH COMMERCIAL AT}",)
Heading = TypeVar("Heading")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
# A backslash, a code span and a column's edge; what begins a tag; what makes a link of [words].
_MARKDOWN = re.compile(r"[\\`|]|<(?=[A-Za-z/!?])|\](?=[(\[])")


def csv_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows as CSV; None is an empty cell.

    Text that a spreadsheet would compute (it begins with =, +, -, @ or a tab) has an apostrophe
    before it, as OWASP advises; numbers are written as they are.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_cell(name) for name in head])
    # Most of thousands of cells are numbers.
    writer.writerows(
        [v if type(v) is float or v is None else _cell(v) for v in row] for row in rows
    )
    return out.getvalue()


def _cell(value: object) -> object:
    if value is None or type(value) in (int, float):
        return value  # the writer leaves the place of None empty
    text = printable(str(value))
    runs = text.lstrip(" ").startswith(FORMULA) and not _NUMBER.fullmatch(text)
    return f"'{text}" if runs else text


def markdown_table(
    names: Sequence[str],
    figures: Sequence[str],
    lines: Iterable[Sequence[str]],
    left: Collection[str] = (),
) -> str:
    """A Markdown table whose first columns are words and whose others are figures, but for those of
    `left`; columns without an entry are left out."""
    heads = [(name, True) for name in names] + [(name, name in left) for name in figures]
    kept, lines = filled(heads, lines)
    head = [markdown_text(name) for name, _ in kept]
    align = [":--" if words else "--:" for _, words in kept]
    body = [[markdown_text(part) for part in line] for line in lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in (head, align, *body))


def filled(
    headings: Sequence[Heading], lines: Iterable[Sequence[str]]
) -> tuple[list[Heading], list[list[str]]]:
    """The columns of a table that have an entry in some line, or all where there is no line."""
    lines = list(lines)
    kept = [
        place
        for place in range(len(headings))
        if not lines or any(line[place] != MISSING for line in lines)
    ]
    return [headings[place] for place in kept], [[line[place] for place in kept] for line in lines]


def markdown_text(text: str) -> str:
    """Text in one line that Markdown shows as it is: no code, no tag, no link, no further
    column."""
    shown = _MARKDOWN.sub(
        lambda match: "&lt;" if match[0] == "<" else f"\\{match[0]}", printable(text)
    )
    return " ".join(shown.split())
