"""Files that gzip has packed, read as if they were not."""

from __future__ import annotations

import gzip
import io
import zlib
from typing import BinaryIO, cast

GZIP = b"\x1f\x8b"  # how such a file begins
UNREADABLE = (OSError, EOFError, zlib.error)  # what reading raises, unpacking on the way


def unpacked(file: io.BufferedReader) -> BinaryIO:
    """The file itself, or what gzip has packed in it. Reading raises one of UNREADABLE where that
    is damaged; closing closes both."""
    if not file.peek(len(GZIP)).startswith(GZIP):
        return file
    return cast(BinaryIO, _Unpacked(file))


def unreadable(error: Exception) -> str:
    """Why a file cannot be read, in words."""
    return str(getattr(error, "strerror", None) or error)


class _Unpacked(gzip.GzipFile):
    def __init__(self, packed: io.BufferedReader) -> None:
        super().__init__(fileobj=packed)
        self._packed = packed

    def close(self) -> None:
        """Close the packed file, too, which was opened for this one."""
        super().close()
        self._packed.close()
