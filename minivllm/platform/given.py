"""Checks of a caller's arguments: known fields, numbers within a range, texts, token ids.
Torch-free."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import wraps
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeVar

from minivllm.errors import BadInput, nearest

FLOAT32 = 3.4028234663852886e38  # the largest finite float32
# The least positive values of SamplingParams; that of top_p is the smallest float32.
LEAST = {"temperature": 1e-3, "top_p": 1e-45, "repetition_penalty": 1e-30}
LONGEST_SALT = 1024  # characters
_SURROGATE = re.compile(r"[\ud800-\udfff]")  # half a character, which cannot be encoded
T = TypeVar("T")


def whole(value: Any) -> Any:
    """The int of a float without a fraction (JSON may have 16.0 for 16); any other value
    unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Range(NamedTuple):
    """The range and the kind of the numbers that a field may hold."""

    least: float
    most: float
    words: str  # describes the range in an error
    whole: bool = False
    nullable: bool = False
    as_float: bool = False  # a whole number may also be written 16.0, as JSON does

    def number(self, what: str, value: Any) -> int | float | None:
        """Convert a value to a Python number.

        Raises:
            BadInput: the value is no number, or is out of range.
        """
        if value is None and self.nullable:
            return None
        if self.as_float:
            value = whole(value)
        kind: Any = Integral if self.whole else Real
        if isinstance(value, bool) or not isinstance(value, kind):
            raise BadInput(f"{what}={value!r} must be a {'whole ' * self.whole}number")
        if not self.least <= value <= self.most:
            raise BadInput(f"{what}={value!r} must be {self.words}")
        return int(value) if isinstance(value, Integral) else float(value)


def known_fields_only(cls: type[T]) -> type[T]:
    """Class decorator: the constructor raises BadInput for an unknown field, with the nearest
    name."""
    init, known = cls.__init__, [item.name for item in fields(cls)]  # type: ignore

    @wraps(init)
    def checked(self: T, *values: Any, **named: Any) -> None:
        for name in named:
            if name not in known:
                raise BadInput(f"{cls.__name__} has no field {name}; {nearest(name, known)}")
        init(self, *values, **named)

    cls.__init__ = checked  # type: ignore
    return cls


def named(what: str, cls: Any, value: Mapping[Any, Any]) -> dict[str, Any]:
    """A mapping from outside as the fields of a dataclass. Raises BadInput where a name is no text,
    or is no field."""
    known = [item.name for item in fields(cls)]
    for name in value:
        if not isinstance(name, str):
            raise BadInput(f"{what}={value!r} must have names of fields, and {name!r} is none")
    for name in value:
        if name not in known:
            raise BadInput(f"{what}.{name}: no such field; {nearest(name, known)}")
    return dict(value)


def as_given(self: Any) -> str:
    """The `__repr__` of a dataclass whose fields are off at None and False: the others, as a
    configuration has them."""
    values = {item.name: getattr(self, item.name) for item in fields(self)}
    return repr({name: value for name, value in values.items() if value not in (None, False)})


def token_ids(what: str, ids: Iterable[Any] | None) -> tuple[int, ...] | None:
    """Token ids of a list, a tensor or an array as a tuple; None stays None. Raises BadInput for
    anything else."""
    try:
        return None if ids is None else tuple(operator.index(token) for token in ids)
    except TypeError:
        raise BadInput(f"{what}={ids!r} must be token ids, whole numbers") from None


def texts(what: str, value: str | Iterable[str] | None) -> tuple[str, ...]:
    """One text or several as a tuple; None gives an empty one. Raises BadInput for anything else,
    and for texts that are empty or cannot be encoded."""
    try:
        strings = (value,) if isinstance(value, str) else () if value is None else tuple(value)
    except TypeError:
        strings = ("",)
    if not all(
        isinstance(text, str) and text and _SURROGATE.search(text) is None for text in strings
    ):
        raise BadInput(f"{what}={value!r} must be non-empty strings")
    return strings


def biases(what: str, value: Any) -> dict[int, float] | None:
    """Biases by token id, each finite in float32; JSON may give the ids as strings. None stays
    None. Raises BadInput for anything else."""
    if value is None:
        return None
    try:
        ids = [int(token) if isinstance(token, str) else operator.index(token) for token in value]
        numbers = dict(zip(ids, map(float, value.values()), strict=True))
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise BadInput(f"{what}={value!r} must be {{token id: number}}") from None
    if not all(math.fabs(bias) <= FLOAT32 for bias in numbers.values()):
        raise BadInput(f"{what}={value!r} must be numbers that are finite in float32")
    return numbers


def is_salt(value: Any) -> bool:
    """Whether this is a salt of the prefix cache, or none."""
    return value is None or (isinstance(value, str) and 0 < len(value) <= LONGEST_SALT)
