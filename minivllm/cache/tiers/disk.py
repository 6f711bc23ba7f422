"""The disk tier's file: records of one block each with a checksum, written and read by a thread of
its own."""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import zlib
from io import FileIO

from minivllm.cache.tiers.offload import Finished
from minivllm.errors import BadInput

MOST_BACKLOG = 1 << 26  # bytes that may wait to be written; beyond, blocks are lost


def scratch_file(folder: str | None) -> FileIO:
    """A new file without a name: nothing is left behind however the process ends (even by SIGKILL).

    Where the system cannot do that (Windows), closing the file removes it.

    Raises:
        BadInput: no file can be made in `folder` (None: the system's folder for temporary files).
    """
    try:
        return tempfile.TemporaryFile(
            dir=folder and os.path.expanduser(folder), buffering=0, prefix="minivllm-"
        )
    except OSError as error:
        raise BadInput(
            f"cache.offload_dir={folder or 'null'}: no file can be made there "
            f"({error.strerror or error}); name a folder that exists and may be written to"
        ) from None


class DiskFile:
    """A file of records of equal size. A thread does the jobs in order; `poll` returns their
    results.

    Args:
        folder: where the file lies; see `scratch_file`.
        record_bytes: size of a record.
    """

    def __init__(self, folder: str | None, record_bytes: int) -> None:
        self.record_bytes = record_bytes
        self._file = scratch_file(folder)
        self._sums: dict[int, int] = {}  # CRC-32 of each record that was written whole
        self._jobs: queue.SimpleQueue[tuple[int, int | None, memoryview] | None] = (
            queue.SimpleQueue()
        )
        self._finished: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        # Writes requested, and written. Each counter has one thread that changes it.
        self._requested = self._written = 0
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="kv-offload", daemon=True)
        self._thread.start()

    @property
    def backlogged(self) -> bool:
        return (self._requested - self._written) * self.record_bytes >= MOST_BACKLOG

    def write(self, record: int, content: memoryview) -> None:
        """Store `content`, of `record_bytes` bytes."""
        self._requested += 1
        self._jobs.put((record, None, content))

    def read(self, record: int, slot: int, target: memoryview) -> None:
        """Fill `target`, the memory of host slot `slot`. No other code may touch it before `poll`
        returns the job."""
        self._jobs.put((record, slot, target))

    def poll(self) -> list[Finished]:
        return [self._finished.get() for _ in range(self._finished.qsize())]

    def close(self) -> None:
        """Drop the waiting jobs, and remove the file."""
        self._closing = True
        self._jobs.put(None)
        self._thread.join()
        self._file.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closing:
            record, slot, memory = job
            error = None
            try:
                if slot is None:
                    self._write(record, memory)
                else:
                    self._read(record, memory)
            except OSError as reason:
                error = (
                    f"record {record} could not be {'written' if slot is None else 'read'}: "
                    f"{reason}"
                )
            self._written += slot is None
            self._finished.put(Finished(record, slot, error))

    def _write(self, record: int, content: memoryview) -> None:
        self._sums.pop(record, None)
        checksum = zlib.crc32(content)
        self._file.seek(record * self.record_bytes)
        while content:
            content = content[self._file.write(content) :]
        self._sums[record] = checksum

    def _read(self, record: int, target: memoryview) -> None:
        self._file.seek(record * self.record_bytes)
        whole, rest = target, target
        while rest and (count := self._file.readinto(rest)):
            rest = rest[count:]
        if rest or zlib.crc32(whole) != self._sums.get(record):
            raise OSError("its checksum is wrong")
