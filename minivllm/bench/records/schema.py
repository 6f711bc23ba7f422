"""Which JSON is a record: the types of record.py's dataclasses checked value by value, and older
versions brought up to date."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from minivllm.bench.records.record import SCHEMA_VERSION, Record
from minivllm.config.moved import present, with_targets
from minivllm.errors import BadInput
from minivllm.platform.described import parts

# where below the value, such as ".ttft_ms.p50", and what is wrong there
Fault = tuple[str, str] | None
Check = Callable[[Any], Fault]

# without these it is no record
REQUIRED = frozenset({"schema_version", "run_id", "cell_id", "status"})
DEEPEST = 32  # objects and lists within each other
LARGEST = 1e30  # of a number; sums of what is larger overflow
ROUNDING = 1e-6  # by which what cannot be negative may be
COUNTED = {"liveness"}  # by engines and plug-ins, who may count downwards


def _first_digests(record: dict[str, Any]) -> dict[str, Any]:
    """Schema 1 to 2: the digests of its tables are unknown."""
    return {**record, "digests": None}


# From each older version to the next one.
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _first_digests}


def current(record: Any) -> dict[str, Any]:
    """A record of the present schema, as JSON gave it or migrated from an older version.

    A measurement that ended well with a number that cannot be is invalid, and says so.

    Raises:
        BadInput: it is no record, of a version that nothing leads from, or a value has another type
            than its field.
    """
    return checked(migrated(record))


def migrated(record: Any) -> dict[str, Any]:
    """A record of the present version, whose values are not yet checked; see `current`."""
    if not isinstance(record, dict):
        raise BadInput(f"it is {_kind(record)}, not an object")
    version = record.get("schema_version")
    if version is None:
        raise BadInput("schema_version is missing, so it is no record")
    if type(version) is not int or (version != SCHEMA_VERSION and version not in MIGRATIONS):
        raise BadInput(f"it has schema_version {version!r:.20}, and {_known()} are read here")
    if absent := sorted(key for key in REQUIRED if record.get(key) is None):
        raise BadInput(f"{absent[0]} is missing")
    while version != SCHEMA_VERSION:
        record = MIGRATIONS[version](record)
        version += 1
    config = record.get("config")
    named = {"config": with_targets(config, present)} if isinstance(config, dict) else {}
    return {**record, **named, "schema_version": version}


def checked(record: dict[str, Any]) -> dict[str, Any]:
    """A record of the present version, or some fields of one, once each value has its field's type;
    see `current`."""
    if (fault := checker(Record)(record)) is not None:
        raise BadInput(f"{fault[0].lstrip('.')} {fault[1]}")
    if record.get("status") == "ok" and (wrong := impossible(record)):
        validity = record.get("validity") or {}
        reasons = [*(validity.get("reasons") or []), *wrong]
        record |= {"status": "invalid", "validity": {**validity, "ok": False, "reasons": reasons}}
    return record


def _known() -> str:
    return " and ".join(map(str, sorted([*MIGRATIONS, SCHEMA_VERSION])))


def impossible(record: dict[str, Any]) -> list[str]:
    """A sentence for each measured number that is not finite, or negative where that has no
    meaning.

    Args:
        record: as a dictionary; not checked, and not yet as JSON has it, which knows no NaN.
    """
    return [
        f"{name} is {value:.4g}: no measurement gives that"
        for part in _measured()
        for name, value in _numbers(record.get(part), part)
        if not math.isfinite(value)
        or (value < -ROUNDING and part not in COUNTED and not name.startswith(_signed()))
    ]


@cache
def _measured() -> tuple[str, ...]:
    """Parts of a record that hold measured figures."""
    held = [name for name, cls in parts(Record).items() if any(True for _ in _figures(cls))]
    return (*held, *COUNTED)


@cache
def _signed() -> tuple[str, ...]:
    """What may be negative: figures that are declared so, and metrics of a user's own."""
    named = [
        f"{part}.{item.name}"
        for part, cls in parts(Record).items()
        for item in fields(cls)
        if item.metadata.get("signed")
    ]
    return (*named, "metrics.own.")


def _figures(cls: type) -> Iterator[Field[Any]]:
    yield from (item for item in fields(cls) if item.metadata)
    for part in parts(cls).values():
        yield from _figures(part)


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if type(value) is dict:
        for key, item in value.items():
            kind = type(item)
            if kind is float or kind is int:
                if not 0 <= item < LARGEST:  # all others are as they should be
                    yield f"{name}.{key}", item
            elif kind is dict:
                yield from _numbers(item, f"{name}.{key}")


# ---- types


