"""How keys and values go from one engine to another: in a message, or in a file that the message
names. Pure Python."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import uuid
import zlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from minivllm.errors import BadInput
from minivllm.parallel.options import ParallelOptions
from minivllm.platform.files import atomically

KNOB = "parallel.handover=file"
PREFIX = "minivllm-handover-"
# Removes a folder once the process that has started it is gone, however that ended.
KEEPER = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"


class HandoverFailed(BadInput):
    """Keys and values did not reach the other engine; the request is not to blame."""


class Stored(NamedTuple):
    """A file with keys and values, in the place of them."""

    path: str
    num_bytes: int
    checksum: int  # CRC-32

    def read(self) -> bytes:
        """Its content.

        Raises:
            HandoverFailed: it is missing, or is not what was written.
        """
        try:
            with open(self.path, "rb") as file:
                content = file.read(self.num_bytes + 1)
        except OSError as error:
            raise HandoverFailed(
                f"{KNOB}: {self.path} cannot be read ({error.strerror or error}); the folder of "
                "cache.offload_dir must be the same for all replicas"
            ) from None
        if len(content) != self.num_bytes or zlib.crc32(content) != self.checksum:
            raise HandoverFailed(f"{KNOB}: {self.path} is not what was written to it")
        return content


Content = bytes | Stored  # what a message has of keys and values


class Handover(NamedTuple):
    """How an engine hands over keys and values.

    Args:
        folder: where it writes files; None: the message has the bytes themselves.
        writer: the number of the engine, with which names of its files begin.
    """

    folder: str | None = None
    writer: int = 0

    def give(self, content: bytes) -> Content:
        """What the message has to carry.

        Raises:
            HandoverFailed: no file can be written; none is left.
        """
        if self.folder is None or not content:
            return content
        path = Path(self.folder, f"{self.writer}-{uuid.uuid4().hex}")
        try:
            if not path.parent.is_dir():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            atomically(path, lambda temporary: _write(temporary, content), durable=False)
        except OSError as error:
            raise HandoverFailed(
                f"{KNOB}: keys and values cannot be written to {self.folder} "
                f"({error.strerror or error}); free space there, or name another folder with "
                "cache.offload_dir"
            ) from None
        return Stored(str(path), len(content), zlib.crc32(content))

    def remove_all_but(self, known: Collection[Stored]) -> None:
        """Delete the files of an engine that has died, and what it has begun to write.

        Args:
            known: of any engine; those stay.
        """
        kept = {Path(one.path) for one in known}
        for pattern in (f"{self.writer}-*", f".{self.writer}-*"):
            for path in Path(self.folder).glob(pattern) if self.folder is not None else ():
                if path not in kept:
                    path.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def taken(content: Content, most_bytes: int) -> bytes:
    """Keys and values that came with a message; a file is deleted, whatever it holds.

    Args:
        content: what the message has.
        most_bytes: the size of all blocks that they may be of.

    Raises:
        HandoverFailed: they are larger; or see `Stored.read`.
    """
    try:
        size = content.num_bytes if isinstance(content, Stored) else len(content)
        if size > most_bytes:
            raise HandoverFailed(
                f"{size} bytes of keys and values were handed over for a prompt whose blocks have "
                f"{most_bytes}: the replicas differ"
            )
        return content.read() if isinstance(content, Stored) else content
    finally:
        drop(content)


def drop(content: Content) -> None:
    """Delete the file of what nobody needs any more; it may be gone."""
    if isinstance(content, Stored):
        with suppress(OSError):
            os.unlink(content.path)


class HandoverFolder:
    """A new folder that is removed when this process ends, even by SIGKILL: a process that does
    nothing else waits for that.

    Args:
        parent: where it is made; None: in the system's folder for temporary files.

    Raises:
        BadInput: it cannot be made.
    """

    def __init__(self, parent: str | None) -> None:
        try:
            self.path = tempfile.mkdtemp(prefix=PREFIX, dir=parent and os.path.expanduser(parent))
        except OSError as error:
            raise BadInput(
                f"{KNOB}: no folder can be made in cache.offload_dir={parent or 'null'} "
                f"({error.strerror or error}); name a folder that exists and may be written to"
            ) from None
        self._keeper = subprocess.Popen(
            (sys.executable, "-I", "-S", "-c", KEEPER, self.path),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal to this process's group does not end it
        )

    def close(self) -> None:
        """Remove the folder with all that is in it."""
        self._keeper.communicate()


def make_folder(parallel: ParallelOptions, cache: Mapping[str, Any]) -> HandoverFolder | None:
    """The folder that `parallel.handover` needs; None: it needs none.

    Args:
        parallel: the knobs of the group.
        cache: those of its group; a class of the user's own may have no `offload_dir`.

    Raises:
        BadInput: it cannot be made, or other machines would not have it.
    """
    if parallel.handover != "file":
        return None
    folder = cache.get("offload_dir")
    if parallel.backend == "ray" and folder is None:
        raise BadInput(
            f"{KNOB}: replicas of parallel.backend=ray may be on other machines; name a folder "
            "that all of them have with cache.offload_dir"
        )
    return HandoverFolder(folder)


def require_folder(parallel: ParallelOptions, cache: Mapping[str, Any]) -> None:
    """Raise BadInput where `make_folder` would."""
    if (folder := make_folder(parallel, cache)) is not None:
        folder.close()
