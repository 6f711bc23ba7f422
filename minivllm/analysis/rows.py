"""Records as plain rows, and their tables: the one place where the report reads anything. Thousands
of records are read by several processes."""

from __future__ import annotations

import marshal
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm import redaction
from minivllm.analysis.absent import fill
from minivllm.bench.metrics.telemetry_validity import shared
from minivllm.bench.records import archive
from minivllm.bench.records.archive import record_files
from minivllm.bench.records.measurement import SIMULATED
from minivllm.bench.records.reading import flat_rows_of
from minivllm.bench.records.schema import DamagedFile
from minivllm.bench.records.tables import read_table
from minivllm.config.support import is_reported
from minivllm.errors import BadInput
from minivllm.platform.processes.process_pool import ProcessPool
from minivllm.platform.times import moment_of
from minivllm.platform.untrusted import printable

if TYPE_CHECKING:
    import pandas as pd

MANY = 2000  # records that are worth a further process
CHUNK = 250  # of them in one call
Block = tuple[str, int]  # host and block number: within one, ratios are paired
# A flattened record: "metrics.ttft_ms.p50" -> value; a null is None, what is not there is no key.
Row = dict[str, Any]


def read_rows(
    source: Path | list[Path], pool: ProcessPool | None = None
) -> tuple[list[Row], list[DamagedFile]]:
    """Rows of every record at or below the given folders, failed ones included, in the order in
    which the folders are given, and the unreadable files.

    Args:
        source: folders.
        pool: is started for `MANY` records and reads them; None reads all in this process, as it
            does archives, which each process would have to unpack.

    Raises:
        BadInput: there is no record at all that can be read.
    """
    places = source if isinstance(source, list) else [source]
    files = list(dict.fromkeys(file for place in places for file in record_files(place)))
    rows, unreadable = _read(Chunk(files), pool)
    if not rows:
        where = ", ".join(map(str, places))
        if unreadable:
            first = unreadable[0]
            raise BadInput(
                f"no record at or below {where} can be read, of {len(unreadable)} that are "
                f"there; the first: {first}: {first.reason}"
            )
        raise BadInput(
            f"no record.json at or below {where}: run a benchmark first, or name its folder in "
            "runs=[...]"
        )
    fill(rows)
    return rows, unreadable


def _read(chunk: Chunk, pool: ProcessPool | None) -> tuple[list[Row], list[DamagedFile]]:
    """Rows of the records, and the files that are none; see `read_rows`."""
    many = len(chunk.files) >= MANY
    if pool is not None and many and all(archive.split(file) is None for file in chunk.files):
        pool.start()
        read = pool.map(Chunk.read, chunk.split(CHUNK))
        if not any(part.learned for part in read):
            return [row for part in read for row in part.rows], [
                file for part in read for file in part.damaged
            ]
    whole = chunk.read()
    return whole.rows, whole.damaged


@dataclass(frozen=True)
class Chunk:
    """Some record.json, which any process reads."""

    files: list[Path]
    secrets: frozenset[str] = field(default_factory=redaction.known)

    def split(self, size: int) -> list[Chunk]:
        """Chunks of so many files."""
        starts = range(0, len(self.files), size)
        return [replace(self, files=self.files[at : at + size]) for at in starts]

    def read(self) -> ReadChunk:
        """Rows of the records, and why other files are none."""
        redaction.learn_known(self.secrets)
        rows, damaged = flat_rows_of(self.files)
        for row in rows:
            _show(row)
        return ReadChunk(rows, damaged, redaction.known() != self.secrets)


@dataclass(frozen=True)
class ReadChunk:
    """What was read of a chunk.

    Args:
        rows: one a record.
        damaged: the files that are no records.
        learned: whether the records taught a secret, which may stand in those that another process
            reads.
    """

    rows: list[Row]
    damaged: list[DamagedFile]
    learned: bool

    def __reduce__(self) -> tuple[Callable[..., ReadChunk], tuple[bytes, list[DamagedFile], bool]]:
        """Rows as `marshal` has them: faster than `pickle`, and names of columns stay interned."""
        return _unpacked, (marshal.dumps(self.rows), self.damaged, self.learned)


def _unpacked(rows: bytes, damaged: list[DamagedFile], learned: bool) -> ReadChunk:
    return ReadChunk(marshal.loads(rows), damaged, learned)


def _show(row: Row) -> None:
    """Leave of a row's words what any page, table or terminal can show; the place of its files
    stays."""
    values = row.values()
    if "".join([value for value in values if type(value) is str]).isprintable() and _printable(
        tuple(row)
    ):
        changed = [key for key, value in row.items() if type(value) is list]
    else:
        changed = list(row)
    for key in changed:
        value = row[key]
        if isinstance(value, list):
            row[key] = [_shown(item) if isinstance(item, str) else item for item in value]
        elif isinstance(value, str) and key != "directory":
            row[key] = _shown(value)
        if not key.isprintable():
            row[_shown(key)] = row.pop(key)


@lru_cache(maxsize=4096)
def _printable(names: tuple[str, ...]) -> bool:
    return "".join(names).isprintable()


def _shown(text: str) -> str:
    return (
        text if text.isprintable() else printable(text).encode("utf-8", "replace").decode()
    )  # half of a surrogate pair is no UTF-8


