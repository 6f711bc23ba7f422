"""The parent of every measurement: spawns workers, watches them, and completes or writes their
records.

A worker can die in ways that it cannot report, so the parent holds what must not be lost: the
timeout, the memory limit, the telemetry, and the last write of record.json. It never imports torch.
The worker hands over a finished record in a temporary name (`storage.HANDOVER`); the parent adds
what only it knows and renames.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.bench.completion import complete, write_failure
from minivllm.bench.device_lock import device_lock
from minivllm.bench.options import MeasureOptions
from minivllm.bench.records import storage
from minivllm.bench.records.identity import code_hash, profile_wanted
from minivllm.bench.records.measurement import Measurement
from minivllm.bench.records.provenance import provenance
from minivllm.bench.worker_process import WorkerProcess, served
from minivllm.errors import BadInput
from minivllm.platform import files

EventListener = Callable[[dict[str, Any]], None]
CLOSING_S = 30.0  # for a worker to release its engine after the last measurement


@dataclass(frozen=True)
class Outcome:
    """How one measurement ended; its record is on disk."""

    measurement: Measurement
    status: str  # as in the record
    message: str = ""


def run(
    measurements: Sequence[Measurement],
    on_progress: EventListener | None = None,
    lone: bool = False,
) -> list[Outcome]:
    """Make measurements, each in a worker, and leave a record of each whatever happens to it.

    Args:
        measurements: in the order in which to make them.
        on_progress, lone: see `Supervisor`.

    Raises:
        BadInput, KeyboardInterrupt: see `Supervisor.measure`.
    """
    with Supervisor(on_progress, lone, len(measurements)) as supervisor:
        return [supervisor.measure(measurement) for measurement in measurements]


class Supervisor:
    """Makes one measurement after the other; a worker is kept for as long as its engine can serve
    the next.

    With `measure.isolation=run` each has a worker of its own, and with `runtime.profile`, which
    leaves the profiler behind in its process. As a context manager it ends its worker.

    Args:
        on_progress: called with what goes on, about five times a second: a dictionary with `event`
            (waiting, loading, probing, warmup, measuring, profiling, done, failed), `measurement`,
            `position` (from 1), `total`, and what the event knows besides (loaded, to_load, tokens,
            total_tokens, elapsed_s, status, message).
        lone: bad input that only the worker could see is raised, and leaves no record behind;
            otherwise it becomes a record of status `invalid`.
        total: how many measurements there will be; None: unknown.
    """

    def __init__(
        self, on_progress: EventListener | None = None, lone: bool = False, total: int | None = None
    ) -> None:
        self._on_progress = on_progress or (lambda event: None)
        self._lone, self._total = lone, total
        self._position = 0
        self._worker: WorkerProcess | None = None
        self._device = contextlib.ExitStack()  # holds its lock while there is a worker
        # Of the measurement that it is at:
        self._current: Measurement
        self._began_s = 0.0
        self._facts: dict[str, Any] = {}  # provenance
        # status and message, where we ended the worker
        self._verdict: tuple[str, str] | None = None
        self._failure: dict[str, Any] | None = None  # the failure that the worker last reported
        self._failed_s = 0.0  # when it did
        # reported when all was measured and only a trace was to come
        self._handed: dict[str, Any] | None = None

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._dismiss(0.0 if kind else CLOSING_S)

    def measure(self, measurement: Measurement) -> Outcome:
        """Make one; its record is on disk then.

        Raises:
            BadInput: see `lone`.
            KeyboardInterrupt: Ctrl-C; the worker has ended, and of this measurement nothing is
                left, unless only its trace was to come.
        """
        self._current, self._verdict, self._failure, self._handed = measurement, None, None, None
        self._position += 1
        try:
            if self._worker is not None and self._worker.serves != served(measurement):
                self._dismiss()
            outcome = self._measured(measurement)
        except BaseException:
            if self._worker is not None and self._handed is not None:
                self._worker.end(0.0)
                self._completed(self._handed, "interrupted")
            self._dismiss(0.0)
            _discard_unfinished(measurement)
            raise
        if measurement.settings.measure.isolation == "run" or profile_wanted(measurement.config):
            self._dismiss()
        return outcome

    def _measured(self, measurement: Measurement) -> Outcome:
        if self._worker is None:
            self._device.enter_context(
                device_lock(
                    measurement.config, lambda who: self._emit({"event": "waiting", "holder": who})
                )
            )
        try:
            storage.prepare(measurement.path, measurement.config)
        except OSError as error:
            if self._worker is None:
                self._device.close()
            raise BadInput(
                f"runs_dir={measurement.path.parent.parent}: the folder {measurement.path.name} "
                f"of a record cannot be made ({error.strerror or error})"
            ) from None
        self._facts = provenance(measurement.config, code_hash())
        self._began_s = time.monotonic()
        if self._worker is None:
            self._worker = WorkerProcess(measurement)
        self._worker.send(measurement)
        while (events := self._worker.listen()) is not None:
            for event in events:
                if (outcome := self._hear(event)) is not None:
                    return outcome
            if self._overdue():
                self._worker.end(0.0)
                break
        outcome = self._concluded()
        self._dismiss(0.0)
        return outcome

    def _dismiss(self, patience_s: float = CLOSING_S) -> None:
        """End the worker, if there is one, and let go of the device."""
        worker, self._worker = self._worker, None
        try:
            if worker is not None:
                worker.close(patience_s)
                files.hide_in_log(worker.log)  # it may have printed while it closed
        finally:
            self._device.close()

    def _emit(self, event: dict[str, Any]) -> None:
        """Tell the caller, adding which measurement it is about."""
        about = {"measurement": self._current, "position": self._position, "total": self._total}
        self._on_progress({**event, **about})

    def _overdue(self) -> bool:
        """Whether the worker must be ended; `_verdict` then says why."""
        assert self._worker is not None
        measure: MeasureOptions = self._current.settings.measure
        if self._failure is not None:
            # all is reported: the worker has only to end
            return time.monotonic() - self._failed_s > CLOSING_S
        spent = time.monotonic() - self._began_s
        timeout, limit = measure.timeout_s, measure.memory_limit_gb
        if self._worker.telemetry.over_limit.is_set():
            self._verdict = ("oom", f"resident memory went above measure.memory_limit_gb={limit:g}")
        elif spent > timeout:
            self._verdict = ("timeout", f"not done within measure.timeout_s={timeout:g} seconds")
        return self._verdict is not None

    def _hear(self, event: dict[str, Any]) -> Outcome | None:
        """Take in the worker's message; the outcome where that ended the measurement."""
        assert self._worker is not None
        # the last row is of what came before, counted or not
        if event["event"] not in ("done", "failed"):
            self._worker.telemetry.phase = event["event"]
        if "processes" in event:
            self._worker.telemetry.adopt(event["processes"], event.get("servers"))
        if event["event"] == "done":
            return self._completed(event)
        if event["event"] == "failed":
            self._failure, self._failed_s = event, time.monotonic()
            if event["going_on"]:
                return self._failed(event["status"], event["type"], event["message"])
            return None  # the worker ends now; how it ends may tell more
        if event["event"] == "profiling":
            self._handed = event
        self._emit(event)
        return None

    def _completed(self, event: dict[str, Any], no_trace: str | None = None) -> Outcome:
        """Add what was seen from outside to the record that the worker handed over, and rename it
        into place."""
        assert self._worker is not None
        self._handed = None  # if its record cannot be written, that is no matter of the trace
        self._worker.telemetry.sample()
        rows = self._worker.telemetry.rows(self._began_s)
        try:
            status, message = complete(
                self._current, self._facts, rows, event["window_s"], no_trace
            )
        except OSError as error:  # a full disk is this cell's failure, not the sweep's end
            return self._failed(
                "error", type(error).__name__, f"the record could not be written: {error}"
            )
        return self._settle(status, message)

    def _settle(self, status: str, message: str) -> Outcome:
        event = {
            "event": "done" if status == "ok" else "failed",
            "status": status,
            "message": message,
        }
        if status == "error" and self._failure is not None:  # a bug, here or in a plug-in
            event |= {"type": self._failure["type"], "at": self._failure["at"]}
        self._emit(event)
        return Outcome(self._current, status, message)

    def _failed(self, status: str, kind: str, message: str) -> Outcome:
        """Write the record of a measurement that did not end well; where only its trace failed,
        that is a note."""
        assert self._worker is not None
        if self._handed is not None:
            return self._completed(self._handed, message)
        if self._lone and status == "invalid":
            raise BadInput(message)
        rows = self._worker.telemetry.rows(self._began_s)
        with contextlib.suppress(OSError):
            (self._current.path / storage.HANDOVER).unlink()
        try:
            write_failure(self._current, status, kind, message, self._facts, rows)
        except OSError as error:  # nothing can be written: a resumed sweep measures it again
            if self._lone:
                why = os.strerror(error.errno) if error.errno else str(error)
                raise BadInput(
                    f"runs_dir={self._current.path.parent.parent}: no record can be written "
                    f"({why}); {message}"
                ) from None
            message = f"{message} (nor could its record be written: {error})"
        return self._settle(status, message)

    def _concluded(self) -> Outcome:
        """Account for the measurement at which the worker ended."""
        assert self._worker is not None
        code, oom_killed = self._worker.wait()
        if self._failure is not None:
            if self._failure["status"] == "crashed" and oom_killed:
                self._failure |= {"status": "oom", "type": "MemoryError"}
            return self._failed(
                self._failure["status"], self._failure["type"], self._failure["message"]
            )
        if self._verdict:
            status, message = self._verdict
            return self._failed(
                status, "TimeoutError" if status == "timeout" else "MemoryError", message
            )
        if code == -signal.SIGKILL and oom_killed:
            return self._failed(
                "oom", "MemoryError", "killed by the kernel, which was out of memory"
            )
        if code < 0:
            name = signal.Signals(-code).name
            return self._failed("crashed", name, f"the worker was killed by {name}")
        return self._failed(
            "crashed", "WorkerExit", f"the worker ended with exit code {code} and no result"
        )


def _discard_unfinished(measurement: Measurement) -> None:
    """Leave no directory without a record, and no empty folder."""
    path = measurement.path
    if (path / storage.RECORD).exists():
        return  # interrupted between the record's last write and its announcement
    storage.remove(path)
    storage.recover(path)
    for folder in (path.parent, path.parent.parent):
        with contextlib.suppress(OSError):
            folder.rmdir()  # fails, as it should, unless empty
