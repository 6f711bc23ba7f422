"""Option dataclasses, which lie in each `options.py` and import only `errors` and `platform`, never
torch: their base class and fields, and the objects that are made of a configuration's nodes."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from minivllm.errors import BadInput, nearest

T = TypeVar("T", bound=type)
C = TypeVar("C")


def option(*names: str) -> Callable[[T], T]:
    """Class decorator: the dataclass holds the knobs of these `_target_`s, or of a group or section
    without one."""

    def named(cls: T) -> T:
        cls.names = names  # type: ignore[attr-defined]
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
        infinite: advice in the error about an infinite number.
        unasked: whether the knob is left out of `cell_id` at its default, which is the behaviour of
            older versions without the knob.
        null_means: the number that null stands for in `cell_id`; older records have the number.
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
    """The default of a field in the form of a configuration, or MISSING."""
    default = item.default if item.default_factory is MISSING else item.default_factory()
    return list(default) if isinstance(default, tuple) else default


def knobs_of(node: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs of a node, without the class that it names."""
    return {str(name): value for name, value in node.items() if name != "_target_"}


def filled(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Knobs that are set, with the defaults of the others, as an option file holds them: "???" for
    one without a default. A dictionary stays whole unless its own knobs are declared."""
    hints: dict[str, Any] = type_hints(cls)
    knobs: dict[str, Any] = {}
    for item in fields(cls):
        name, hint = item.name, hints[item.name]
        given = values.get(name, {})
        if is_dataclass(hint) and isinstance(given, Mapping):
            assert isinstance(hint, type)
            knobs[name] = filled(hint, given)
        elif name in values:
            knobs[name] = given
        elif not any(get_origin(arm) is Callable for arm in (hint, *get_args(hint))):
            # what is left out is given from Python
            default = default_of(item)
            knobs[name] = "???" if default is MISSING else default
    return {name: value for name, value in values.items() if name not in knobs} | knobs


@cache
def type_hints(cls: type) -> dict[str, Any]:
    """The field types of an option dataclass, or of a class that inherits from one."""
    return get_type_hints(
        next(base for base in cls.__mro__ if "__dataclass_fields__" in vars(base))
    )


def typed(cls: type, name: str, value: Any, key: str) -> Any:
    """Convert the value of a knob to the type of its field.

    Raises:
        BadInput: the value has another type; the message names the key.
    """
    try:
        return convert(value, type_hints(cls)[name])
    except TypeError as error:
        instead = next(item.metadata.get("infinite") for item in fields(cls) if item.name == name)
        infinite = str(value).lower().lstrip("+.") in ("inf", "infinity")
        hint = f"; {instead}" if infinite and instead else ""
        raise BadInput(f"{key}={written(value)} must be {error}{hint}") from None


def written(value: Any) -> str:
    """A value as the command line takes it, with quotes around text."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def convert(value: Any, hint: Any) -> Any:
    """Convert `value` to the type of `hint`, without guessing. Raises TypeError with the expected
    type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for arm in args:
            with contextlib.suppress(TypeError):
                return convert(value, arm)
    elif origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in args):
            return value
    elif origin in (list, tuple):
        items = value if isinstance(value, list | tuple) else [value]
        with contextlib.suppress(TypeError):
            return origin(convert(item, args[0]) for item in items)
    elif origin is dict or hint is dict or is_dataclass(hint):
        if isinstance(value, dict) or (value is not None and type(value) is hint):
            return value
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif hint is str:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
    elif hint is Any or type(value) is hint:
        return value
    raise TypeError(_describe(hint))


def _describe(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_describe(arm) for arm in args)
    if origin is Callable:
        return "a function, given from Python"
    if origin is Literal:
        return " or ".join(str(choice) for choice in args)
    if origin in (list, tuple):
        return f"a list (each {_describe(args[0])})"
    names = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        NoneType: "null",
    }
    return names.get(hint, "a dictionary")


def make_options(
    cls: type[C], node: Any, path: str, owner: str | None, known: Sequence[str] | None = None
) -> C:
    """The option dataclass of a node; nested dataclasses likewise.

    Args:
        cls: the dataclass.
        node: its knobs; those that are missing take their defaults.
        path: key of the node, for messages.
        owner: the option that the knobs are of, for messages; None outside every group.
        known: names that a misspelt one may have meant; None is the knobs.

    Raises:
        BadInput: a knob is unknown, is missing or has another type; names its key.
    """
    names = [item.name for item in fields(cls)]  # type: ignore[arg-type]
    if not isinstance(node, Mapping):
        raise BadInput(f"{path}={node!r} must be a group of settings, e.g. {path}.{names[0]}=...")
    hints: dict[str, Any] = type_hints(cls)  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    prefix = f"{path}." if path else ""
    for name, value in node.items():
        if name not in names:
            what = f"no such option of {owner}" if owner else "no such setting"
            raise BadInput(f"{prefix}{name}: {what}; {nearest(str(name), known or names)}")
        if is_dataclass(nested := hints[name]):
            assert isinstance(nested, type)
            values[name] = make_options(nested, value, f"{prefix}{name}", f"{prefix}{name}")
        else:
            values[name] = typed(cls, name, value, f"{prefix}{name}")
    for item in fields(cls):  # type: ignore[arg-type]
        if item.default is MISSING and item.default_factory is MISSING and item.name not in values:
            raise BadInput(
                f"{prefix}{item.name} is missing: {owner} needs it, e.g. {prefix}{item.name}=..."
            )
    return cls(**values)


def plain(options: Any) -> dict[str, Any]:
    """The knobs of an option dataclass as a configuration holds them."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(options).items()
    }


class Options:
    """Base of the option dataclasses: checks types, and the ranges that `knob` declares.

    Raises:
        BadInput: a value has another type or is out of range; the message names the key.
    """

    group: ClassVar[str] = ""
    names: ClassVar[tuple[str, ...]] = ()  # the `_target_`s, set by `option`

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = typed(type(self), item.name, getattr(self, item.name), self._key(item.name))
            object.__setattr__(self, item.name, value)  # option dataclasses are frozen
            if not isinstance(value, int | float):  # null or a word has no range
                continue
            low, above, high = (
                item.metadata.get(rule) for rule in ("at_least", "above", "at_most")
            )
            limits = [f"above {above}"] * (above is not None and not value > above)
            limits += [f"at least {low}"] * (low is not None and not value >= low)
            limits += [f"at most {high}"] * (high is not None and not value <= high)
            if limits:
                raise self.bad(item.name, f"must be {limits[0]}")

    def bad(self, name: str, complaint: str) -> BadInput:
        """An error about the knob `name`."""
        return BadInput(f"{self._key(name)}={written(getattr(self, name))} {complaint}")

    def _key(self, name: str) -> str:
        return f"{self.group}.{name}" if self.group else name


# Folders below runs_dir without records of a sweep: shared files, and the logs of Slurm's jobs.
KEPT_FOLDERS = ("workloads", "quality", ".submitit")


def require_folder_name(options: Options, name: str) -> None:
    """Raise BadInput unless the knob is null or is a valid folder name on every system.

    A name begins with a letter or a digit, because a spreadsheet would execute a name that begins
    with =, +, - or @.
    """
    value = getattr(options, name)
    if value is None:
        return
    if not re.fullmatch(r"\w[\w.+=,@ -]{0,120}", value):
        raise options.bad(
            name,
            "must be a plain folder name: a letter or a digit, then letters, digits and . _ "
            "- + = , @",
        )
    if value in KEPT_FOLDERS:
        raise options.bad(name, "is a folder that all runs share: choose another name")
