"""Where records lie: in folders, or a sweep's in one archive in place of its folder, inside which a
path goes on, as in `name.tar.xz/cell/record.json`."""

from __future__ import annotations

import glob
import io
import lzma
import os
import posixpath
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from minivllm.bench.records.schema import PathLike
from minivllm.bench.records.storage import RECORD
from minivllm.errors import BadInput
from minivllm.platform import untrusted

DEPTH = 2  # folders from the root of all records to a record
SUFFIX = ".tar.xz"
# archives whose files stay in memory: the one that is read, and the one it is compared with
KEPT_OPEN = 2
MAX_ARCHIVE = 512 * untrusted.MIB  # of an archive, packed and unpacked
MAX_ARCHIVE_FILES = 1 << 17
UNPACKING_MEMORY = 128 * untrusted.MIB  # twice the largest dictionary of `xz -9`


def record_files(paths: PathLike | Iterable[PathLike]) -> list[Path]:
    """Every record.json below the given places, sorted, each once.

    Args:
        paths: a record directory, a sweep's folder or archive, the root of all records, a
            record.json, a glob pattern of any of these, or a list of such.

    Raises:
        BadInput: a place does not exist or a pattern matches nothing.
    """
    files: set[str] = set()
    for place in [paths] if isinstance(paths, (str, Path)) else list(paths):
        path = os.path.expanduser(place)
        matches = [path] if exists(path) else glob.glob(path)
        if not matches:
            raise BadInput(
                f"no such file or folder: {place}; give a folder of records, such as runs/<name>"
            )
        for match in matches:
            files.update(_below(match))
    return [Path(name) for name in sorted(files, key=lambda name: name.split(os.sep))]


def _below(place: str, depth: int = DEPTH) -> Iterator[str]:
    """Each record.json of a folder or an archive, or of those in it; in a record's own folder are
    no others."""
    record = os.path.join(place, RECORD)
    if is_archive(place):
        yield from _archived(place)
    elif os.path.lexists(record) or exists(record):
        yield os.path.normpath(record)
    elif exists(place) and not os.path.isdir(place):
        yield os.path.normpath(place)
    elif depth:
        folders: list[str] = []
        # hidden ones are being written, or replaced
        with suppress(OSError), os.scandir(place) as entries:
            folders = [
                entry.path
                for entry in entries
                if entry.name[0] != "." and (entry.is_dir() or is_archive(entry.path))
            ]
        for folder in folders:
            yield from _below(folder, depth - 1)


def _archived(place: str) -> list[str]:
    """Each record.json of an archive; the archive itself where it cannot be read, so that
    reading it raises the reason."""
    try:
        return names(os.path.normpath(place), RECORD)
    except BadInput:
        return [os.path.normpath(place)]


def is_archive(place: PathLike) -> bool:
    """Whether this is an archive, by its name."""
    return os.fspath(place).endswith(SUFFIX) and os.path.isfile(place)


def split(path: PathLike) -> tuple[str, str] | None:
    """The archive that a path leads into and the name in it, "" of the archive itself; None for a
    path on the disk."""
    head, suffix, name = os.fspath(path).partition(SUFFIX)
    if not suffix or (name and name[0] not in (os.sep, "/")) or not os.path.isfile(head + SUFFIX):
        return None
    return head + SUFFIX, name[1:].replace(os.sep, "/")


def _files(archive: str) -> dict[str, bytes]:
    """The files of an archive by their names in it. Raises BadInput as `read_archive`."""
    try:
        status = os.stat(archive)
    except OSError as error:
        raise BadInput(f"{archive} cannot be read: {error.strerror or error}") from None
    return _unpacked(archive, status.st_mtime_ns, status.st_size)


@lru_cache(KEPT_OPEN)
def _unpacked(archive: str, changed_ns: int, size: int) -> dict[str, bytes]:
    return read_archive(Path(archive), archive)


