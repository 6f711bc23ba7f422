"""Writing of files so that each is either whole or absent, and reading of logs."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from minivllm.platform.untrusted import printable
from minivllm.redaction import blank, clean, hide


def atomically(
    path: Path, write: Callable[[Path], None], durable: bool = True, mode: int = 0o644
) -> None:
    """Let `write` fill a temporary file beside `path`, sync it, and rename it over `path`.

    Args:
        path: of the file.
        write: fills the temporary file.
        durable: whether the file must survive a power cut. Syncing waits for the disk; without it,
            a reader has to check the content.
        mode: permissions; records may be shared.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        write(temporary)
        os.fchmod(descriptor, mode)  # mkstemp makes private files
        if durable:
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    finally:
        os.close(descriptor)
    if not durable:
        return
    with suppress(OSError):  # the rename survives a power cut only after a sync of the folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content. Raises OSError where it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    """The user's cache folder: $XDG_CACHE_HOME/minivllm or ~/.cache/minivllm."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minivllm"


def write_bytes(path: Path, content: bytes, durable: bool = True) -> None:
    """Write a file atomically; see there."""
    atomically(path, lambda temporary: _write(temporary, content), durable)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically and without secrets; not-a-number and infinity become null, since JSON
    has neither."""
    write_text(path, json.dumps(clean(_finite(value)), indent=1, default=str) + "\n")


def write_private_json(path: Path, value: Any) -> None:
    """Write JSON atomically with its secrets; only this user may read the file."""
    content = json.dumps(value, default=str).encode()
    atomically(path, lambda temporary: _write(temporary, content), mode=0o600)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def write_yaml(path: Path, value: Any) -> None:
    """Write YAML atomically and without secrets."""
    import yaml

    cleaned = clean(value)
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # some times faster where it is built
    try:
        text = yaml.dump(cleaned, Dumper=dumper, sort_keys=False, allow_unicode=True)
    except UnicodeEncodeError:  # bytes of a path that are no UTF-8, which only this one can escape
        text = yaml.dump(cleaned, Dumper=yaml.SafeDumper, sort_keys=False, allow_unicode=True)
    write_text(path, text)


def as_table(rows: Sequence[dict[str, Any]]) -> Any:
    """A pyarrow table of rows, each a dictionary; a key that a row lacks is null."""
    import pyarrow

    from minivllm.platform.columns import column

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [column([row.get(name) for row in rows]) for name in names]
    return pyarrow.Table.from_arrays(columns, names=names)


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a table atomically; see `as_table`."""
    import pyarrow.parquet

    table = as_table(rows)
    small = {
        "compression": "zstd",
        "compression_level": 15,
        "use_dictionary": False,
        "write_statistics": False,
    }
    atomically(path, lambda temporary: pyarrow.parquet.write_table(table, temporary, **small))


def hide_in_log(path: Path) -> None:
    """Overwrite the secrets in a log in place, since native code writes to it unfiltered.

    A process that has the log open can go on appending.
    """
    with suppress(OSError), path.open("r+b") as file:
        while line := file.readline():
            if (hidden := blank(line)) != line:
                file.seek(-len(line), os.SEEK_CUR)
                file.write(hidden)


def log_tail(path: Path, lines: int = 30, limit: int = 8000) -> str:
    """The last lines of a log, without secrets and control characters; empty without a log.

    Args:
        path: of the log.
        lines: most lines.
        limit: most characters.
    """
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 4 * limit))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(printable(hide(text)).splitlines()[-lines:])[-limit:]
