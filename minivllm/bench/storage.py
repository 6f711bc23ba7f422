"""Files that are either whole or absent."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from minivllm.bench.record import Record, portable
from minivllm.redaction import blank, clean, hide
from minivllm.untrusted import printable

RECORD = "record.json"
KERNELS = "kernels.json"  # the record of task=kernels, one a run
ASIDE = ".replaced-"  # before the name of a record directory that is being measured again
HANDOVER = ".record.part"  # a worker's finished record, before the supervisor completes it
REQUESTS = "requests.parquet"
STEPS = "steps.parquet"
TELEMETRY = "telemetry.parquet"
TABLES = (REQUESTS, STEPS, TELEMETRY)  # whose digests the record has
CONFIG = "config.yaml"
LOG = "run.log"
TRACE = "trace.json.gz"  # of runtime.profile
OPERATIONS = "trace.md"  # the longest ones in it
IDLE = "trace_idle.json"  # how long the device idled in it; of a GPU alone


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
    """Write JSON atomically and without secrets; not-a-number and infinity become null, since JSON has neither."""
    write_text(path, json.dumps(clean(_finite(value)), indent=1, default=str) + "\n")


def private(path: Path) -> Path:
    """Where the private copy of a file is, while there is one."""
    return path.with_name(f".{path.name}.private")


@contextmanager
def private_json(path: Path, value: Any) -> Iterator[None]:
    """While it is open there is a JSON file as it is, secrets too, that nobody else may read; None: there is none."""
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


def prepare(directory: Path, config: dict[str, Any]) -> None:
    """Make an empty record directory that holds the resolved configuration alone.

    A finished record that is to be measured again is put aside until the new one is there.
    """
    recover(directory)
    if (directory / RECORD).exists():
        directory.rename(_aside(directory))
    remove(directory)
    directory.mkdir(parents=True)
    write_yaml(directory / CONFIG, portable(config))


def _aside(directory: Path) -> Path:
    return directory.with_name(f"{ASIDE}{directory.name}")


def recover(directory: Path) -> None:
    """Put back a finished record that was to be replaced by a measurement that did not end."""
    aside = _aside(directory)
    if not aside.exists():
        return
    if (directory / RECORD).exists():
        remove(aside)
    else:
        remove(directory)
        aside.rename(directory)


def standing(directory: Path) -> Path:
    """Where the record is that `recover` would leave: in its place, or still put aside."""
    aside = _aside(directory)
    return aside if aside.exists() and not (directory / RECORD).exists() else directory


def remove(directory: Path) -> None:
    """Remove a record directory; the record goes first, so that none is ever left without its files."""
    with suppress(OSError):
        (directory / RECORD).unlink()
    shutil.rmtree(directory, ignore_errors=True)


def discard_trace(directory: Path) -> None:
    """Remove the files of a trace, and what an export that did not end has left."""
    for path in (*(directory / name for name in (TRACE, OPERATIONS, IDLE)), *directory.glob(f".{TRACE}.*")):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def write_record(
    directory: Path,
    record: Record,
    requests: Sequence[dict[str, Any]] | None = None,
    steps: Sequence[dict[str, Any]] | None = None,
    telemetry: Sequence[dict[str, Any]] | None = None,
    config: dict[str, Any] | None = None,
) -> None:
    """Write the files of one measurement, record.json last: it exists only when the rest does.

    Args:
        directory: the record directory.
        record: what goes into record.json.
        requests, steps, telemetry: rows; None leaves a file that is there as it is.
        config: the resolved configuration; None leaves config.yaml as it is.

    Raises:
        OSError: the disk is full, say. Nothing is torn then, and record.json is not there.
    """
    if config is not None:
        write_yaml(directory / CONFIG, portable(config))
    for name, rows in ((REQUESTS, requests), (STEPS, steps), (TELEMETRY, telemetry)):
        if rows is not None:
            write_parquet(directory / name, rows)
    finish(directory, record.to_dict())


def hand_over(directory: Path, record: Record) -> None:
    """Write a worker's record for the supervisor, without secrets, and with numbers that are not finite: it judges them."""
    write_text(directory / HANDOVER, json.dumps(clean(record.to_dict()), default=str))


def finish(directory: Path, record: dict[str, Any]) -> None:
    """Write record.json, the last of a measurement's files, with the digests of its tables, and remove what it takes the place
    of."""
    write_json(directory / RECORD, {**record, "digests": digests(directory)})
    with suppress(OSError):
        (directory / HANDOVER).unlink()
    remove(_aside(directory))


def digests(directory: Path) -> dict[str, str]:
    """SHA-256 of each table in a record directory, by file name; of those that are there."""
    found = {}
    for name in TABLES:
        with suppress(FileNotFoundError), (directory / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def hide_in_log(path: Path) -> None:
    """Overwrite secrets in a log where they lie: native code writes to it past everything that hides them.

    Whoever still has the log open goes on behind it.
    """
    with suppress(OSError), path.open("r+b") as file:
        while line := file.readline():
            if (hidden := blank(line)) != line:
                file.seek(-len(line), os.SEEK_CUR)
                file.write(hidden)


def log_tail(path: Path, lines: int = 30, limit: int = 8000) -> str:
    """The last lines of a log, at most `limit` characters that are safe to show; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 4 * limit))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(printable(hide(text)).splitlines()[-lines:])[-limit:]
