"""Reading a built report back."""

from __future__ import annotations

import csv
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from minivllm.bench.records.record import Record
from minivllm.report.inputs import read
from minivllm.report.page import write_report
from tests.report.synthetic import write

VOID = {"meta", "link", "img", "br", "wbr", "hr", "input", "source"}


class Page(HTMLParser):
    """Checks nesting while parsing; collects links, images and text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self.stack == [], f"never closed: {self.stack}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack and self.stack[-1] == tag, f"</{tag}> closes {self.stack[-3:]}"
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        if not self.stack or self.stack[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def attributes(self, tag: str, name: str) -> list[str]:
        return [
            attrs.get(name) or "" for found, attrs in self.tags if found == tag and name in attrs
        ]


def table(out: Path) -> dict[str, dict[str, str]]:
    with open(out / "table.csv", encoding="utf-8", newline="") as file:
        return {row["label"]: row for row in csv.DictReader(file)}


def build_report(source: Path | list[Path], out_dir: Path) -> Path:
    """The page of the records at or below one place, or several."""
    return write_report(read(source), out_dir)


def build(tmp_path: Path, records: list[Record], **options: Any) -> tuple[Page, Path]:
    out = tmp_path / "reports" / "r"
    return Page(build_report(write(tmp_path / "runs", records, **options), out)), out
