"""Reading records back: the one place where a record.json becomes a dictionary, a row, or a line of
a pandas frame."""

from __future__ import annotations

import gc
import marshal
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm import redaction
from minivllm.bench.records import archive
from minivllm.bench.records.archive import record_files
from minivllm.bench.records.schema import DamagedFile, PathLike, checked, migrated
from minivllm.bench.records.storage import RECORD
from minivllm.config.support import is_elsewhere, is_reported, supported_settings
from minivllm.errors import BadInput, NotInstalled
from minivllm.platform import untrusted

if TYPE_CHECKING:
    import pandas

# fields that consist of parts, most of which many records have in common
PARTED = ("config", "provenance")
MAX_PARTS = 1 << 14  # that are kept


# ---- reading


def read_record(path: Path) -> dict[str, Any]:
    """A record of the present schema, without secrets; older ones are migrated, see
    `schema.current`.

    Args:
        path: a record.json, or whatever holds the JSON of one.

    Raises:
        BadInput: it cannot be read, or is no record; the line names the file and the reason.
    """
    record, parts = _read(path)
    for whole, names in parts.items():  # copies: a caller may change its record
        record[whole] |= {name: marshal.loads(part.content) for name, part in names.items()}
    return redaction.clean(record)


class _Part(NamedTuple):
    """A part of a record, such as the knobs of a group, checked and without secrets."""

    content: bytes  # as `marshal` has it
    columns: dict[str, Any]  # flattened; never changed


def _read(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, _Part]]]:
    """A record without the parts of `PARTED`, and these, by field and name; only the parts are
    without secrets.

    Of thousands of records most parts are the same few, which are checked, masked and flattened
    once.
    """
    value = read_json(path)
    parts: dict[str, dict[str, _Part]] = {}
    try:
        record = migrated(value)
        for whole in PARTED:
            inside = record.get(whole)
            if type(inside) is dict:
                parts[whole] = {
                    name: _part(whole, name, _packed(item, f"{whole}.{name:.40}"))
                    for name, item in inside.items()
                    if name != redaction.AS_WRITTEN and (whole == "config" or type(item) is dict)
                }
                record[whole] = {
                    name: item for name, item in inside.items() if name not in parts[whole]
                }
        return checked(record), parts
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def read_json(path: Path) -> Any:
    """The value of a JSON file, be it in an archive. Raises BadInput."""
    with archive.open_file(path, str(path)) as file:
        content = untrusted.content_of(file, untrusted.MAX_JSON, str(path))
    return untrusted.parse_json(content, str(path))


def _packed(value: Any, name: str) -> bytes:
    try:
        return marshal.dumps(value, 0)
    except ValueError:
        raise BadInput(f"{name} is nested too deeply") from None


@lru_cache(MAX_PARTS)
def _part(whole: str, name: str, content: bytes) -> _Part:
    """See `_Part`. Raises BadInput for a value of another type than its field."""
    given = {name: marshal.loads(content)}
    checked({whole: given})
    if whole == "config":
        shown = redaction.shown(given)
        # what was stored before secrets were masked may stand in other texts, too
        if shown != given:
            redaction.learn(given)
    else:
        shown = redaction.clean(given)
    return _Part(marshal.dumps(shown[name], 0), _flat({whole: shown}))


def _row(path: Path) -> dict[str, Any]:
    """What `flatten` makes of a record, with its `directory`. Raises BadInput as `read_record`."""
    record, parts = _read(path)
    columns: dict[str, Any] = {}
    _TOP.put({key: value for key, value in record.items() if key != "config"}, columns)
    texts = [value for value in columns.values() if type(value) is str]
    lists = [value for value in columns.values() if type(value) is list and value]
    if redaction.suspicious("\n".join(texts)) or (lists and redaction.suspicious(str(lists))):
        columns = redaction.clean(columns)
    for whole in reversed(PARTED):
        for part in parts.get(whole, {}).values():
            columns.update(part.columns)
    columns["directory"] = str(path.parent)
    return _supported(columns)


def record_in(directory: Path) -> dict[str, Any] | None:
    """The record of a record directory; None where there is none that can be read."""
    try:
        return read_record(directory / RECORD)
    except BadInput:
        return None


def scan(paths: PathLike | Iterable[PathLike]) -> tuple[list[dict[str, Any]], list[DamagedFile]]:
    """Records as dictionaries, each with its `directory` added, and the files that are not records,
    with a warning.

    Raises:
        BadInput: a place does not exist.
    """

    def read(path: Path) -> dict[str, Any]:
        return {**read_record(path), "directory": str(path.parent)}

    records, damaged = _each(record_files(paths), read)
    _warn(damaged)
    return records, damaged


def flat_rows_of(files: Iterable[Path]) -> tuple[list[dict[str, Any]], list[DamagedFile]]:
    """What `flatten` makes of every record.json, with its `directory`, and the files that are no
    records."""
    return _each(files, _row)