@cache
def checker(kind: Any) -> Check:
    """What tells whether a JSON value is of a type: of a dataclass, a TypedDict, or what their
    fields are made of."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return _any
    if is_dataclass(kind) or is_typeddict(kind):
        return _fields_of(kind)
    if origin is Annotated:
        return _choice(inner[1]) if isinstance(inner[1], tuple) else checker(inner[1])
    if origin in (Union, UnionType):
        return _union(tuple(part for part in inner if part is not NoneType), NoneType in inner)
    if origin is list:
        return _list(checker(inner[0]))
    if origin is dict:
        return _mapping(inner[1])
    return {str: _text, bool: _truth, int: _whole, float: _number}[kind]


def _fields_of(kind: Any) -> Check:
    hints = get_type_hints(kind, include_extras=True)
    names = [f.name for f in fields(kind)] if is_dataclass(kind) else [*hints]  # no class variables
    checks = {name: (_plain(hints[name]), checker(hints[name])) for name in names}
    # what a later version may have added
    others = (frozenset({str, int, float, bool, NoneType}), _any)
    required: list[str] = []
    # a record may lack what an older version did not write
    if is_dataclass(kind) and kind is not Record:
        required = [
            f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING
        ]

    def check(value: Any) -> Fault:
        if type(value) is not dict:
            return "", f"is {_kind(value)}, not an object"
        for name in required:
            if name not in value:
                return f".{name}", "is missing"
        for name, item in value.items():
            plain, inner = checks.get(name, others)
            if type(item) not in plain and (fault := inner(item)) is not None:
                return f".{name:.40}{fault[0]}", fault[1]
        return None

    return check


def _plain(kind: Any) -> frozenset[type]:
    """Those Python types of which every value is of a type, so that nothing need be called."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return frozenset(parts) & {str, bool, NoneType}


def _choice(texts: tuple[str, ...]) -> Check:
    def check(value: Any) -> Fault:
        return None if value in texts else ("", f"is {value!r:.40}, none of {', '.join(texts)}")

    return check


def _union(parts: tuple[Any, ...], null: bool) -> Check:
    checks = tuple(map(checker, parts))
    if len(checks) == 1:
        (only,) = checks
        return (lambda value: None if value is None else only(value)) if null else only

    def check(value: Any) -> Fault:
        if value is None and null:
            return None
        first = checks[0](value)
        return None if first is None or any(one(value) is None for one in checks[1:]) else first

    return check


def _list(inner: Check) -> Check:
    def check(value: Any) -> Fault:
        if type(value) is not list:
            return "", f"is {_kind(value)}, not a list"
        for index, item in enumerate(value):
            if (fault := inner(item)) is not None:
                return f"[{index}]{fault[0]}", fault[1]
        return None

    return check


def _mapping(kind: Any) -> Check:
    plain, inner = _plain(kind), checker(kind)

    def check(value: Any) -> Fault:
        if type(value) is not dict:
            return "", f"is {_kind(value)}, not an object"
        for key, item in value.items():
            if type(item) not in plain and (fault := inner(item)) is not None:
                return f".{key:.40}{fault[0]}", fault[1]
        return None

    return check


def _any(value: Any) -> Fault:
    if type(value) not in (dict, list):
        return None
    return None if _shallow(value, DEEPEST) else ("", f"is nested more than {DEEPEST} deep")


def _shallow(value: Any, left: int) -> bool:
    kind = type(value)
    if kind is dict:
        return left > 0 and all(
            _shallow(v, left - 1) for v in value.values() if type(v) in (dict, list)
        )
    return kind is not list or (left > 0 and all(_shallow(v, left - 1) for v in value))


def _text(value: Any) -> Fault:
    return None if type(value) is str else ("", f"is {_kind(value)}, not text")


def _truth(value: Any) -> Fault:
    return None if type(value) is bool else ("", f"is {_kind(value)}, not true or false")


def _number(value: Any) -> Fault:
    kind = type(value)
    if kind is not float and kind is not int:
        return "", f"is {_kind(value)}, not a number"
    return None if -LARGEST < value < LARGEST else ("", "is no finite number, or too large a one")


def _whole(value: Any) -> Fault:
    if type(value) is int or (type(value) is float and value.is_integer()):
        return _number(value)
    return "", f"is {_kind(value)}, not a whole number"


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "true or false",
        NoneType: "null",
    }
    return names.get(type(value), "a number")


PathLike = str | Path


class DamagedFile(str):
    """The path of a file that cannot be used, and the reason.

    Args:
        path: the file.
        reason: in words that go on after the path.
    """

    reason: str

    def __new__(cls, path: PathLike, reason: str) -> DamagedFile:
        damaged = super().__new__(cls, path)
        damaged.reason = reason
        return damaged

    def __reduce__(self) -> tuple[type[DamagedFile], tuple[str, str]]:
        """So that it can be copied, as pandas does with what goes along with a frame."""
        return DamagedFile, (str(self), self.reason)