def number(value: Any) -> float | None:
    """The value as a finite float, or None where it is not a number."""
    kind = type(value)
    if kind is not float and (kind is bool or not isinstance(value, (int, float))):
        return None
    return float(value) if math.isfinite(value) else None


def strings(value: Any) -> list[str]:
    """A list field of a record as strings; empty where it is missing."""
    if isinstance(value, str):
        return [value] if value else []
    return [str(v) for v in value] if isinstance(value, list | tuple) else []


def below(row: Row, prefix: str) -> Row:
    """The fields under `prefix.`, without it; nested dictionaries that were not flattened
    included."""
    values = {short: v for key, short in _names(tuple(row), prefix) if (v := row[key]) is not None}
    nested = row.get(prefix)
    if isinstance(nested, Mapping):
        values.update(nested)
    return values


@lru_cache(maxsize=4096)  # thousands of records have the same fields
def _names(fields: tuple[str, ...], prefix: str) -> tuple[tuple[str, str], ...]:
    """The fields under `prefix.`, each with what follows it."""
    start = f"{prefix}."
    return tuple((field, field[len(start) :]) for field in fields if field.startswith(start))


def fields(rows: Iterable[Row]) -> set[str]:
    """The names of all fields that any of the rows has."""
    return set().union(*{tuple(row) for row in rows})  # thousands of records have the same


def differing(rows: Sequence[Row], prefixes: tuple[str, ...] = ("",)) -> set[str]:
    """The names of the fields, of those that begin so, that are not the same in all of the rows."""
    # rows that have the same fields, which are few kinds
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        kinds.setdefault(tuple(row), []).append(row)
    varied: set[str] = set()
    for names, same in kinds.items():
        for name in names:
            values = [row[name] for row in same] if name.startswith(prefixes) else []
            if values and values.count(values[0]) < len(values):
                varied.add(name)
    one, *others = (same[0] for same in kinds.values())
    for other in others:
        varied |= other.keys() ^ one.keys()
        varied.update(name for name in other.keys() & one.keys() if other[name] != one[name])
    return {name for name in varied if name.startswith(prefixes)}


def tells(row: Row, field: str) -> bool:
    """Whether a field of the configuration says something of what was measured: it is no setting
    that the row's engine does not support."""
    kind, _, path = field.partition(".")
    group, _, name = path.partition(".")
    if kind not in ("config", "choices") or (kind == "choices" and field in row):
        return True
    return is_reported(row.get("supported"), group, name.partition(".")[0])


def record_folder(row: Row) -> Path | None:
    """The folder that holds the row's record.json and its parquet files."""
    value = row.get("directory")
    return Path(value) if isinstance(value, str | Path) and str(value) else None


def frame(
    row: Row, file: str, columns: Sequence[str], needed: Sequence[str] = ()
) -> pd.DataFrame | None:
    """A table beside a record; None where it is missing, torn, or not the table that was recorded,
    which `ReportInputs.damaged` reports.

    Args:
        row: the record.
        file: name beside record.json.
        columns: to read, those that are there.
        needed: those of them that must be there, with a number in each row.
    """
    folder = record_folder(row)
    if folder is None:
        return None
    try:
        return read_table(folder, file, row.get(f"digests.{file}"), columns, needed).to_pandas()
    except BadInput:
        return None


def status_of(row: Row) -> str:
    """The record's status; a record whose validity gate failed counts as invalid whatever it
    says."""
    status = str(row.get("status") or "error")
    return "invalid" if status == "ok" and row.get("validity.ok") is False else status


def reason_of(row: Row) -> str:
    """Why a record has failed, or is invalid."""
    reasons = "; ".join(strings(row.get("validity.reasons")))
    return str(row.get("error.message") or reasons or "no message was recorded")


def distinct(rows: Iterable[Row], key: str) -> list[Any]:
    """The different values of a field that are not missing, in order of appearance."""
    values = [value for row in rows if (value := row.get(key)) is not None]
    try:
        return list(dict.fromkeys(values))
    except TypeError:  # lists cannot be hashed
        return list({repr(value): value for value in reversed(values)}.values())[::-1]


CLOSED = ("offline", "concurrency")  # arrival processes in which a request waits for the engine


def open_loop(row: Row) -> tuple[tuple[str, Any], ...] | None:
    """The knobs of an arrival process that goes by the clock, whatever the engine does; None where
    there is none."""
    target = str(row.get("config.arrival._target_") or "")
    name = target.rpartition(".")[2].lower() or row.get("choices.arrival")
    if not name or name in CLOSED or row.get("config.arrival.concurrency") is not None:
        return None
    return tuple(sorted(below(row, "config.arrival").items()))


def started(row: Row) -> float:
    """When a record was begun, in seconds since 1970; `UNKNOWN_S` where it does not say."""
    return moment_of(row.get("provenance.started_at"))


def block_of(row: Row) -> Block:
    """Where the row was measured, and in which block."""
    return str(row.get("provenance.host") or ""), int(row.get("block") or 0)


def is_simulated(row: Row) -> bool:
    """Whether the record's figures are predictions (engine=simulated)."""
    return bool(row.get("config.engine._target_") == SIMULATED)


def met_others(row: Row) -> bool:
    """Whether a record says that other processes used the machine meanwhile."""
    return shared(strings(row.get("validity.notes")))