def _each(
    files: Iterable[Path], read: Callable[[Path], dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[DamagedFile]]:
    """What is read of every record.json, and why other files are none."""
    records: list[dict[str, Any]] = []
    damaged: list[DamagedFile] = []
    with uncollected():
        for path in files:
            try:
                records.append(read(path))
            except BadInput as error:
                damaged.append(DamagedFile(path, str(error).removeprefix(str(path)).lstrip(": ")))
    return records, damaged


def _warn(damaged: list[DamagedFile]) -> None:
    if damaged:
        warnings.warn(
            f"{len(damaged)} unreadable record(s) left out: {damaged[0]} {damaged[0].reason} ...",
            stacklevel=4,
        )


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the search for cycles, which records have none of: thousands of them are read in half
    of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def read_records(paths: PathLike | Iterable[PathLike]) -> list[dict[str, Any]]:
    """Records as dictionaries, each with its `directory` added; unreadable ones are left out, with
    a warning."""
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
                # interned: the same object also where another process read the record
                name = sys.intern(f"{self.name}.{key}" if self.name else key)
                column = self.below[key] = _Column(name)
            kind = type(value)
            if kind is dict:
                column.put(value, columns)
            elif kind is float and not math.isfinite(value):
                columns[column.name] = None
            else:
                columns[column.name] = value


_TOP, _CHOICES, _CONFIG = _Column(""), _Column("choices"), _Column("config")


def flatten(record: dict[str, Any]) -> dict[str, Any]:
    """One level of columns: "metrics.ttft_ms.p50", "config.batching.max_num_seqs",
    "choices.quant"; of the configuration what the record's engine supports."""
    return _supported(_flat(record))


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """See `flatten`; with the whole configuration."""
    columns: dict[str, Any] = {}
    config = record.get("config") or {}
    _TOP.put({key: value for key, value in record.items() if key != "config"}, columns)
    _CHOICES.put(config.get("choices") or {}, columns)
    _CONFIG.put({key: value for key, value in config.items() if key != "choices"}, columns)
    return columns


def _supported(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns without settings that the record's engine does not support, and so left at their
    defaults, with those that it supports in `supported`. A server's model has the server's name."""
    engine = {key: columns.get(f"config.engine.{key}") for key in ("_target_", "command", "steps")}
    drafts = {
        key: columns[name]
        for key in ("num_speculative_tokens", "acceptance")
        if (name := f"config.speculative.{key}") in columns
    }
    part = {"engine": engine, "speculative": drafts}
    settings = columns.get("supported")
    if settings is None:  # of an older record
        settings = supported_settings(part)
    columns["supported"] = settings
    if settings is None:
        return columns
    for name in _unsupported(tuple(columns), tuple(settings)):
        del columns[name]
    if (served := columns.get("served_model")) is not None:
        columns["choices.model"] = served
    if not is_reported(settings, "runtime", "threads"):
        columns["provenance.threads"] = None  # those of the client
    if is_elsewhere(part):  # older records have the client's
        columns["memory.host_rss_peak"] = None
    return columns


@lru_cache(maxsize=1024)  # thousands of records have the same fields
def _unsupported(names: tuple[str, ...], settings: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the columns that are settings which are not supported."""
    found = []
    for name in names:
        kind, _, path = name.partition(".")
        group, _, knob = path.partition(".")
        if kind in ("config", "choices") and not is_reported(
            settings, group, knob.partition(".")[0]
        ):
            found.append(name)
    return tuple(found)


def load_records(
    paths: PathLike | Iterable[PathLike], *, empty_columns: bool = True
) -> pandas.DataFrame:
    """A frame with a row a record and flattened columns; failed cells are rows like any other.

    Args:
        paths: as for `record_files`.
        empty_columns: False leaves out columns that no record has a value in.

    Returns:
        The frame. What a report's table names shorter is also a column of that name: each group's
        option (`quant` is `choices.quant`), and each knob that differs between the records
        (`cache.block_size` is `config.cache.block_size`). `frame.attrs["unreadable"]` lists the
        files that were left out, and `frame.attrs["damaged"]` tables that are not those that were
        recorded. Each is a path with a `reason`.

    Raises:
        BadInput: a place does not exist, or pandas is not installed.
    """
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise NotInstalled.of(error) or error from None

    from minivllm.bench.records.tables import damaged_tables

    rows, unreadable = flat_rows_of(record_files(paths))
    _warn(unreadable)
    frame = pandas.DataFrame(rows)
    frame = pandas.concat([frame, frame[_aliases(frame)].rename(columns=_short)], axis=1)
    if not empty_columns:
        frame = frame.dropna(axis="columns", how="all")
    damaged = [table for row in rows for table in damaged_tables(row) if archive.exists(table)]
    if damaged:
        warnings.warn(
            f"{len(damaged)} table(s) damaged: {damaged[0]} {damaged[0].reason} ...", stacklevel=2
        )
    frame.attrs |= {"unreadable": unreadable, "damaged": damaged}
    return frame


def _short(column: str) -> str:
    """The name of a group or a knob, as it is written on a command line."""
    return column.removeprefix("config.").removeprefix("choices.")


def _aliases(frame: pandas.DataFrame) -> list[str]:
    """The columns that have a second name, which no other column has."""
    choices = [name for name in frame if name.startswith("choices.")]
    knobs = [
        name
        for name in frame
        if name.startswith("config.")
        and not name.startswith("config.choices.")
        and not name.endswith("._target_")
        and frame[name].astype(str).nunique() > 1
    ]
    return [name for name in choices + knobs if _short(name) not in frame]
