"""Reading of files from outside the program, up to a size, and never from a pipe or a device.
Torch-free.

Files of a user, a checkpoint, a record or a server are read here, so that each limit and each error
message exists once.
"""

from __future__ import annotations

import io
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from minivllm.errors import BadInput

MIB = 1 << 20
MAX_JSON = 64 * MIB  # a configuration, an index, a record
MAX_TOKENIZER = 256 * MIB  # the largest known tokenizer.json has 33 MiB
MAX_TEXT = 1 << 30  # a file of prompts
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors write it at the start of UTF-8
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?"
    r"|[PX^_][^\x1b]*(?:\x1b\\)?|[@-Z\\-_])"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def place(path: str | os.PathLike[str], what: str, advice: str = "") -> Path:
    """The path that a user wrote, with `~` replaced by the home folder; it need not exist.

    Args:
        path: of a file or a folder.
        what: how the message begins, such as "model.path=DIR".
        advice: what to do where the path cannot be read.

    Raises:
        BadInput: the name is impossible, or permission is denied.
    """
    expanded = Path(os.path.expanduser(path))  # an unknown user's `~` stays
    try:
        os.stat(expanded)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise BadInput(with_advice(f"{what} cannot be read: {reason}", advice)) from None
    return expanded


def named(path: Path) -> bool:
    """Whether a folder has an entry of that name, a broken link included.

    Reading a broken link raises an error, whereas a missing file may be optional.
    """
    return os.path.lexists(path)


def open_file(path: Path, what: str, advice: str = "") -> io.BufferedReader:
    """Open a regular file for reading; a pipe or a device, which may never end, is an error at
    once.

    Args:
        path: the file.
        what: how the message begins, such as "workload.path=prompts.jsonl".
        advice: what to do where the file is missing or of the wrong kind.

    Raises:
        BadInput: the file does not exist, cannot be read or is no regular file.
    """
    try:
        descriptor = os.open(
            path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        )
    except FileNotFoundError:
        link = " at the other end of this link" * path.is_symlink()
        raise BadInput(with_advice(f"{what}: there is no such file{link}", advice)) from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise BadInput(with_advice(f"{what} cannot be read: {reason}", advice)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        kind = "a folder" if path.is_dir() else "a pipe or a device"
        raise BadInput(with_advice(f"{what} is {kind}, not a regular file", advice))
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, limit: int, what: str, advice: str = "") -> bytes:
    """The whole content of a file.

    Args:
        path: the file.
        limit: most bytes of the file.
        what, advice: as for `open_file`.

    Raises:
        BadInput: as `open_file`; or the file is larger than `limit`.
    """
    with open_file(path, what, advice) as file:
        return content_of(file, limit, what, advice)


def content_of(
    file: io.BufferedReader | io.BytesIO, limit: int, what: str, advice: str = ""
) -> bytes:
    """The whole content of an open file; see `read_bytes`."""
    try:
        if isinstance(file, io.BytesIO):
            length = file.getbuffer().nbytes
        else:
            length = os.fstat(file.fileno()).st_size
        expected = min(limit, length)  # `read` allocates as many bytes as its argument says
        content = file.read(expected + 1)
        if len(content) > expected:
            content += file.read(limit + 1 - len(content))
    except OSError as error:
        raise BadInput(
            with_advice(f"{what} cannot be read: {error.strerror or error}", advice)
        ) from None
    if len(content) > limit:
        raise BadInput(with_advice(f"{what} is larger than {size(limit)}", advice))
    return content


def read_text(path: Path, limit: int, what: str, advice: str = "") -> str:
    """The whole text of a UTF-8 file; see `read_bytes` and `decode`."""
    return decode(read_bytes(path, limit, what, advice), path, advice=advice)


def decode(content: bytes, path: Path, line: int = 1, advice: str = "") -> str:
    """Decode a UTF-8 file, without its byte-order mark.

    Args:
        content: the file's bytes from the beginning of a line on.
        path: the file, for the message.
        line: that line's number.
        advice: what to do where it is not UTF-8.

    Raises:
        BadInput: the content is not UTF-8; the message begins with the file and the line number.
    """
    try:
        return (content.removeprefix(BYTE_ORDER_MARK) if line == 1 else content).decode("utf-8")
    except UnicodeDecodeError as error:
        line += error.object.count(b"\n", 0, error.start)
        raise BadInput(
            with_advice(f"{path}:{line}: not UTF-8, so it cannot be read as text", advice)
        ) from None


def parse_json(content: str | bytes, what: str, advice: str = "") -> Any:
    """Parse a JSON value.

    Raises:
        BadInput: the content is no JSON, is not UTF-8 or is nested too deeply.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise BadInput(with_advice(f"{what} is nested too deeply for JSON", advice)) from None
    except UnicodeDecodeError:
        raise BadInput(with_advice(f"{what} is not valid JSON (it is not UTF-8)", advice)) from None
    except ValueError as error:  # also integers of thousands of digits
        raise BadInput(
            with_advice(f"{what} is not valid JSON ({str(error)[:200]})", advice)
        ) from None


def read_json(path: Path, what: str, advice: str = "", limit: int = MAX_JSON) -> Any:
    """The value of a JSON file; see `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path, limit, what, advice), what, advice)


def read_object(path: Path, what: str, advice: str = "", limit: int = MAX_JSON) -> dict[str, Any]:
    """The object of a JSON file; see `read_json`. Raises BadInput also for any other value."""
    value = read_json(path, what, advice, limit)
    if not isinstance(value, dict):
        raise BadInput(with_advice(f"{what} is not a JSON object", advice))
    return value


def printable(text: str) -> str:
    """Text that is safe on a terminal: without escape sequences, control characters and changes of
    direction; newlines and tabs stay."""
    return text if text.isprintable() else _CONTROLS.sub("", _ESCAPES.sub("", text))


def size(count: int) -> str:
    """A number of bytes in words, in the largest unit that fits: "64 MiB"."""
    for unit, name in ((1 << 30, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} bytes"


def with_advice(message: str, advice: str) -> str:
    """A message, and what to do about it where that is known."""
    return f"{message}; {advice}" if advice else message
