"""Values of JSON from outside, each read with its type and its range. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeGuard, TypeVar

from minivllm.errors import BadInput
from minivllm.platform.given import whole

T = TypeVar("T")
REQUIRED: Any = object()  # the default of a key that must be there
_MOST_SHOWN = 60  # characters of a value in an error


class Values:
    """One JSON object. A null is read as an absent key, unless `required`; a key whose default is
    `REQUIRED` must be there.

    Args:
        values: the parsed object.
        where: the file's name, or its name and the place in it, in errors.
        path: of an object inside the file, its key with a dot, such as "rope_parameters.".
    """

    def __init__(self, values: Mapping[str, Any], where: str, path: str = "") -> None:
        self._values, self.where, self._path = values, where, path

    def __bool__(self) -> bool:
        """Whether the object has any key."""
        return bool(self._values)

    def over(self, other: Values, keys: Iterable[str]) -> Values:
        """The same object, with further keys from another object."""
        lacking = {key: other._values[key] for key in keys if other.has(key) and not self.has(key)}
        return Values({**self._values, **lacking}, self.where, self._path)

    def __getitem__(self, key: str) -> Any:
        """The value as the file has it."""
        return self._values[key]

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._values.get(key) is not None

    def is_list(self, key: str) -> bool:
        """Whether the value is a list."""
        return isinstance(self._values.get(key), (list, tuple))

    def fail(self, key: str, complaint: str) -> NoReturn:
        """Raise the BadInput of a key, with its value."""
        shown = _shown(self._values.get(key))
        raise BadInput(f"{self.where}: {self._path}{key}={shown} {complaint}")

    def integer(self, key: str, default: T, low: int = 1, high: int = 1 << 31) -> int | T:
        """A whole number between `low` and `high`; 4.0 is one, true and "4" are none."""
        if default is not REQUIRED and not self.has(key):
            return default
        number = _whole(self._values.get(key), low, high)
        return (
            self.fail(key, f"must be a whole number from {low:,} to {high:,}")
            if number is None
            else number
        )

    def number(
        self,
        key: str,
        default: T,
        *,
        above: float = 0.0,
        least: float | None = None,
        high: float = 1e9,
        required: bool = False,
    ) -> float | T:
        """A finite number greater than `above`, or of at least `least`; and at most `high`."""
        needed = default is REQUIRED or (required and key in self._values)
        if not needed and not self.has(key):
            return default
        value: Any = self._values.get(key)
        if (
            not is_number(value)
            or not (value > above if least is None else value >= least)
            or value > high
        ):
            bound = f"above {above:g}" if least is None else f"of at least {least:g}"
            self.fail(key, f"must be a number {bound} and at most {high:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, bool):
            self.fail(key, "must be true or false")
        return default if value is None else value

    def text(self, key: str, default: T) -> str | T:
        """A string."""
        if not self.has(key):
            return default
        if not isinstance(value := self._values[key], str):
            self.fail(key, "must be a string")
        return value

    def section(self, key: str) -> Values:
        """An object inside this one; an empty one where there is none."""
        return Values(self.mapping(key) or {}, self.where, f"{self._path}{key}.")

    def mapping(self, key: str) -> dict[str, Any] | None:
        """An object as it is; None where there is none."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, Mapping):
            self.fail(key, "must be an object of keys and values")
        return None if value is None else dict(value)

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of strings."""
        return self._list(key, lambda item: item if isinstance(item, str) else None, "strings")

    def integers(self, key: str, low: int = 0, high: int = 1 << 31) -> tuple[int, ...] | None:
        """A list of whole numbers between `low` and `high`."""
        return self._list(
            key, lambda item: _whole(item, low, high), f"whole numbers from {low:,} to {high:,}"
        )

    def numbers(self, key: str, high: float = 1e9) -> tuple[float, ...] | None:
        """A list of finite numbers greater than 0 and at most `high`."""

        def read(item: Any) -> float | None:
            return float(item) if is_number(item) and 0 < item <= high else None

        return self._list(key, read, f"numbers above 0 and at most {high:g}")

    def _list(self, key: str, read: Callable[[Any], T | None], what: str) -> tuple[T, ...] | None:
        value = self._values.get(key)
        if value is None:
            return None
        items = (
            [item for entry in value if (item := read(entry)) is not None]
            if self.is_list(key)
            else []
        )
        if not self.is_list(key) or len(items) != len(value):
            self.fail(key, f"must be a list of {what}")
        return tuple(items)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value is a number, and no NaN or infinity."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, int) or math.isfinite(value)


def _whole(value: Any, low: int, high: int) -> int | None:
    """A number without a fraction, in a range; None for any other value."""
    number = whole(value)
    return number if type(number) is int and low <= number <= high else None


def _shown(value: Any) -> str:
    """A value in an error: short, and without control characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a deep list
        return f"({type(value).__name__})"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
