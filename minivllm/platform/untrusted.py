"""Reading of files from outside the program, up to a size, and never from a pipe or a device.
Torch-free.

Files of a user, a checkpoint, a record or a server are read here, so that each limit and each error
message exists once.
"""

from __future__ import annotations

import io
import itertools
import json
import lzma
import os
import posixpath
import re
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minivllm.errors import BadInput
from minivllm.platform.unpacking import UNREADABLE, unpacked, unreadable

MIB = 1 << 20
MAX_JSON = 64 * MIB  # a configuration, an index, a record
MAX_TOKENIZER = 256 * MIB  # the largest known tokenizer.json has 33 MiB
MAX_TEXT = 1 << 30  # a file of prompts
MAX_LINE = 16 * MIB  # bytes of one line, or characters of one value
MAX_ARCHIVE = 512 * MIB  # of an archive, packed and unpacked
MAX_ARCHIVE_FILES = 1 << 17
UNPACKING_MEMORY = 128 * MIB  # twice the largest dictionary of `xz -9`
CHUNK = 1 << 18  # characters that one read of a list takes
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors write it at the start of UTF-8
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?"
    r"|[PX^_][^\x1b]*(?:\x1b\\)?|[@-Z\\-_])"
)
_DECODER = json.JSONDecoder()
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
        raise BadInput(_line(f"{what} cannot be read: {reason}", advice)) from None
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
        raise BadInput(_line(f"{what}: there is no such file{link}", advice)) from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise BadInput(_line(f"{what} cannot be read: {reason}", advice)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        kind = "a folder" if path.is_dir() else "a pipe or a device"
        raise BadInput(_line(f"{what} is {kind}, not a regular file", advice))
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
        try:
            # `read` allocates as many bytes as its argument says
            expected = min(limit, os.fstat(file.fileno()).st_size)
            content = file.read(expected + 1)
            if len(content) > expected:
                content += file.read(limit + 1 - len(content))
        except OSError as error:
            raise BadInput(
                _line(f"{what} cannot be read: {error.strerror or error}", advice)
            ) from None
    if len(content) > limit:
        raise BadInput(_line(f"{what} is larger than {size(limit)}", advice))
    return content


def read_begin(path: Path, what: str, advice: str = "") -> bytes:
    """The first bytes of a file, at most `CHUNK`; gzip's files are unpacked. Arguments and errors
    are those of `open_file`; a damaged file is a BadInput too."""
    with unpacked(open_file(path, what, advice)) as file:
        try:
            return file.read(CHUNK)
        except UNREADABLE as error:
            raise BadInput(_line(f"{what} cannot be read: {unreadable(error)}", advice)) from None


def read_text(path: Path, limit: int, what: str, advice: str = "") -> str:
    """The whole text of a UTF-8 file; see `read_bytes` and `decode`."""
    return decode(read_bytes(path, limit, what, advice), path, advice=advice)


def read_lines(path: Path, what: str, advice: str = "", longest: int = MAX_LINE) -> Iterator[bytes]:
    """Iterate over the lines of a file, without their ends (LF, CRLF), in constant memory; gzip's
    files are unpacked.

    Args:
        path: the file.
        what, advice: as for `open_file`.
        longest: most bytes of a line.

    Raises:
        BadInput: as `open_file`; or a line is longer; the message has its number.
    """
    with unpacked(open_file(path, what, advice)) as file:
        for number in itertools.count(1):
            try:
                line = file.readline(longest + 2)
            except UNREADABLE as error:
                reason = unreadable(error)
                raise BadInput(_line(f"{what} cannot be read: {reason}", advice)) from None
            if not line:
                return
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            if len(line) > longest:
                raise BadInput(_line(f"{what}, line {number}: longer than {size(longest)}", advice))
            yield line


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
            _line(f"{path}:{line}: not UTF-8, so it cannot be read as text", advice)
        ) from None


def read_text_lines(path: Path, what: str, advice: str = "") -> Iterator[str]:
    """Iterate over the lines of a UTF-8 file; see `read_lines` and `decode`."""
    for number, line in enumerate(read_lines(path, what, advice), start=1):
        yield decode(line, path, number)


def read_list(path: Path, what: str, advice: str = "", longest: int = MAX_LINE) -> Iterator[Any]:
    """Iterate over the values of a JSON list in a file, in constant memory; gzip's files are
    unpacked.

    Args:
        path: the file.
        what, advice: as for `open_file`.
        longest: most characters of a value.

    Raises:
        BadInput: as `open_file`; or the file is no JSON list or a value is longer. These messages
            begin with the file and the number of the line.
    """
    file_bytes = unpacked(open_file(path, what, advice))
    with io.TextIOWrapper(file_bytes, encoding="utf-8-sig", newline="") as file:
        yield from _ListReader(file, path, longest)


