"""What the option dataclasses in every `options.py` are made of. They import only `errors` and `platform`, never torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, Field, field, fields
from typing import Any, ClassVar, TypeVar

from minivllm.errors import BadInput

T = TypeVar("T", bound="type[Options]")


def option(*names: str) -> Callable[[T], T]:
    """Class decorator: the dataclass holds the knobs of these `_target_`s, or of a group or section without one."""

    def named(cls: T) -> T:
        cls.names = names
        return cls

    return named


def knob(
    default: Any = MISSING,
    *,
    factory: Any = MISSING,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    infinite: str = "",
    unasked: bool = False,
    null_means: Any = None,
) -> Any:
    """A field of an option dataclass.

    Args:
        default, factory: as of `dataclasses.field`.
        at_least, above, at_most: the range of the value, where that is a number.
        infinite: what to do instead of giving an infinite number.
        unasked: the default is what was done before there was this knob, so at its default the knob is no part of
            `cell_id`.
        null_means: the number that null stands for in `cell_id`, where older records have that number.
    """
    rules = {
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
        "infinite": infinite,
        "unasked": unasked,
        "null_means": null_means,
    }
    return field(default=default, default_factory=factory, metadata=rules)


def default_of(item: Field[Any]) -> Any:
    """The default of a field as a configuration holds it, or MISSING."""
    default = item.default if item.default_factory is MISSING else item.default_factory()
    return list(default) if isinstance(default, tuple) else default


class Options:
    """Base of the dataclasses: checks the ranges that `knob` declares.

    Raises:
        BadInput: a value is out of range; names the key.
    """

    group: ClassVar[str] = ""
    names: ClassVar[tuple[str, ...]] = ()  # see `option`

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, item.name)
            if not isinstance(value, int | float):  # null, or a choice of words
                continue
            low, above, high = (item.metadata.get(rule) for rule in ("at_least", "above", "at_most"))
            wanted = [f"above {above}"] * (above is not None and not value > above)
            wanted += [f"at least {low}"] * (low is not None and not value >= low)
            wanted += [f"at most {high}"] * (high is not None and not value <= high)
            if wanted:
                raise self.bad(item.name, f"must be {wanted[0]}")

    def bad(self, name: str, complaint: str) -> BadInput:
        """The error for the knob `name`."""
        key = f"{self.group}.{name}" if self.group else name
        return BadInput(f"{key}={getattr(self, name)!r} {complaint}")


# Folders below runs_dir that hold no sweep's records: what several share, and the logs of Slurm's jobs.
KEPT_FOLDERS = ("workloads", "quality", ".submitit")


def require_folder_name(options: Options, name: str) -> None:
    """Raise BadInput unless the knob is null or can name a folder of records on any system.

    A name begins with a letter or a digit: tables hold it, and a spreadsheet executes what begins with =, +, - or @.
    """
    value = getattr(options, name)
    if value is None:
        return
    if not re.fullmatch(r"\w[\w.+=,@ -]{0,120}", value):
        raise options.bad(
            name, "must be a plain folder name: a letter or a digit, then letters, digits and . _ - + = , @"
        )
    if value in KEPT_FOLDERS:
        raise options.bad(name, "is a folder that all runs share: choose another name")
