"""How keys and values go from one engine to another: in a message, or in a file that the message
names. Pure Python."""

from __future__ import annotations

import errno
import os
import uuid
import zlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from minivllm.errors import BadInput
from minivllm.parallel.options import ParallelOptions
from minivllm.platform.files import write_bytes
from minivllm.platform.folders import TemporaryFolder

KNOB = "parallel.handover=file"
PREFIX = "minivllm-handover-"


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
            write_bytes(path, content, durable=False)
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


def make_folder(parallel: ParallelOptions, cache: Mapping[str, Any]) -> TemporaryFolder | None:
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
    try:
        return TemporaryFolder(PREFIX, folder and os.path.expanduser(folder))
    except OSError as error:
        raise BadInput(
            f"{KNOB}: no folder can be made in cache.offload_dir={folder or 'null'} "
            f"({error.strerror or error}); name a folder that exists and may be written to"
        ) from None


def require_folder(parallel: ParallelOptions, cache: Mapping[str, Any]) -> None:
    """Raise BadInput where `make_folder` would."""
    if (folder := make_folder(parallel, cache)) is not None:
        folder.close()
