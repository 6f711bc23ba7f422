"""One process at a time in a folder of records."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from minivllm.bench.records.lock import HolderLock
from minivllm.errors import BadInput

LOCK = ".lock"


@contextlib.contextmanager
def folder_lock(folder: Path, what: str, knob: str) -> Iterator[None]:
    """Hold a folder of records: two processes that go by what it holds would measure everything
    twice.

    Args:
        folder: `<runs_dir>/<name>`; made where it is not there, and removed, as is an empty
            `runs_dir`, where nothing has come into it.
        what: is measured into it, a "sweep", a "search" or a "run".
        knob: that gives it another name.

    Raises:
        BadInput: another process holds it, or it cannot be made or locked.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"runs_dir={folder.parent}: no folder for records can be made ({error})"
        ) from None
    lock = HolderLock(folder / LOCK, f"{what} {folder.name}")
    if not lock.acquire():
        holder = lock.holder()
        raise BadInput(
            f"{what} {folder.name} is running in another process{holder and f': {holder}'}; "
            f"wait, or give {knob}=..."
        )
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if [path.name for path in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
                folder.rmdir()
                folder.parent.rmdir()  # if it is empty now
        lock.release()


@contextlib.contextmanager
def run_folder(root: Path, given: str | None) -> Iterator[str]:
    """Hold the folder of a lone run, and give its name; see `folder_name`. Raises BadInput also
    where another run has it."""
    name = folder_name(root, given)
    with folder_lock(root / name, "run", "name"):
        yield name


def folder_name(root: Path, given: str | None) -> str:
    """The name of a lone run's folder, which is made.

    Args:
        root: folder of all records.
        given: the name that the user wants; None is the time, made unique: such a run always
            measures anew.

    Raises:
        BadInput: the folder cannot be made, or something else has its name.
    """
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    name, count = given or stamp, 1
    while True:
        try:
            (root / name).mkdir(parents=True, exist_ok=given is not None)
            return name
        except FileExistsError as error:
            if given is not None:
                raise BadInput(
                    f"name={given}: {root / given} is not a folder; choose another name"
                ) from error
            count += 1
            name = f"{stamp}-{count}"
        except OSError as error:
            raise BadInput(
                f"runs_dir={root}: no folder for records can be made ({error})"
            ) from None
