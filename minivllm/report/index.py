"""The page that lists every report of a folder, the newest first."""

from __future__ import annotations

import time
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

from minivllm.errors import BadInput
from minivllm.platform.untrusted import open_file, printable
from minivllm.report.html import MAKER, render, write_bytes

PAGE = "index.html"
HEAD = 1 << 16  # bytes of a page in which its head says what it is


@dataclass(frozen=True)
class Entry:
    """One report."""

    name: str
    href: str
    title: str
    verdict: str
    date: str


def rebuild(reports_dir: Path) -> Path | None:
    """List the reports that lie directly in a folder; what else lies there is left alone.

    Returns:
        The path of the list; None where a page that this project did not write has its place, or
        there is no report.

    Raises:
        OSError: it cannot be written.
    """
    page = reports_dir / PAGE
    entries = [_entry(path.parent) for path in sorted(reports_dir.glob(f"*/{PAGE}"))]
    if not entries or (page.exists() and _head(page).get("generator") != MAKER):
        return None
    entries.sort(key=lambda entry: entry.date, reverse=True)
    write_bytes(page, render("list.html.j2", entries=entries).encode())
    return page


def _entry(folder: Path) -> Entry:
    head = _head(folder / PAGE)
    date = head.get("date") or time.strftime(
        "%Y-%m-%d %H:%M", time.localtime((folder / PAGE).stat().st_mtime)
    )
    name = printable(folder.name).encode("utf-8", "replace").decode()
    return Entry(
        name,
        f"{quote(folder.name)}/{PAGE}",
        head.get("title", ""),
        head.get("description", ""),
        date,
    )


def _head(page: Path) -> dict[str, str]:
    """What the head of a page says of it in its `meta`, by their names."""
    try:
        with open_file(page, str(page)) as file:
            text = file.read(HEAD).decode("utf-8", "replace")
    except (BadInput, OSError):
        return {}
    reader = _Reader()
    reader.feed(text)
    return {name: printable(value) for name, value in reader.head.items()}


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.head: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "meta" and (name := named.get("name")):
            self.head.setdefault(name, named.get("content") or "")
