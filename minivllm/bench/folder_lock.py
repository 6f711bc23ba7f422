"""One process at a time in a folder of records."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import filelock

from minivllm.errors import BadInput


@contextlib.contextmanager
def folder_lock(folder: Path, what: str, knob: str) -> Iterator[None]:
    """Hold a folder of records: two processes that go by what it holds would measure everything twice.

    Args:
        folder: `<runs_dir>/<name>`; made where it is not there.
        what: is measured into it, a "sweep" or a "search".
        knob: that gives it another name.

    Raises:
        BadInput: another process holds it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"runs_dir={folder.parent}: no folder for records can be made ({error})") from None
    lock = filelock.FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise BadInput(
            f"{what} {folder.name} is running in another process; wait, or give {knob}=..."
        ) from None
    try:
        yield
    finally:
        lock.release()
