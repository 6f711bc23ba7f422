"""A lock file that says who holds it, and folders of records in which one process is at a time."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock

from minivllm.bench.records.provenance import command
from minivllm.errors import BadInput, first_line
from minivllm.platform import times

LOCK = ".lock"  # of a folder of records
MOST = 4096  # bytes of the file that are read


class HolderLock:
    """A lock between processes, whose file holds a JSON object: pid, command, started (UTC) and
    host of who has it.

    Args:
        path: the lock file; its folder is there.
        what: how a message about it begins.
        mode: permissions of a new file; None: as the process has it.
    """

    def __init__(self, path: Path, what: str, mode: int | None = None) -> None:
        self._path, self._what = path, what
        self._lock = filelock.FileLock(path) if mode is None else filelock.FileLock(path, mode=mode)

    def acquire(self, wait: bool = False) -> bool:
        """Take the lock; False where another process has it and `wait` does not say to wait for it.

        Raises:
            BadInput: the file cannot be locked: a folder or a link is in the way, it is another
                user's, the disk is full.
        """
        try:
            if not stat.S_ISREG(os.lstat(self._path).st_mode):
                raise BadInput(
                    f"{self._what}: {self._path} is in the way of the lock file, which it is "
                    "not: remove it"
                )
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._unusable(error) from None
        try:
            self._lock.acquire(timeout=-1 if wait else 0, poll_interval=0.2)
        except filelock.Timeout:
            return False
        except (OSError, NotImplementedError) as error:
            raise self._unusable(error) from None
        self._write(
            json.dumps(
                {
                    "pid": os.getpid(),
                    "command": command(),
                    "started": times.now(),
                    "host": platform.node(),
                }
            )
        )
        return True

    def release(self) -> None:
        """Give it back; the file stays, and is empty."""
        self._write("")
        self._lock.release()

    def holder(self) -> str:
        """In words, who has it and since when; "" where the file does not say."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            with open(self._path, "rb", opener=_plainly) as file:
                owner: dict[str, Any] = json.loads(file.read(MOST))
            host = "" if owner["host"] == platform.node() else f" on {owner['host']}"
            return (
                f"process {int(owner['pid'])}{host} ({owner['command']}), since "
                f"{owner['started'].replace('T', ' ')}"
            )
        return ""

    def _write(self, text: str) -> None:
        # The lock holds without a holder's entry, as on a full disk.
        with contextlib.suppress(OSError), open(self._path, "wb", opener=_plainly) as file:
            file.write(text.encode())

    def _unusable(self, error: Exception) -> BadInput:
        reason = getattr(error, "strerror", None) or first_line(error)
        return BadInput(
            f"{self._what}: the lock file {self._path} cannot be used ({reason}): if it is "
            "another user's, let its owner remove it or allow others to write to it"
        )


def _plainly(path: str, flags: int) -> int:
    """Neither follow a link nor wait for a pipe, and make no file."""
    return os.open(
        path, (flags & ~os.O_CREAT) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    )


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
            measures again.

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
