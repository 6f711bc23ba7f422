"""The tables of the documentation that the code describes: the record's fields and the glossary.

python scripts/docs_tables.py          # writes them between their marks in the pages
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from minivllm.bench.metrics.glossary import Figure, glossary
from minivllm.bench.metrics.metrics import METRICS
from minivllm.bench.records.record import Provenance, Record
from minivllm.platform.described import field_words, parts

PAGES = Path(__file__).resolve().parents[1] / "docs" / "reference"
TABLE = re.compile(r"(<!-- (fields|glossary): (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}


def classes(cls: type = Record) -> dict[str, type]:
    """A record's dataclasses by name, each once, in the order of their fields; its provenance
    last."""
    found = {cls.__name__: cls}
    for part in parts(cls).values():
        found |= classes(part)
    return {**found, "Provenance": Provenance} if cls is Record else found


def kind(hint: Any) -> str:
    """A type as JSON names it: with `[]` for a list of it, and `?` where it may be null."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        (known,) = (part for part in inner if part is not NoneType)
        return f"{kind(known)}?"
    if origin is list:
        return f"{kind(inner[0])}[]"
    if origin is dict or is_typeddict(hint):
        return "object"
    if is_dataclass(hint):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    return PLAIN[hint]


def field_table(cls: type) -> str:
    """Name, type and meaning of each field of a part of the record; of one that the glossary has,
    the place of its meaning."""
    described = field_words(cls)

    def meaning(name: str) -> str:
        known = described.get(name)
        return known.description if known and not known.formula else "[metrics](metrics.md)"

    rows = (
        f"| `{name}` | {kind(hint)} | {meaning(name)} |"
        for name, hint in get_type_hints(cls).items()
    )
    return _lines("| field | type | meaning |", rows)


def glossary_table(figures: Iterable[Figure]) -> str:
    """Everything that the glossary says of each figure."""
    rows = (
        f"| `{f.name}` | {', '.join(filter(None, (f.unit, f.direction)))} | {f.description} | "
        f"{f.formula} | {f.example} |"
        for f in figures
    )
    return _lines("| metric | unit, better | meaning | formula | example |", rows)


def _lines(head: str, rows: Iterable[str]) -> str:
    rule = "|" + " --- |" * (head.count("|") - 1)
    return "".join(f"{line}\n" for line in (head, rule, *rows))


def filled(text: str) -> str:
    """A page with its marked tables as the code has them now."""
    known, timed = classes(), len(METRICS)
    halves = {"timed": glossary()[:timed], "read": glossary()[timed:]}

    def table(found: re.Match[str]) -> str:
        name = found[3]
        new = field_table(known[name]) if found[2] == "fields" else glossary_table(halves[name])
        return f"{found[1]}{new}{found[4]}"

    return TABLE.sub(table, text)


def main() -> None:
    """Entry point; see the module's docstring."""
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(page)


if __name__ == "__main__":
    main()
