"""Reading the text files that a user names, whatever editor has written them."""

from __future__ import annotations

import re
from pathlib import Path

from minivllm.errors import BadInput

MARK = b"\xef\xbb\xbf"  # that some editors begin UTF-8 with


def read_bytes(knob: str, path: Path, source: str = "") -> bytes:
    """A file's content without a byte-order mark; `knob` is what names the file, `source` says where it may be had.

    Raises:
        BadInput: there is no such file, or it cannot be read.
    """
    try:
        return path.read_bytes().removeprefix(MARK)
    except FileNotFoundError:
        raise BadInput(f"{knob}={path}: there is no such file{source and f'; {source}'}") from None
    except OSError as error:
        raise BadInput(f"{knob}={path} cannot be read: {error.strerror or error}") from error


def read_lines(knob: str, path: Path, source: str = "") -> list[str]:
    """A file's lines, however they end (LF, CRLF, CR).

    Raises:
        BadInput: as `read_bytes`; or a line is not UTF-8, with its number.
    """
    raw = read_bytes(knob, path, source)
    try:
        return re.split(r"\r\n|\r|\n", raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise not_text(path, error) from None


def not_text(path: Path, error: UnicodeDecodeError) -> BadInput:
    """What to say of a file that is not UTF-8, with the number of the line."""
    line = error.object.count(b"\n", 0, error.start) + 1
    return BadInput(f"{path}:{line}: not UTF-8, so it cannot be read as text")
