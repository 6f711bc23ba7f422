"""Records as flat rows; thousands of them are read by several processes."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minivllm import redaction
from minivllm.bench.records import archive
from minivllm.bench.records.reading import flat_rows_of, record_files
from minivllm.bench.records.schema import Damaged, PathLike
from minivllm.platform.processes.process_pool import ProcessPool

MANY = 2000  # records that are worth a further process
CHUNK = 250  # of them in one call


def flat_rows(
    paths: PathLike | Iterable[PathLike],
    pool: ProcessPool | None = None,
    change: Callable[[dict[str, Any]], None] | None = None,
) -> tuple[list[dict[str, Any]], list[Damaged]]:
    """Records as rows, see `reading.flatten`, and the files that are no records.

    Args:
        paths: as for `record_files`.
        pool: is started for `MANY` records and reads them; None reads all in this process, as it
            does an archive, which each process would have to unpack.
        change: a function of a module that changes a row in its place.

    Raises:
        BadInput: a place does not exist.
    """
    chunk = Chunk(record_files(paths), change)
    if pool is not None and len(chunk.files) >= MANY and archive.split(chunk.files[0]) is None:
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
    change: Callable[[dict[str, Any]], None] | None
    secrets: frozenset[str] = field(default_factory=redaction.known)

    def split(self, size: int) -> list[Chunk]:
        """Chunks of so many files."""
        starts = range(0, len(self.files), size)
        return [replace(self, files=self.files[at : at + size]) for at in starts]

    def read(self) -> ReadChunk:
        """Rows of the records, and why other files are none."""
        redaction.learn_known(self.secrets)
        rows, damaged = flat_rows_of(self.files)
        if self.change is not None:
            for row in rows:
                self.change(row)
        return ReadChunk(rows, damaged, redaction.known() != self.secrets)


@dataclass(frozen=True)
class ReadChunk:
    """What was read of a chunk.

    Args:
        rows, damaged: see `flat_rows`.
        learned: whether the records taught a secret, which may stand in those that another process
            reads.
    """

    rows: list[dict[str, Any]]
    damaged: list[Damaged]
    learned: bool

    def __reduce__(self) -> tuple[Callable[..., ReadChunk], tuple[bytes, list[Damaged], bool]]:
        """Rows as `marshal` has them: faster than `pickle`, and names of columns stay interned."""
        return _unpacked, (marshal.dumps(self.rows), self.damaged, self.learned)


def _unpacked(rows: bytes, damaged: list[Damaged], learned: bool) -> ReadChunk:
    return ReadChunk(marshal.loads(rows), damaged, learned)
