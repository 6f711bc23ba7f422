"""The process that measures: `python -m minivllm.bench.worker PROGRESS_FD PARENT_PID`.

The supervisor gives it measurements on standard input, a JSON line each, when their directories are
ready. They share one engine configuration; the engine is built once. A finished record is handed
over in a temporary file, since only the supervisor has the telemetry. Progress goes up a pipe of
its own as JSON lines, so that nothing that an engine prints can disturb it. Exit codes: 0 all
measured, 1 a failure, 2 bad input.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from minivllm import redaction
from minivllm.bench.completion import NO_TRACE
from minivllm.bench.records import storage
from minivllm.bench.records.events import write_events
from minivllm.bench.records.identity import profile_wanted
from minivllm.bench.records.measurement import Measurement
from minivllm.bench.records.record import Record
from minivllm.bench.session import Session
from minivllm.errors import classify, first_line, last_frame
from minivllm.platform import files
from minivllm.platform.processes.children import die_with


class Pipe:
    """The way up to the supervisor: one JSON object a line.

    Args:
        descriptor: the pipe's writing end; processes that an engine may start do not inherit it.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._descriptor = descriptor

    def __call__(self, event: str, **details: Any) -> None:
        """Say what is going on. Without a supervisor there is nothing to measure for."""
        try:
            os.write(self._descriptor, (json.dumps({"event": event, **details}) + "\n").encode())
        except BrokenPipeError:
            os._exit(1)


class Worker:
    """Measures in turn what it is given.

    Args:
        pipe: to the supervisor.
    """

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe

    def run(self, given: Iterable[bytes]) -> int:
        """Measure until all is done or the engine is no longer fit for it; returns the exit code.

        Args:
            given: measurements, a JSON line each, that share one engine configuration.
        """
        code, session = 0, None
        for line in given:
            measurement = Measurement.from_dict(json.loads(line))
            redaction.learn(measurement.config)
            session = session or Session(measurement.config, self.pipe)
            _log_to(measurement.path / storage.LOG)
            try:
                self._measure(session, measurement)
            except Exception as error:  # whatever it is, it becomes a row
                code = self._report(error, going_on=session.usable)
                if not session.usable:
                    return code
        if session is not None:
            session.close()
        return code

    def _measure(self, session: Session, measurement: Measurement) -> None:
        result = session.measure(measurement)
        files.write_parquet(measurement.path / storage.REQUESTS, result.requests)
        files.write_parquet(measurement.path / storage.STEPS, result.steps)
        if result.record.events is not None:
            write_events(measurement.path, result.events)
        storage.hand_over(measurement.path, result.record)
        if profile_wanted(measurement.config):
            self.pipe("profiling", window_s=result.window_s)
            self._profile(session, measurement, result.record)
        self.pipe("done", window_s=result.window_s)

    def _profile(self, session: Session, measurement: Measurement, record: Record) -> None:
        """Leave a trace, or a note in the record that is handed over already: it is not lost for
        want of one."""
        try:
            session.profile(measurement)
        except Exception as error:
            traceback.print_exception(error)
            sys.stderr.flush()
            record.validity.notes.append(NO_TRACE.format(first_line(error)))
            storage.hand_over(measurement.path, record)

    def _report(self, error: Exception, going_on: bool) -> int:
        """Put a failure into the log and tell the supervisor; returns the exit code."""
        status, message = classify(error), redaction.hide(str(error)) or type(error).__name__
        if status == "invalid":
            print(message, file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)
            sys.stderr.flush()
        kind, at = type(error).__name__, last_frame(error)
        self.pipe("failed", status=status, type=kind, message=message, at=at, going_on=going_on)
        return 2 if status == "invalid" else 1


def _log_to(path: Path) -> None:
    """Send everything that this process prints, native code included, to another log."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def main(arguments: Sequence[str]) -> int:
    """Entry point; see the module's docstring."""
    descriptor, parent = arguments
    die_with(int(parent))
    with redaction.console():  # the log
        return Worker(Pipe(int(descriptor))).run(sys.stdin.buffer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
