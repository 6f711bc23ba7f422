"""Fields that are described where they are declared."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from minivllm.platform.described import Words, field_words, measured, parts


@dataclass
class Inner:
    mean: float | None = None
    """Mean of all."""


@dataclass
class Outer:
    """A record."""

    size: int | None = measured("bytes", "lower")
    """Size of it,
    in memory.

    Formula: a + b.
    Example: 1 + 2: 3.
    """
    inner: Inner = measured("ms", default=Inner)
    several: list[Inner] = field(default_factory=list)
    maybe: Inner | None = None
    above: float = measured("J", default=0.5, signed=True)


def test_words_are_those_of_the_docstring_below_a_field() -> None:
    assert field_words(Outer) == {"size": Words("Size of it, in memory.", "a + b.", "1 + 2: 3.")}
    assert field_words(Inner) == {"mean": Words("Mean of all.")}


def test_a_figure_has_unit_direction_and_default() -> None:
    made, about = Outer(), {item.name: item.metadata for item in fields(Outer)}
    assert made == Outer(None, Inner(), [], None, 0.5) and made.inner is not Outer().inner
    assert about["size"] == {"unit": "bytes", "direction": "lower", "signed": False}
    assert about["above"]["signed"] and not about["several"]


def test_parts_are_the_dataclasses_among_the_fields() -> None:
    assert parts(Outer) == {"inner": Inner, "several": Inner, "maybe": Inner}