class _ListReader:
    """Iterator over the values of one JSON list; see `read_list`."""

    def __init__(self, file: io.TextIOWrapper, path: Path, longest: int) -> None:
        self._file, self._path, self._longest = file, path, longest
        # The text of the last read, the position within it, and the line number of its start.
        self._text, self._at, self._line = "", 0, 1
        self._ended = False  # whether the whole file was read

    def __iter__(self) -> Iterator[Any]:
        if self._next() != "[":
            raise self._error("not a JSON list", self._at)
        self._at += 1
        mark = self._next()
        while mark != "]":
            value = self._value()
            if (mark := self._next()) == ",":
                self._at += 1
                if (mark := self._next()) in ("]", ""):
                    raise self._error("not valid JSON (Expecting value)", self._at)
            elif mark != "]":
                raise self._error("not valid JSON (Expecting ',' delimiter)", self._at)
            yield value  # only after the separator behind it was seen
        self._at += 1
        if self._next():
            raise self._error("not valid JSON (Extra data)", self._at)

    def _next(self) -> str:
        """The next character that is no white space; an empty text at the end of the file."""
        while True:
            while self._at < len(self._text):
                if (character := self._text[self._at]) not in " \t\r\n":
                    return character
                self._at += 1
            if self._ended:
                return ""
            self._read(CHUNK)

    def _value(self) -> Any:
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except RecursionError:
                raise self._error("not valid JSON (nested too deeply)", self._at) from None
            except ValueError as error:
                if self._ended or len(self._text) - self._at > self._longest:
                    raise self._wrong(error) from None
            else:
                if (
                    end < len(self._text) or self._ended
                ):  # a number at the end of the text may be cut
                    if end - self._at > self._longest:
                        raise self._error(
                            f"a value longer than {self._longest:,} characters", self._at
                        )
                    self._at = end
                    return value
            self._read(max(CHUNK, len(self._text) - self._at))

    def _wrong(self, error: ValueError) -> BadInput:
        """The error for a value that cannot be decoded."""
        if not self._ended:
            return self._error(
                f"not valid JSON, or a value longer than {self._longest:,} characters", self._at
            )
        place = error.pos if isinstance(error, json.JSONDecodeError) else self._at
        return self._error(f"not valid JSON ({getattr(error, 'msg', str(error)[:200])})", place)

    def _read(self, count: int) -> None:
        self._line += self._text.count("\n", 0, self._at)
        try:
            more = self._file.read(count)
        except UnicodeDecodeError:
            raise self._error("not UTF-8 from here on", self._at) from None
        except UNREADABLE as error:
            raise self._error(f"cannot be read ({unreadable(error)})", self._at) from None
        self._text, self._at, self._ended = self._text[self._at :] + more, 0, not more

    def _error(self, message: str, place: int) -> BadInput:
        return BadInput(
            f"{self._path}:{self._line + self._text.count(chr(10), 0, place)}: {message}"
        )


def parse_json(content: str | bytes, what: str, advice: str = "") -> Any:
    """Parse a JSON value.

    Raises:
        BadInput: the content is no JSON, is not UTF-8 or is nested too deeply.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise BadInput(_line(f"{what} is nested too deeply for JSON", advice)) from None
    except UnicodeDecodeError:
        raise BadInput(_line(f"{what} is not valid JSON (it is not UTF-8)", advice)) from None
    except ValueError as error:  # also integers of thousands of digits
        raise BadInput(_line(f"{what} is not valid JSON ({str(error)[:200]})", advice)) from None


def read_json(path: Path, what: str, advice: str = "", limit: int = MAX_JSON) -> Any:
    """The value of a JSON file; see `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path, limit, what, advice), what, advice)


def read_object(path: Path, what: str, advice: str = "", limit: int = MAX_JSON) -> dict[str, Any]:
    """The object of a JSON file; see `read_json`. Raises BadInput also for any other value."""
    value = read_json(path, what, advice, limit)
    if not isinstance(value, dict):
        raise BadInput(_line(f"{what} is not a JSON object", advice))
    return value


def read_archive(path: Path, what: str, advice: str = "") -> dict[str, bytes]:
    """The contents of the files in a .tar.xz archive, by name, such as "folder/file"; in memory.

    Args:
        path: the archive.
        what, advice: as for `open_file`.

    Raises:
        BadInput: as `read_bytes`; the archive is damaged or unpacks to too many bytes; or an entry
            is no file or folder, has an absolute name or one that leads outside, or comes twice.
    """
    packed = read_bytes(path, MAX_ARCHIVE, what, advice)
    try:
        unpacking = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=UNPACKING_MEMORY)
        content = unpacking.decompress(packed, max_length=MAX_ARCHIVE + 1)
    except (lzma.LZMAError, EOFError) as error:
        raise BadInput(
            _line(f"{what} is no archive that xz has packed, or damaged ({error})", advice)
        ) from None
    if len(content) > MAX_ARCHIVE:
        raise BadInput(_line(f"{what} holds more than {size(MAX_ARCHIVE)}", advice))
    if not unpacking.eof or unpacking.unused_data:
        raise BadInput(_line(f"{what} is cut off, or goes on after its end", advice))
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            return _archived(archive, what, advice)
    except (tarfile.TarError, ValueError, OverflowError, EOFError, OSError) as error:
        raise BadInput(_line(f"{what} is no tar archive, or damaged ({error})", advice)) from None


def _archived(archive: tarfile.TarFile, what: str, advice: str) -> dict[str, bytes]:
    """The contents of an open archive's files by name; see `read_archive`."""
    members: dict[str, bytes] = {}
    for number, member in enumerate(archive):
        name = posixpath.normpath(member.name)
        shown = f"{what}: {printable(member.name):.80}"
        if number == MAX_ARCHIVE_FILES:
            raise BadInput(_line(f"{what} holds more than {MAX_ARCHIVE_FILES:,} files", advice))
        if name.startswith(("/", "../")) or name == ".." or "\0" in name:
            raise BadInput(_line(f"{shown} lies outside the archive", advice))
        if member.isdir():
            continue
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
            raise BadInput(_line(f"{shown} is a link or a device, not a file", advice))
        if name in members:
            raise BadInput(_line(f"{shown} is in the archive twice", advice))
        file = archive.extractfile(member)
        assert file is not None  # of a regular file
        members[name] = file.read()
    return members


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


def _line(message: str, advice: str) -> str:
    return f"{message}; {advice}" if advice else message
