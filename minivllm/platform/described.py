"""Fields of dataclasses described once, where they are declared: unit and direction in the field's
metadata, words in the docstring below it."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

Direction = Literal["lower", "higher"] | None  # which is better; None: neither


def measured(
    unit: str,
    better: Direction = None,
    default: float | Callable[[], Any] | None = None,
    signed: bool = False,
) -> Any:
    """The field of a figure.

    Args:
        unit: of the figure, or of each of its parts.
        better: which direction is better.
        default: what it is before it is measured, or the class of its parts.
        signed: whether it may be negative.
    """
    about = {"unit": unit, "direction": better, "signed": signed}
    if callable(default):
        return field(default_factory=default, metadata=about)
    return field(default=default, metadata=about)


class Words(NamedTuple):
    """What a docstring says of a figure."""

    description: str
    formula: str = ""
    example: str = ""  # a case by hand


def words(docstring: str) -> Words:
    """The parts of a docstring, which come after `Formula:` and `Example:`, each on one line."""
    parts = re.split(r"^(?:Formula|Example):", inspect.cleandoc(docstring), flags=re.MULTILINE)
    return Words(*(" ".join(part.split()) for part in parts))


@cache
def field_words(cls: type) -> dict[str, Words]:
    """The words of each field of a class that has a docstring below it."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    return {
        declared.target.id: words(str(below.value.value))
        for declared, below in zip(node.body, node.body[1:], strict=False)
        if isinstance(declared, ast.AnnAssign)
        and isinstance(declared.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }


@cache
def parts(cls: type) -> dict[str, type]:
    """The fields of a dataclass whose values are dataclasses, and those."""
    hints = get_type_hints(cls)
    found = {
        item.name: next(filter(is_dataclass, (hints[item.name], *get_args(hints[item.name]))), None)
        for item in fields(cls)
    }
    return {name: kind for name, kind in found.items() if isinstance(kind, type)}
