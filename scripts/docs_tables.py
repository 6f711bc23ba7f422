"""What the documentation has from the code, from committed records and from files of scripts.

    python scripts/docs_tables.py          # writes it between its marks in the pages

A mark is a comment, `<!-- kind: arguments -->`, and what it marks ends with `<!-- end -->`:

| mark | content |
| --- | --- |
| `fields: Class` | the fields of a part of a record |
| `knobs: Class` | the knobs of an option dataclass |
| `glossary: timed` or `read` | the metrics that are made from times, or those that are read |
| `way: file names` | the files of a way that `structure.py` has recorded, and what each is |
| `table: path` | a table that a report has written |
| `file: file names form` | a number of a JSON file, by the names, or places in a list, to it |
| `record: sweep[knob=value,...] fields form` | the mean of a field over an arm's blocks |
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from fnmatch import fnmatch
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import fmean
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from minivllm.bench.metrics.glossary import Figure, glossary
from minivllm.bench.metrics.metrics import METRICS
from minivllm.bench.records import archive
from minivllm.bench.records.reading import read_records
from minivllm.bench.records.record import Provenance, Record
from minivllm.config.groups import OPTIONS, TARGETLESS
from minivllm.config.option_help import declared, written
from minivllm.platform.described import field_words, parts
from minivllm.platform.options import filled as with_defaults

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
EXAMPLES = ROOT / "reports" / "examples" / "cpu"
MARK = re.compile(
    r"(<!-- (fields|glossary|knobs|way|table|file|record): ([^\n]+?) -->)(.*?)<!-- end -->",
    re.DOTALL,
)
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
    the place of its meaning. Fields in turn that differ in their names only share a row."""
    described = field_words(cls)

    def meaning(name: str) -> str:
        known = described.get(name)
        return known.description if known and not known.formula else "[metrics](metrics.md)"

    hints = {name: kind(hint) for name, hint in get_type_hints(cls).items()}
    rows = (
        f"| {', '.join(f'`{name}`' for name in names)} | {of_type} | {words} |"
        for (of_type, words), names in groupby(hints, lambda name: (hints[name], meaning(name)))
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


def knob_table(cls: type) -> str:
    """Name, default, values and meaning of each knob of an option dataclass."""
    knobs = declared(cls)

    def default(name: str) -> str:
        value: Any = with_defaults(cls, {})
        for part in name.split("."):
            value = value[part]
        return "" if value == "???" else f"`{written(value)}`"

    rows = (
        f"| `{name}` | {default(name)} | {knob.values} | {knob.sentence} |"
        for name, knob in knobs.items()
        if not any(other.startswith(f"{name}.") for other in knobs)
    )
    return _lines("| knob | default | values | meaning |", rows)


@cache
def _options() -> dict[str, type]:
    return {cls.__name__: cls for cls in (*OPTIONS.values(), *TARGETLESS.values())}


def _lines(head: str, rows: Iterable[str]) -> str:
    rule = "|" + " --- |" * (head.count("|") - 1)
    return "".join(f"{line}\n" for line in (head, rule, *rows))


def way_table(file: str, names: str) -> str:
    """The files of a recorded way in its order, each with the first sentence of its docstring."""

    def sentence(place: str) -> str:
        text = ast.get_docstring(ast.parse((ROOT / "minivllm" / place).read_text())) or ""
        return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]

    rows = (f"| `{place}` | {sentence(place)} |" for place in found(file, names))
    return _lines("| file | what it is |", rows)


# ---- figures


@cache
def _content(file: Path) -> Any:
    return json.loads(file.read_text())


def found(file: str, names: str) -> Any:
    """A value in a JSON file of the examples by the names, or places in a list, that lead to it."""
    node = _content(EXAMPLES / file)
    for name in names.split("."):
        node = node[int(name)] if isinstance(node, list) else node[name]
    return node


@cache
def records_of(sweep: str) -> list[dict[str, Any]]:
    """The committed records of a sweep."""
    return read_records(EXAMPLES / "runs" / f"{sweep}{archive.SUFFIX}")


def named(where: str) -> list[dict[str, Any]]:
    """The record that a pattern of its folder names, or all blocks of an arm:
    SWEEP[knob=value,...]."""
    if not where.endswith("]"):
        sweep, _, folder = where.partition("/")
        (record,) = (r for r in records_of(sweep) if fnmatch(Path(r["directory"]).name, folder))
        return [record]
    sweep, _, arm = where.removesuffix("]").partition("[")
    blocks = [record for record in records_of(sweep) if record["arm"].split() == arm.split(",")]
    assert blocks, f"no record of {where}"
    return blocks


def value(record: dict[str, Any], fields: str) -> float:
    """A field of a record by its dotted name, a sum of several, or the quotient of two such:
    a.b+a.c/a.d."""
    parts = []
    for names in fields.split("/"):
        parts.append(0.0)
        for name in names.split("+"):
            node: Any = record
            for key in name.split("."):
                node = node[key]
            parts[-1] += float(node)
    return parts[0] / parts[1] if len(parts) == 2 else parts[0]


# ---- pages


def _glossary(half: str) -> str:
    timed = len(METRICS)
    return glossary_table({"timed": glossary()[:timed], "read": glossary()[timed:]}[half])


KINDS: dict[str, Callable[..., str]] = {
    "fields": lambda name: "\n" + field_table(classes()[name]),
    "glossary": lambda half: "\n" + _glossary(half),
    "knobs": lambda name: "\n" + knob_table(_options()[name]),
    "way": lambda file, names: "\n" + way_table(file, names),
    "table": lambda path: "\n" + (ROOT / path).read_text(encoding="utf-8"),
    "file": lambda file, names, form: format(float(found(file, names)), form),
    "record": lambda where, fields, form: format(
        fmean(value(record, fields) for record in named(where)), form
    ),
}


def filled(text: str) -> str:
    """A page with what is between its marks as code, records and files have it now."""
    return MARK.sub(lambda one: f"{one[1]}{KINDS[one[2]](*one[3].split())}<!-- end -->", text)


def main() -> None:
    """Entry point; see the module's docstring."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(page)


if __name__ == "__main__":
    main()
