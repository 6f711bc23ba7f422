"""Reading records back: the one place where a record.json becomes a dictionary, a row, or a line of a pandas frame."""

from __future__ import annotations

import gc
import glob
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.bench.schema import current
from minivllm.bench.storage import ASIDE, RECORD
from minivllm.errors import BadInput
from minivllm.untrusted import read_json

if TYPE_CHECKING:
    import pandas

PathLike = str | Path


class Damaged(str):
    """The path of a file that cannot be used, and the reason.

    Args:
        path: the file.
        reason: in words that go on after the path.
    """

    reason: str

    def __new__(cls, path: PathLike, reason: str) -> Damaged:
        damaged = super().__new__(cls, path)
        damaged.reason = reason
        return damaged

    def __reduce__(self) -> tuple[type[Damaged], tuple[str, str]]:
        """So that it can be copied, as pandas does with what goes along with a frame."""
        return Damaged, (str(self), self.reason)


# ---- finding


def record_files(paths: PathLike | Iterable[PathLike]) -> list[Path]:
    """Every record.json below the given places, sorted, each once.

    Args:
        paths: a record directory, a sweep's folder, the root of all records, a record.json, a glob
            pattern of any of these, or a list of such.

    Raises:
        BadInput: a place does not exist or a pattern matches nothing.
    """
    found: set[str] = set()
    for place in [paths] if isinstance(paths, (str, Path)) else list(paths):
        path = os.path.expanduser(place)
        matches = [path] if os.path.exists(path) else glob.glob(path)
        if not matches:
            raise BadInput(f"no such file or folder: {place}; give a folder of records, such as runs/<name>")
        for match in matches:
            found.update(_below(match))
    return [Path(name) for name in sorted(found, key=lambda name: name.split(os.sep))]


def _below(place: str) -> Iterator[str]:
    if os.path.isfile(place):
        yield os.path.normpath(place)
    elif os.path.exists(os.path.join(place, RECORD)):
        yield os.path.normpath(os.path.join(place, RECORD))
    else:
        for pattern in ("*", os.path.join("*", "*")):
            for name in glob.glob(os.path.join(glob.escape(place), pattern, RECORD)):
                if not os.path.basename(os.path.dirname(name)).startswith(ASIDE):
                    yield os.path.normpath(name)


# ---- reading


def read_record(path: Path) -> dict[str, Any]:
    """A record of the present schema; older ones are migrated, see `schema.current`.

    Args:
        path: a record.json, or whatever holds the JSON of one.

    Raises:
        BadInput: it cannot be read, or is no record; the line names the file and the reason.
    """
    value = read_json(path, str(path))
    try:
        return current(value)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def record_in(directory: Path) -> dict[str, Any] | None:
    """The record of a record directory; None where there is none that can be read."""
    try:
        return read_record(directory / RECORD)
    except BadInput:
        return None


def each(paths: PathLike | Iterable[PathLike]) -> Iterator[dict[str, Any] | Damaged]:
    """Every record at or below the given places, with its `directory` added, or why a file is none.

    Raises:
        BadInput: a place does not exist.
    """
    for path in record_files(paths):
        try:
            record = read_record(path)
        except BadInput as error:
            yield Damaged(path, str(error).removeprefix(str(path)).lstrip(": "))
        else:
            record["directory"] = str(path.parent)
            yield record


def scan(paths: PathLike | Iterable[PathLike]) -> tuple[list[dict[str, Any]], list[Damaged]]:
    """Records as dictionaries, each with its `directory` added, and the files that are not records."""
    with uncollected():
        found = list(each(paths))
    damaged = [item for item in found if isinstance(item, Damaged)]
    _warn(damaged)
    return [item for item in found if not isinstance(item, Damaged)], damaged


def flat_rows(paths: PathLike | Iterable[PathLike]) -> tuple[list[dict[str, Any]], list[Damaged]]:
    """The same, each record flattened, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, damaged = scan(paths)
    rows: list[dict[str, Any]] = []
    with uncollected():
        found.reverse()
        while found:  # thousands of records are not kept in both forms
            rows.append(flatten(found.pop()))
    return rows, damaged


def _warn(damaged: list[Damaged]) -> None:
    if damaged:
        warnings.warn(
            f"{len(damaged)} unreadable record(s) left out: {damaged[0]} {damaged[0].reason} ...",
            stacklevel=4,
        )


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the search for cycles, which records have none of: thousands of them are read in half of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def read_records(paths: PathLike | Iterable[PathLike]) -> list[dict[str, Any]]:
    """Records as dictionaries, each with its `directory` added; unreadable ones are left out, with a warning."""
    return scan(paths)[0]


# ---- one level


class _Column:
    """The name of a column, and of those below it: each is made once for all records."""

    __slots__ = ("below", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.below: dict[str, _Column] = {}

    def put(self, values: dict[str, Any], columns: dict[str, Any]) -> None:
        """Add nested values to `columns`; what is no finite number is null, as JSON has it."""
        for key, value in values.items():
            column = self.below.get(key)
            if column is None:
                column = self.below[key] = _Column(f"{self.name}.{key}" if self.name else key)
            kind = type(value)
            if kind is dict:
                column.put(value, columns)
            elif kind is float and not math.isfinite(value):
                columns[column.name] = None
            else:
                columns[column.name] = value


_TOP, _CHOICES, _CONFIG = _Column(""), _Column("choices"), _Column("config")


def flatten(record: dict[str, Any]) -> dict[str, Any]:
    """One level of columns: "metrics.ttft_ms.p50", "config.batching.max_num_seqs", "choices.quant"."""
    columns: dict[str, Any] = {}
    config = record.get("config") or {}
    _TOP.put({key: value for key, value in record.items() if key != "config"}, columns)
    _CHOICES.put(config.get("choices") or {}, columns)
    _CONFIG.put({key: value for key, value in config.items() if key != "choices"}, columns)
    return columns


def load_records(paths: PathLike | Iterable[PathLike]) -> pandas.DataFrame:
    """A frame with a row a record and flattened columns; failed cells are rows like any other.

    Args:
        paths: as for `record_files`.

    Returns:
        The frame; `frame.attrs["unreadable"]` lists the files that were left out, and `frame.attrs["damaged"]` tables that are
        not those that were recorded. Each is a path with a `reason`.

    Raises:
        BadInput: a place does not exist.
    """
    import pandas

    from minivllm.bench.record_tables import damaged_tables

    rows, unreadable = flat_rows(paths)
    _warn(unreadable)
    frame = pandas.DataFrame(rows)
    damaged = [table for row in rows for table in damaged_tables(row) if os.path.exists(table)]
    if damaged:
        warnings.warn(f"{len(damaged)} table(s) damaged: {damaged[0]} {damaged[0].reason} ...", stacklevel=2)
    frame.attrs |= {"unreadable": unreadable, "damaged": damaged}
    return frame
