"""Files that are either whole or absent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from minivllm.bench.records.record import Record, portable
from minivllm.platform.files import sha256, write_json, write_parquet, write_text, write_yaml
from minivllm.redaction import clean

RECORD = "record.json"
KERNELS = "kernels.json"  # the record of task=kernels, one a run
ASIDE = ".replaced-"  # before the name of a record directory that is being measured again
HANDOVER = ".record.part"  # a worker's finished record, before the supervisor completes it
REQUESTS = "requests.parquet"
STEPS = "steps.parquet"
TELEMETRY = "telemetry.parquet"
EVENTS = "events.jsonl.zst"  # of measure.events
TABLES = (REQUESTS, STEPS, TELEMETRY)  # whose digests the record has
CONFIG = "config.yaml"
LOG = "run.log"
TRACE = "trace.json.gz"  # of runtime.profile
OPERATIONS = "trace.md"  # the longest ones in it
IDLE = "trace_idle.json"  # how long the device idled in it; of a GPU alone


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
    """Put back a finished record that was to be replaced by a measurement that did not end, and
    remove what its writer was ended before it could remove."""
    aside = _aside(directory)
    if (directory / RECORD).exists():
        (directory / HANDOVER).unlink(missing_ok=True)
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
    """Remove a record directory; the record goes first, so that none is ever left without its
    files."""
    with suppress(OSError):
        (directory / RECORD).unlink()
    shutil.rmtree(directory, ignore_errors=True)


def discard_trace(directory: Path) -> None:
    """Remove the files of a trace, and what an export that did not end has left."""
    for path in (
        *(directory / name for name in (TRACE, OPERATIONS, IDLE)),
        *directory.glob(f".{TRACE}.*"),
    ):
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
    """Write a worker's record for the supervisor, without secrets, and with numbers that are not
    finite: it judges them."""
    write_text(directory / HANDOVER, json.dumps(clean(record.to_dict()), default=str))


def finish(directory: Path, record: dict[str, Any]) -> None:
    """Write record.json, the last of a measurement's files, with the digests of its tables, and
    remove what it takes the place of."""
    write_json(directory / RECORD, {**record, "digests": digests(directory)})
    with suppress(OSError):
        (directory / HANDOVER).unlink()
    remove(_aside(directory))


def digests(directory: Path) -> dict[str, str]:
    """SHA-256 of each table in a record directory, and of its events, by file name; of those that
    are there."""
    hashes = {}
    for name in (*TABLES, EVENTS):
        with suppress(FileNotFoundError):
            hashes[name] = sha256(directory / name)
    return hashes
