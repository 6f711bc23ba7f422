"""The jobs of a sweep: the file that tells each what to do, and how a job ends that has no result.

A job may begin long after the command that made it has ended, on another machine. So each has a
file of its own, which nobody changes, and which only this user may read: it holds the secrets that
launchers must not store.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.bench.records.measurement import Measurement
from minivllm.errors import BadInput
from minivllm.platform import files
from minivllm.platform.untrusted import MAX_TEXT, read_object

FOLDER = ".jobs"  # of a sweep's folder
BEGUN = ".begun"  # of a file beside a job's, once it has read its own
QUEUED = ".queued"  # of one beside it, where the job goes on without its command
STATUSES = {"TIMEOUT": "timeout", "OUT_OF_MEMORY": "oom"}  # of a record, by a scheduler's state


class LostJob(Exception):
    """A job that ended without a result, for a reason that its scheduler knows.

    Args:
        state: the scheduler's word for it, such as TIMEOUT, CANCELLED or NODE_FAIL.
        message: one line.
        tail: the end of the job's log.
    """

    def __init__(self, state: str, message: str, tail: str = "") -> None:
        super().__init__(message)
        self.state = state
        self.tail = tail


class JobsContinue(KeyboardInterrupt):
    """The command was interrupted, and its jobs go on without it.

    Args:
        line: which jobs, and how they are cancelled.
    """


@dataclass(frozen=True)
class FailedJob:
    """In place of Hydra's JobReturn, of a job that has none."""

    error: Exception

    @property
    def return_value(self) -> Any:
        """Raises the error, as a JobReturn does."""
        raise self.error


@contextmanager
def job_files(folder: Path, contents: Sequence[Any]) -> Iterator[list[Path]]:
    """A file for each job; they are there until the jobs have ended, or each removes its own.

    Args:
        folder: of the sweep; receives a folder for the files.
        contents: what each job is told, as JSON.

    Raises:
        OSError: a file cannot be written.
    """
    place = folder.absolute() / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    paths = [place / f"{secrets.token_hex(8)}.json" for _ in contents]
    kept = False
    try:
        for path, content in zip(paths, contents, strict=True):
            files.write_private_json(path, content)
        yield paths
    except JobsContinue:
        kept = True
        raise
    finally:
        if not kept:
            for path in paths:
                discard(path)


def read_job(path: Path) -> dict[str, Any]:
    """What a job is told; it has begun from here on.

    Raises:
        BadInput: the file cannot be read.
    """
    content = read_object(path, f"sweep.plan={path}", limit=MAX_TEXT)
    with suppress(OSError):
        path.with_suffix(BEGUN).touch()
    return content


def read_measurements(path: Path) -> tuple[list[Measurement], int, int]:
    """The measurements of a job that measures, how many the jobs before it have, and how many all.

    Raises:
        BadInput: the file cannot be read, or is of another kind.
    """
    content = read_job(path)
    try:
        measurements = [Measurement.from_dict(item) for item in content["measurements"]]
        return measurements, int(content["before"]), int(content["total"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"sweep.plan={path} is not a job that measures ({error})") from error


def discard_left(folder: Path) -> None:
    """Remove the files that a killed command has left in a sweep's folder, which this process has
    locked; its jobs are gone with it, but for queued ones."""
    place = folder / FOLDER
    queued = {path.stem for path in place.glob(f"*{QUEUED}")}
    with suppress(OSError):
        for path in list(place.iterdir()):
            if path.stem not in queued:
                path.unlink()
        place.rmdir()  # fails on purpose unless empty


def mark_queued(overrides: Sequence[str]) -> None:
    """Note that the job of these overrides goes on if its command ends: its file stays."""
    for text in overrides:
        if text.startswith("sweep.plan="):
            path = Path(text.partition("=")[2].strip("'"))
            path.with_suffix(QUEUED).touch()


def has_begun(path: Path) -> bool:
    """Whether a job has read its file."""
    return path.with_suffix(BEGUN).exists()


def go_to(folder: str) -> None:
    """Change to the folder of the sweep's command, which relative paths refer to; a launcher may
    start its jobs in another one.

    Raises:
        BadInput: this host does not have it.
    """
    try:
        os.chdir(folder)
    except OSError as error:
        raise BadInput(
            f"{socket.gethostname()} has no folder {folder} ({error.strerror}): jobs need the "
            "folder that the sweep was started in, and its runs_dir, under the same path"
        ) from None


def discard(path: Path) -> None:
    """Remove a job's files, and the folder with the last of them."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        for suffix in (BEGUN, QUEUED):
            path.with_suffix(suffix).unlink(missing_ok=True)
        path.parent.rmdir()  # fails on purpose unless empty


def reason(error: Exception) -> tuple[str, str, str]:
    """Of a job's failure: the status of its records, its kind, and one line."""
    lines = str(error).strip().splitlines()
    line = lines[0] if lines else "it gave no reason"
    if isinstance(error, LostJob):
        return STATUSES.get(error.state, "crashed"), error.state, line
    status = "invalid" if isinstance(error, BadInput) else "crashed"
    return status, type(error).__name__, line
