"""A folder of large files that can be made again, bounded in size. Free of torch.

Only files with the names that `entry_name` makes belong to it; nothing else in the folder is read
or removed. The time of a file's last use is its modification time, which does not depend on mount
options."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import filelock

from minivllm.errors import BadInput, first_line
from minivllm.platform.files import atomically
from minivllm.platform.untrusted import size

ENDING = ".packed.safetensors"
LOCK = "minivllm-packed.lock"
_ENTRY = re.compile(r"[\w.+-]+-[0-9a-f]{32}" + re.escape(ENDING))
_LEFT = re.compile(r"\." + _ENTRY.pattern + r"\.\w+\.tmp")  # by a writer that was killed


def entry_name(label: str, key: str) -> str:
    """The file name of an entry.

    Args:
        label: tells a person what it is.
        key: 32 hexadecimal digits.
    """
    plain = re.sub(r"[^\w.+-]", "_", label)
    return f"{plain}-{key}{ENDING}"


@dataclass(frozen=True)
class CacheFolder:
    """A folder of entries.

    Attributes:
        path: of the folder, which the first entry makes.
        limit: most bytes of all entries.
    """

    path: Path
    limit: int

    def require_usable(self, knob: str) -> None:
        """Make the folder. Raises BadInput, which names the knob, where entries cannot be
        written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"{knob}={self.path} cannot be made: {first_line(error)}") from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise BadInput(f"{knob}={self.path} is not writable")

    def find(self, name: str) -> Path | None:
        """The file of an entry, now the last one that was used; None without one."""
        path = self.path / name
        try:
            os.utime(path)
        except FileNotFoundError:
            return None
        except OSError:  # a read-only folder has no order of use
            return path if path.is_file() else None
        return path

    def add(self, name: str, num_bytes: int, write: Callable[[Path], None]) -> str | None:
        """Write an entry in place of one of the same name, and remove the entries that were not
        used for the longest time where the folder grows beyond its limit.

        Args:
            name: from `entry_name`.
            num_bytes: of the file.
            write: fills a temporary file.

        Returns:
            The reason why the entry was not written; None: it was.
        """
        if num_bytes > self.limit:
            return f"it takes {size(num_bytes)} of at most {size(self.limit)}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(self.path / LOCK).acquire(timeout=0):
                self._remove_leftovers()
                if reason := self._make_room(name, num_bytes):
                    return reason
                atomically(self.path / name, write, durable=False)
        except filelock.Timeout:
            return "another process is writing to the folder"
        except (OSError, NotImplementedError) as error:
            return first_line(error)
        return None

    def entries(self) -> list[Path]:
        """All entries, those first that were not used for the longest time."""
        found = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as files:
            for file in files:
                if _ENTRY.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):  # just removed by its user
                        found.append((file.stat().st_mtime_ns, file.name))
        return [self.path / name for _, name in sorted(found)]

    def _make_room(self, name: str, num_bytes: int) -> str | None:
        """Remove entries until another fits. Returns the reason why it does not fit the disk."""
        held = {path: path.stat().st_size for path in self.entries() if path.name != name}
        total = num_bytes + sum(held.values())
        for path in list(held):
            if total <= self.limit:
                break
            path.unlink(missing_ok=True)  # a process that has it open keeps its content
            total -= held.pop(path)
        free = shutil.disk_usage(self.path).free
        if free < 2 * num_bytes:  # the other half is left to everyone else
            return f"it takes {size(num_bytes)}, and the disk has {size(free)} free"
        return None

    def _remove_leftovers(self) -> None:
        """Remove what killed writers have left. The lock is held, so nobody writes now."""
        for path in self.path.iterdir():
            if _LEFT.fullmatch(path.name):
                path.unlink(missing_ok=True)
