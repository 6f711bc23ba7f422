"""Text files of any size from outside, read in constant memory: lines, or values of a JSON list,
also where gzip has packed them. Torch-free."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from minivllm.errors import BadInput
from minivllm.platform.untrusted import MIB, decode, open_file, size, with_advice

GZIP = b"\x1f\x8b"  # how such a file begins
MAX_LINE = 16 * MIB  # bytes of one line, or characters of one value
CHUNK = 1 << 18  # characters that one read of a list takes
_DECODER = json.JSONDecoder()
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


def read_begin(path: Path, what: str, advice: str = "") -> bytes:
    """The first bytes of a file, at most `CHUNK`; gzip's files are unpacked. Arguments and errors
    are those of `open_file`; a damaged file is a BadInput too."""
    with unpacked(open_file(path, what, advice)) as file:
        try:
            return file.read(CHUNK)
        except UNREADABLE as error:
            raise BadInput(
                with_advice(f"{what} cannot be read: {unreadable(error)}", advice)
            ) from None


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
                raise BadInput(with_advice(f"{what} cannot be read: {reason}", advice)) from None
            if not line:
                return
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            if len(line) > longest:
                raise BadInput(
                    with_advice(f"{what}, line {number}: longer than {size(longest)}", advice)
                )
            yield line


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
