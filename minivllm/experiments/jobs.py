"""The jobs of a sweep: the file that tells each what to do, and how a job ends that has no result.

A job may begin long after the command that made it has ended, on another machine. So each has a
file of its own, which nobody changes, and which only this user may read: it holds the secrets that
launchers must not store.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from minivllm.bench.device_lock import locks
from minivllm.bench.records.measurement import Measurement
from minivllm.errors import BadInput
from minivllm.platform import files
from minivllm.platform.untrusted import MAX_TEXT, read_object

FOLDER = ".jobs"  # of a sweep's folder
BEGUN = ".begun"  # of a file beside a job's, once it has read its own
QUEUED = ".queued"  # of one beside it, where the job goes on without its command
POLL_S = 1.0
ASK_S = 30.0  # after which, and how often, the queue is queried for a job
# States of Slurm's in which a job goes on, though submitit takes them for its end.
PAUSED = ("CONFIGURING", "REQUEUE_HOLD", "RESIZING", "SIGNALING", "STOPPED", "SUSPENDED")
# Those of a job that has ended; "" is that of one whose end was long ago.
ENDED = (
    *("", "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "TIMEOUT"),
)
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

    @classmethod
    def of(cls, job_ids: Sequence[str]) -> JobsContinue:
        """Of jobs of Slurm, or elements of arrays."""
        arrays = dict.fromkeys(name.partition("_")[0] for name in job_ids)
        return cls(
            f"jobs {', '.join(job_ids)} go on and write their records; scancel "
            f"{' '.join(arrays)} ends them"
        )


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
        contents: what each job gets, as JSON.

    Raises:
        OSError: a file cannot be written.
    """
    place = folder.absolute() / FOLDER
    if contents:
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
    """What a job gets; it has begun from here on.

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
    locked; its jobs are gone with it, but for queued ones. One may have ended, and its file with
    it, before it was marked."""
    place = folder / FOLDER
    marked = (path.with_suffix(".json") for path in place.glob(f"*{QUEUED}"))
    queued = {path.stem for path in marked if path.exists()}
    with suppress(OSError):
        for path in list(place.iterdir()):
            if path.stem not in queued:
                path.unlink()
        place.rmdir()  # fails on purpose unless empty


def _file_of(overrides: Sequence[str]) -> Path | None:
    """The file of the job of these overrides."""
    for text in overrides:
        if text.startswith("sweep.plan="):
            return Path(text.partition("=")[2].strip("'"))
    return None


def takes_device(overrides: Sequence[str]) -> bool:
    """Whether the job of these overrides measures on a device, which only one job at a time
    does.

    Raises:
        BadInput: its file cannot be read.
    """
    if (path := _file_of(overrides)) is None:
        return False
    job = read_object(path, f"sweep.plan={path}", limit=MAX_TEXT)
    return any(locks(measurement["config"]) for measurement in job.get("measurements", ()))


def mark_queued(overrides: Sequence[str], job: Any) -> None:
    """Note that the job of these overrides goes on if its command ends: its file stays.

    Args:
        job: as submitit knows it.
    """
    if (path := _file_of(overrides)) is not None:
        known = {"job_id": job.job_id, "folder": str(job.paths.folder)}
        files.write_text(path.with_suffix(QUEUED), json.dumps(known))


@dataclass(frozen=True)
class QueuedJob:
    """A job of Slurm that an earlier command has left in its queue."""

    path: Path  # of its file
    job_id: str
    folder: str  # submitit's for it
    run_ids: frozenset[str]  # of its measurements

    def wait(self) -> None:
        """Return when it has ended."""
        from submitit import SlurmJob

        wait_for(SlurmJob(self.folder, self.job_id))


def queued_jobs(folder: Path) -> list[QueuedJob]:
    """The jobs that go on from an earlier command of a sweep, by its folder; empty where submitit,
    which asks after them, is not installed."""
    found = []
    for marker in (folder / FOLDER).glob(f"*{QUEUED}") if find_spec("submitit") else ():
        path = marker.with_suffix(".json")
        with suppress(BadInput, KeyError, TypeError):
            known = read_object(marker, str(marker))
            job = read_object(path, str(path), limit=MAX_TEXT)
            run_ids = frozenset(str(item["run_id"]) for item in job["measurements"])
            found.append(QueuedJob(path, str(known["job_id"]), str(known["folder"]), run_ids))
    return found


def await_queued(jobs: Sequence[QueuedJob]) -> None:
    """Wait for jobs of an earlier command, and remove their files.

    Raises:
        JobsContinue: Ctrl-C.
    """
    print(f"waiting for jobs of an earlier command: {', '.join(job.job_id for job in jobs)}")
    left = list(jobs)
    try:
        while left:
            left[0].wait()
            discard(left.pop(0).path)
    except KeyboardInterrupt:
        raise JobsContinue.of([job.job_id for job in left]) from None


def wait_for(job: Any) -> None:
    """Wait until a job of submitit has ended.

    submitit takes one that is suspended for ended. And it waits for ever for one that accounting
    does not know, or no more, as an element of an array that was cancelled before it began: so
    Slurm's queue is queried, too.
    """
    ask_s, ended = time.monotonic() + ASK_S, False
    while True:
        if job.done():
            if job.paths.result_pickle.exists() or job.state.partition(" ")[0] not in PAUSED:
                return
            job.watcher.clear()  # else the state stays what it is
        elif time.monotonic() > ask_s:
            before, ended = ended, queue_state(job) in ENDED
            if ended and before:  # with time for accounting, and for a result on a shared disk
                return
            job.get_info(mode="force")
            ask_s = time.monotonic() + ASK_S
        time.sleep(POLL_S)


def queue_state(job: Any) -> str:
    """The state of a job by Slurm's queue, which keeps it for some minutes after its end; "" where
    the queue does not have it, UNKNOWN of a job that is not Slurm's or where nobody answers."""
    from submitit import SlurmJob

    if not isinstance(job, SlurmJob):
        return "UNKNOWN"
    command = ["squeue", "-h", "-r", "-t", "all", "-o", "%T", "-j", job.job_id]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return "UNKNOWN"
    if done.returncode and "Invalid job id" not in done.stderr:
        return "UNKNOWN"
    return done.stdout.strip()


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
