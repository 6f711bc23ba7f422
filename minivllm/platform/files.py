"""Files that are either whole or absent."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from minivllm.platform.untrusted import printable
from minivllm.redaction import blank, clean, hide


def atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, sync it, and rename it over `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        write(temporary)
        os.fchmod(descriptor, 0o644)  # mkstemp makes private files; records may be shared
        os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    finally:
        os.close(descriptor)
    with suppress(OSError):  # the rename itself survives a power cut only once the folder is synced
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    atomically(path, lambda temporary: _write(temporary, text))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically and without secrets; not-a-number and infinity become null, since JSON
    has neither."""
    write_text(path, json.dumps(clean(_finite(value)), indent=1, default=str) + "\n")


def private(path: Path) -> Path:
    """Where the private copy of a file is, while there is one."""
    return path.with_name(f".{path.name}.private")


@contextmanager
def private_json(path: Path, value: Any) -> Iterator[None]:
    """While it is open there is a JSON file as it is, secrets too, that nobody else may read; None:
    there is none."""
    path.unlink(missing_ok=True)  # of a process that was killed
    try:
        if value is not None:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(value, file, default=str)
        yield
    finally:
        path.unlink(missing_ok=True)


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

    write_text(path, yaml.safe_dump(clean(value), sort_keys=False, allow_unicode=True))


def as_table(rows: Sequence[dict[str, Any]]) -> Any:
    """Rows as a pyarrow table: a dictionary a row; a column that a row lacks is null there."""
    import pyarrow

    names = list(dict.fromkeys(name for row in rows for name in row))
    return pyarrow.table({name: [row.get(name) for row in rows] for name in names})


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
    """Overwrite secrets in a log where they lie: native code writes to it past everything that
    hides them.

    Whoever still has the log open goes on behind it.
    """
    with suppress(OSError), path.open("r+b") as file:
        while line := file.readline():
            if (hidden := blank(line)) != line:
                file.seek(-len(line), os.SEEK_CUR)
                file.write(hidden)


def log_tail(path: Path, lines: int = 30, limit: int = 8000) -> str:
    """The last lines of a log, at most `limit` characters that are safe to show; empty where there
    is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 4 * limit))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(printable(hide(text)).splitlines()[-lines:])[-limit:]
