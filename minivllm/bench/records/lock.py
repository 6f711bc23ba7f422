"""A lock file that says who holds it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import stat
from pathlib import Path
from typing import Any

import filelock

from minivllm.bench.records.provenance import command
from minivllm.errors import BadInput, first_line
from minivllm.platform import times

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