def read_archive(path: Path, what: str) -> dict[str, bytes]:
    """The contents of the files in a .tar.xz archive, by name, such as "folder/file"; in memory.

    Args:
        path: the archive.
        what: how messages begin.

    Raises:
        BadInput: as `untrusted.read_bytes`; the archive is damaged or unpacks to too many bytes; or
            an entry is no file or folder, has an absolute name or one that leads outside, or comes
            twice.
    """
    packed = untrusted.read_bytes(path, MAX_ARCHIVE, what)
    try:
        unpacking = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=UNPACKING_MEMORY)
        content = unpacking.decompress(packed, max_length=MAX_ARCHIVE + 1)
    except (lzma.LZMAError, EOFError) as error:
        raise BadInput(f"{what} is no archive that xz has packed, or damaged ({error})") from None
    if len(content) > MAX_ARCHIVE:
        raise BadInput(f"{what} holds more than {untrusted.size(MAX_ARCHIVE)}")
    if not unpacking.eof or unpacking.unused_data:
        raise BadInput(f"{what} is cut off, or goes on after its end")
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            return _members(archive, what)
    except (tarfile.TarError, ValueError, OverflowError, EOFError, OSError) as error:
        raise BadInput(f"{what} is no tar archive, or damaged ({error})") from None


def _members(archive: tarfile.TarFile, what: str) -> dict[str, bytes]:
    """The contents of an open archive's files by name; see `read_archive`."""
    members: dict[str, bytes] = {}
    for number, member in enumerate(archive):
        name = posixpath.normpath(member.name)
        shown = f"{what}: {untrusted.printable(member.name):.80}"
        if number == MAX_ARCHIVE_FILES:
            raise BadInput(f"{what} holds more than {MAX_ARCHIVE_FILES:,} files")
        if name.startswith(("/", "../")) or name == ".." or "\0" in name:
            raise BadInput(f"{shown} lies outside the archive")
        if member.isdir():
            continue
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
            raise BadInput(f"{shown} is a link or a device, not a file")
        if name in members:
            raise BadInput(f"{shown} is in the archive twice")
        file = archive.extractfile(member)
        assert file is not None  # of a regular file
        members[name] = file.read()
    return members


def names(archive: PathLike, file: str) -> list[str]:
    """The paths of all files of a name in an archive, those in hidden folders left out.

    Raises:
        BadInput: the archive cannot be read.
    """
    paths = (name.split("/") for name in _files(os.fspath(archive)))
    return [
        os.path.join(archive, *parts)
        for parts in sorted(paths)
        if parts[-1] == file and not any(part.startswith(".") for part in parts)
    ]


def exists(path: PathLike) -> bool:
    """Whether there is a file or a folder, be it in an archive; in one that cannot be read is
    none."""
    if (inside := split(path)) is None:
        return os.path.exists(path)
    archive, name = inside
    try:
        files, folder = _files(archive), f"{name}/"
        return not name or name in files or any(file.startswith(folder) for file in files)
    except BadInput:
        return False


def holder(path: Path) -> Path | None:
    """The file on the disk that has the content of a file: itself, or its archive; None where there
    is none."""
    inside = split(path)
    if inside is None:
        return path if path.is_file() else None
    archive, name = inside
    return Path(archive) if name in _files(archive) else None


def open_file(path: Path, what: str) -> io.BufferedReader | io.BytesIO:
    """Open a file for reading, be it in an archive.

    Raises:
        BadInput: as `untrusted.open_file` and `read_archive`.
    """
    if (inside := split(path)) is None:
        return untrusted.open_file(path, what)
    archive, name = inside
    content = _files(archive).get(name)
    if content is None:
        raise BadInput(f"{what}: there is no such file in the archive")
    return io.BytesIO(content)


def read_bytes(path: Path, limit: int, what: str) -> bytes:
    """A file's whole content, be it in an archive. Raises BadInput as `open_file`; or the file is
    larger than the limit."""
    with open_file(path, what) as file:
        return untrusted.content_of(file, limit, what)
