"""The tables beside a record: read only if they are those that it was written with."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.bench.records import archive
from minivllm.bench.records.schema import DamagedFile
from minivllm.bench.records.storage import EVENTS, REQUESTS, STEPS, TABLES
from minivllm.errors import BadInput

if TYPE_CHECKING:
    import pyarrow

MAGIC = b"PAR1"  # with which a whole table begins and ends
LARGEST = 4 << 30  # bytes of a table
# Columns that hold no numbers.
TEXTS = frozenset({"request_id", "finish_reason", "status", "error", "phase"})
LISTS = frozenset({"token_ids", "token_times_s"})


def read_table(
    directory: Path,
    name: str,
    digest: str | None,
    columns: Sequence[str] | None = None,
    needed: Sequence[str] = (),
) -> pyarrow.Table:
    """Those of the given columns that a table has.

    Args:
        directory: of the record.
        name: of the table's file.
        digest: that the record has of it; None: none.
        columns: names; None reads all, whatever they hold.
        needed: those of them that must be there, with a number in each row.

    Raises:
        BadInput: it is missing, torn, or not the table that the record was written with; the line
            says which.
    """
    import pyarrow
    import pyarrow.compute as pc
    import pyarrow.parquet

    path = directory / name
    if not archive.exists(path):
        raise BadInput("is missing")
    content = archive.read_bytes(path, LARGEST, str(path))
    if digest is not None and hashlib.sha256(content).hexdigest() != digest:
        raise BadInput("is not the table that was recorded: its digest is another")
    try:
        with pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content)) as table:
            there = [name for name in columns or () if name in table.schema_arrow.names]
            rows = table.read(None if columns is None else there)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise BadInput(f"is torn ({error})") from None
    for column in there:
        _check_kind(column, rows.schema.field(column).type)
    for column in needed:
        if column not in there or pc.any(rows[column].is_null(nan_is_null=True)).as_py():
            raise BadInput(f"has rows without {column}")
    return rows


def _check_kind(column: str, kind: pyarrow.DataType) -> None:
    """Raise BadInput for a column that holds another kind of values than is written into it."""
    import pyarrow.types

    def numbers(of: pyarrow.DataType) -> bool:
        return bool(
            pyarrow.types.is_integer(of)
            or pyarrow.types.is_floating(of)
            or pyarrow.types.is_boolean(of)
        )

    if column in TEXTS:
        right = pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)
    elif column in LISTS:
        right = pyarrow.types.is_list(kind) and (
            numbers(kind.value_type) or pyarrow.types.is_null(kind.value_type)
        )
    else:
        right = numbers(kind)
    if not right and not pyarrow.types.is_null(kind):
        raise BadInput(f"holds {kind} in the column {column}")


def damaged_tables(row: dict[str, Any]) -> list[DamagedFile]:
    """Tables and events of a record that are missing, torn, or not those that it was written with.

    Of a table without a digest, as of every record of schema 1, only the first and the last bytes
    are looked at.

    Args:
        row: the record flattened, with its `directory`.
    """
    if row.get("status") != "ok":
        return []
    directory, damaged = Path(row["directory"]), []
    for name in (*TABLES, *[EVENTS] * (row.get(f"digests.{EVENTS}") is not None)):
        path, digest = directory / name, row.get(f"digests.{name}")
        # Of a simulated engine there is no telemetry; an archive may leave some tables out.
        required = (name in (REQUESTS, STEPS) or digest is not None) and name not in (
            row.get("slimmed") or ()
        )
        if (reason := _damage(path, digest)) is not None and (required or archive.exists(path)):
            damaged.append(DamagedFile(path, reason))
    return damaged


def _damage(path: Path, digest: str | None) -> str | None:
    if not archive.exists(path):
        return "is missing"
    try:
        with archive.open_file(path, str(path)) as file:
            if digest is not None:
                same = hashlib.file_digest(file, "sha256").hexdigest() == digest
                return None if same else "is not the table that was recorded: its digest is another"
            first = file.read(len(MAGIC))
            file.seek(-len(MAGIC), os.SEEK_END)
            return None if first == file.read() == MAGIC else "is torn"
    except BadInput as error:
        return str(error).removeprefix(str(path)).lstrip(": ")
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
