"""Reading what comes from outside the program: with a limit of size, and never a pipe or a device.
Torch-free.

Whatever a user, a checkpoint, a record or a server brings is read through here, so that the limits
and the words of their errors exist once.
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

MIB = 1 << 20
MAX_JSON = 64 * MIB  # a configuration, an index, a record
MAX_TOKENIZER = 256 * MIB  # the largest known tokenizer.json has 33 MiB
MAX_TEXT = 1 << 30  # a file of prompts
MAX_LINE = 16 * MIB  # of a file that is read line by line, or value by value
MAX_ARCHIVE = 512 * MIB  # of an archive, and of all files in it
MAX_ARCHIVE_FILES = 1 << 17
UNPACKING_MEMORY = 128 * MIB  # which the largest dictionary of `xz -9` is half of
CHUNK = 1 << 18  # characters that a list is read by
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # that some editors begin UTF-8 with
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?"
    r"|[PX^_][^\x1b]*(?:\x1b\\)?|[@-Z\\-_])"
)
_DECODER = json.JSONDecoder()
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def place(path: str | os.PathLike[str], what: str, advice: str = "") -> Path:
    """A path as a user writes it, `~` being a home folder; there need not be anything.

    Args:
        path: of a file or a folder.
        what: how the message begins, such as "model.path=DIR".
        advice: what to do where it cannot be looked at.

    Raises:
        BadInput: nothing can have that name, or it may not be looked at.
    """
    expanded = Path(os.path.expanduser(path))  # of a user that is not known the `~` stays
    try:
        os.stat(expanded)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise BadInput(_line(f"{what} cannot be read: {reason}", advice)) from None
    return expanded


def named(path: Path) -> bool:
    """Whether a folder has a file of that name, of which also a link that leads nowhere is one: it
    is refused when it is read, and not taken for a file that was never meant to be there."""
    return os.path.lexists(path)


def open_file(path: Path, what: str, advice: str = "") -> io.BufferedReader:
    """Open a regular file for reading; a pipe or a device, which may never end, is refused without
    waiting for it.

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
    """A file's whole content.

    Args:
        path: the file.
        limit: most bytes that it may have.
        what, advice: as for `open_file`.

    Raises:
        BadInput: as `open_file`; or the file is larger.
    """
    with open_file(path, what, advice) as file:
        try:
            # room is made for what is asked of `read`
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


def read_text(path: Path, limit: int, what: str, advice: str = "") -> str:
    """A UTF-8 file's whole content; see `read_bytes` and `decode`."""
    return decode(read_bytes(path, limit, what, advice), path, advice=advice)


def read_lines(path: Path, what: str, advice: str = "", longest: int = MAX_LINE) -> Iterator[bytes]:
    """A file's lines one after the other, without their ends (LF, CRLF); the file is not held in
    memory.

    Args:
        path: the file.
        what, advice: as for `open_file`.
        longest: most bytes that a line may have.

    Raises:
        BadInput: as `open_file`; or a line is longer, with its number.
    """
    with open_file(path, what, advice) as file:
        for number in itertools.count(1):
            try:
                line = file.readline(longest + 2)
            except OSError as error:
                raise BadInput(
                    _line(f"{what} cannot be read: {error.strerror or error}", advice)
                ) from None
            if not line:
                return
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            if len(line) > longest:
                raise BadInput(_line(f"{what}, line {number}: longer than {size(longest)}", advice))
            yield line


def decode(content: bytes, path: Path, line: int = 1, advice: str = "") -> str:
    """Text of a UTF-8 file without its byte-order mark.

    Args:
        content: the file's bytes from the beginning of a line on.
        path: the file, for the message.
        line: that line's number.
        advice: what to do where it is other bytes.

    Raises:
        BadInput: the content is not UTF-8; the message begins with the file and the line's number.
    """
    try:
        return (content.removeprefix(BYTE_ORDER_MARK) if line == 1 else content).decode("utf-8")
    except UnicodeDecodeError as error:
        line += error.object.count(b"\n", 0, error.start)
        raise BadInput(
            _line(f"{path}:{line}: not UTF-8, so it cannot be read as text", advice)
        ) from None


def read_text_lines(path: Path, what: str, advice: str = "") -> Iterator[str]:
    """Lines of a UTF-8 file one after the other; see `read_lines` and `decode`."""
    for number, line in enumerate(read_lines(path, what, advice), start=1):
        yield decode(line, path, number)


def read_list(path: Path, what: str, advice: str = "", longest: int = MAX_LINE) -> Iterator[Any]:
    """Values of a file that holds one JSON list, one after the other; the file is not held in
    memory.

    Args:
        path: the file.
        what, advice: as for `open_file`.
        longest: most characters that a value may have.

    Raises:
        BadInput: as `open_file`; or the file is no JSON list or a value is longer. These messages
            begin with the file and the number of the line.
    """
    with io.TextIOWrapper(open_file(path, what, advice), encoding="utf-8-sig", newline="") as file:
        yield from _ListReader(file, path, longest)


class _ListReader:
    """Values of one JSON list; see `read_list`."""

    def __init__(self, file: io.TextIOWrapper, path: Path, longest: int) -> None:
        self._file, self._path, self._longest = file, path, longest
        # What was read last, how much of it is used, the line it begins in.
        self._text, self._at, self._line = "", 0, 1
        self._ended = False  # all of the file was read

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
            yield value  # what follows it is known to be there
        self._at += 1
        if self._next():
            raise self._error("not valid JSON (Extra data)", self._at)

    def _next(self) -> str:
        """The next character that is no space; nothing at the end."""
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
                if end < len(self._text) or self._ended:  # else a number may go on
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
        except OSError as error:
            raise self._error(f"cannot be read ({error.strerror or error})", self._at) from None
        self._text, self._at, self._ended = self._text[self._at :] + more, 0, not more

    def _error(self, message: str, place: int) -> BadInput:
        return BadInput(
            f"{self._path}:{self._line + self._text.count(chr(10), 0, place)}: {message}"
        )


def parse_json(content: str | bytes, what: str, advice: str = "") -> Any:
    """A JSON value.

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
    """A JSON file's value; see `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path, limit, what, advice), what, advice)


def read_object(path: Path, what: str, advice: str = "", limit: int = MAX_JSON) -> dict[str, Any]:
    """A JSON file that holds an object; see `read_json`. Raises BadInput for any other value,
    too."""
    value = read_json(path, what, advice, limit)
    if not isinstance(value, dict):
        raise BadInput(_line(f"{what} is not a JSON object", advice))
    return value


def read_archive(path: Path, what: str, advice: str = "") -> dict[str, bytes]:
    """The files of a tar archive that xz has packed, by their names in it, such as "folder/file";
    nothing is written.

    Args:
        path: the archive.
        what, advice: as for `open_file`.

    Raises:
        BadInput: as `read_bytes`; it is damaged or too large once unpacked; or it holds something
            else than files and folders below it, such as links, devices, an absolute name, or a
            name twice.
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
    """See `read_archive`."""
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
    """Text that a terminal may show: escape sequences, control characters and changes of direction
    are left out; newlines and tabs stay."""
    return text if text.isprintable() else _CONTROLS.sub("", _ESCAPES.sub("", text))


def size(count: int) -> str:
    """A number of bytes in the largest unit that it reaches: "64 MiB"."""
    for unit, name in ((1 << 30, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} bytes"


def _line(message: str, advice: str) -> str:
    return f"{message}; {advice}" if advice else message
