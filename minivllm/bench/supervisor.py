"""The parent of every measurement: spawns workers, watches them, and completes or writes their records.

A worker can die in ways that it cannot report, so the parent holds what must not be lost: the timeout, the
memory limit, the telemetry, and the last write of record.json. It never imports torch. The worker hands over a
finished record in a temporary name (`storage.HANDOVER`); the parent adds what only it knows and renames.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from minivllm.bench import storage
from minivllm.bench.completion import complete, write_failure
from minivllm.bench.device_lock import device_lock
from minivllm.bench.gpu import NullGpu, open_gpu
from minivllm.bench.identity import code_hash, engine_id
from minivllm.bench.measurement import Measurement
from minivllm.bench.provenance import provenance, thread_count
from minivllm.bench.telemetry import Telemetry
from minivllm.errors import BadInput

Progress = Callable[[dict[str, Any]], None]
POLL_S = 0.05  # how soon a timeout or a broken memory limit is noticed
GRACE_S = 3.0  # between asking a worker to end and killing it
CLOSING_S = 30.0  # for a worker to release its engine after the last measurement
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# Of `measure`: what the supervisor, a session or an engine reads once for all measurements of a worker.
WATCH_KNOBS = (
    *("isolation", "timeout_s", "memory_limit_gb", "telemetry_interval_s", "roofline"),
    *("prefix_cache", "seed"),
)
OOM_COUNTERS = ("/proc/vmstat", "/sys/fs/cgroup/memory.events")


@dataclass(frozen=True)
class Outcome:
    """How one measurement ended; its record is on disk."""

    measurement: Measurement
    status: str  # as in the record
    message: str = ""


def run(
    measurements: Sequence[Measurement], on_progress: Progress | None = None, lone: bool = False
) -> list[Outcome]:
    """Make measurements, each in a worker, and leave a record of each whatever happens to it.

    Args:
        measurements: in the order in which to make them.
        on_progress: told what goes on, about five times a second: a dictionary with `event` (waiting,
            loading, probing, warmup, measuring, done, failed), `measurement`, `position` (from 1), `total`,
            and what the event knows besides (loaded, to_load, tokens, total_tokens, elapsed_s, status, message).
        lone: bad input that only the worker could see is raised, and leaves no record behind; otherwise
            it becomes a record of status `invalid`.

    Raises:
        BadInput: see `lone`.
        KeyboardInterrupt: Ctrl-C; the worker has ended, finished records are kept, the unfinished one is gone.
    """
    outcomes: list[Outcome] = []
    while len(outcomes) < len(measurements):
        batch = _next_batch(measurements[len(outcomes) :])
        watch = _Watch(batch, len(outcomes), len(measurements), on_progress or (lambda event: None), lone)
        with device_lock(batch[0].config, watch.waiting):
            outcomes += watch.run()
    return outcomes


def _next_batch(measurements: Sequence[Measurement]) -> list[Measurement]:
    """The leading measurements that one worker can make in turn."""
    first = measurements[0]
    if (first.config.get("measure") or {}).get("isolation") == "run":
        return [first]
    return list(takewhile(lambda m: _watched(m) == _watched(first), measurements))


def _watched(measurement: Measurement) -> tuple[Any, ...]:
    """What must be alike for one worker under one watch."""
    measure = measurement.config.get("measure") or {}
    return engine_id(measurement.config), *(measure.get(knob) for knob in WATCH_KNOBS)


@dataclass
class _Watch:
    """One worker and the measurements it was given."""

    batch: list[Measurement]
    offset: int  # measurements that came before, of all
    total: int
    on_progress: Progress
    lone: bool
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.batch[0].config
        self.measure: dict[str, Any] = config.get("measure") or {}
        self.gpu: NullGpu = open_gpu((config.get("runtime") or {}).get("device") or "auto")
        self.began_s = time.monotonic()  # of the current measurement, or since when there is none
        self.facts: dict[str, Any] = {}  # provenance of the current measurement
        self.verdict: tuple[str, str] | None = None  # status and message of a worker that we ended
        self.failure: dict[str, Any] | None = None  # what the worker last said had failed
        self.buffer = b""

    @property
    def current(self) -> Measurement | None:
        """The measurement that the worker is at; None once all have an outcome."""
        return self.batch[len(self.outcomes)] if len(self.outcomes) < len(self.batch) else None

    def emit(self, event: dict[str, Any]) -> None:
        """Tell the caller, adding which measurement it is about."""
        current = self.current or self.batch[-1]
        position = self.offset + min(len(self.outcomes) + 1, len(self.batch))
        self.on_progress({**event, "measurement": current, "position": position, "total": self.total})

    def waiting(self) -> None:
        """Another supervisor holds the device."""
        self.emit({"event": "waiting"})

    def run(self) -> list[Outcome]:
        """Spawn the worker and watch it to its end. At least one outcome; the rest is for another worker."""
        self._begin()
        if self.current is None:
            return self.outcomes
        ooms = _oom_kills()
        read_end, write_end = os.pipe()
        with tempfile.TemporaryDirectory(prefix="minivllm-") as folder:
            job = Path(folder) / "job.json"
            rest = self.batch[len(self.outcomes) :]
            job.write_text(json.dumps([measurement.to_dict() for measurement in rest], default=str))
            self.worker = self._spawn(job, write_end)
            os.close(write_end)
            limit = self.measure.get("memory_limit_gb")
            interval = self.measure.get("telemetry_interval_s") or 0.2
            self.telemetry = Telemetry(self.worker.pid, self.gpu, interval, limit and limit * 1e9).start()
            try:
                self._go()
                self._watch(read_end)
                self._conclude(self.worker.wait(), _oom_kills() > ooms)
            except BaseException:
                _end(self.worker)
                self._discard_unfinished()
                raise
            finally:
                os.close(read_end)
                self.telemetry.stop()
        return self.outcomes

    def _begin(self) -> None:
        """Make the next measurement's directory ready and start its time; one that cannot be is a failure."""
        self.failure = None
        while (current := self.current) is not None:
            try:
                storage.prepare(current.path, current.config)
            except OSError as error:
                self._settle("error", f"the record's folder could not be made: {error}")
                continue
            self.facts = provenance(current.config, code_hash())
            break
        self.began_s = time.monotonic()

    def _go(self) -> None:
        """Let the worker begin with the current measurement, or end."""
        assert self.worker.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the worker has died: its exit code tells
            if self.current is None:
                self.worker.stdin.close()
            else:
                self.worker.stdin.write(f"{self.current.run_id}\n".encode())
                self.worker.stdin.flush()

    def _spawn(self, job: Path, progress: int) -> subprocess.Popen[bytes]:
        threads = str(thread_count(self.batch[0].config.get("runtime") or {}))
        environment = {
            **os.environ,
            **dict.fromkeys(THREAD_VARIABLES, threads),
            # The parent may have found a user's own classes in places that only its sys.path names.
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in sys.path)),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",  # a crash in native code leaves its stack in the log
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, "-m", "minivllm.bench.worker", str(job), str(progress), str(os.getpid())]
        current = self.current
        assert current is not None
        with (current.path / storage.LOG).open("wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(progress,),
                env=environment,
                start_new_session=True,  # a terminal's Ctrl-C reaches the parent, which decides
            )

    def _watch(self, read_end: int) -> None:
        """Follow the worker's progress until it closes its pipe or is ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(read_end, selectors.EVENT_READ)
            while True:
                if selector.select(POLL_S):
                    if not self._read(read_end):
                        return
                elif self.worker.poll() is not None:
                    return  # a process that the engine started holds the pipe open
                if self._overdue():
                    _end(self.worker, grace_s=0)
                    return

    def _overdue(self) -> bool:
        """Whether the worker must be ended; `verdict` then says why."""
        spent = time.monotonic() - self.began_s
        if self.current is None or self.failure is not None:
            return spent > CLOSING_S  # all is said: the worker has only to end
        timeout, limit = self.measure.get("timeout_s"), self.measure.get("memory_limit_gb")
        if self.telemetry.over_limit.is_set():
            self.verdict = ("oom", f"resident memory went above measure.memory_limit_gb={limit:g}")
        elif timeout and spent > timeout:
            self.verdict = ("timeout", f"not done within measure.timeout_s={timeout:g} seconds")
        return self.verdict is not None

    def _read(self, read_end: int) -> bool:
        """Take in what the worker said; False once it has closed the pipe."""
        chunk = os.read(read_end, 1 << 16)
        *lines, self.buffer = (self.buffer + chunk).split(b"\n")
        for line in lines:
            self._hear(json.loads(line))
        return bool(chunk)

    def _hear(self, event: dict[str, Any]) -> None:
        self.telemetry.phase = event["event"]
        if event["event"] == "done":
            self._complete(event)
        elif event["event"] == "failed":
            self.failure = event
            if not event["going_on"]:
                self.began_s = time.monotonic()
                return  # the worker ends now; how it ends may tell more
            self._fail(event["status"], event["type"], event["message"])
        else:
            self.emit(event)
            return
        self._begin()
        self._go()

    def _complete(self, event: dict[str, Any]) -> None:
        """Add what was seen from outside to the record that the worker handed over, and rename it into place."""
        current = self.current
        assert current is not None
        self.telemetry.sample()
        rows = self.telemetry.rows(self.began_s)
        try:
            status, message = complete(current, self.facts, rows, event["window_s"])
        except OSError as error:  # a full disk is this cell's failure, not the sweep's end
            self._fail("error", type(error).__name__, f"the record could not be written: {error}")
        else:
            self._settle(status, message)

    def _settle(self, status: str, message: str) -> None:
        self.emit({"event": "done" if status == "ok" else "failed", "status": status, "message": message})
        current = self.current
        assert current is not None
        self.outcomes.append(Outcome(current, status, message))

    def _fail(self, status: str, kind: str, message: str) -> None:
        """Write the record of a measurement that did not end well."""
        current = self.current
        assert current is not None
        if self.lone and status == "invalid":
            raise BadInput(message)
        rows = self.telemetry.rows(self.began_s)
        with contextlib.suppress(OSError):
            (current.path / storage.HANDOVER).unlink()
        try:
            write_failure(current, status, kind, message, self.facts, rows)
        except OSError as error:  # nothing can be written: a resumed sweep measures it again
            message = f"{message} (nor could its record be written: {error})"
        self._settle(status, message)

    def _conclude(self, code: int, oom_killed: bool) -> None:
        """Account for the measurement at which the worker ended."""
        if self.current is None:
            return
        if self.failure is not None:
            self._fail(self.failure["status"], self.failure["type"], self.failure["message"])
        elif self.verdict:
            status, message = self.verdict
            self._fail(status, "TimeoutError" if status == "timeout" else "MemoryError", message)
        elif code == -signal.SIGKILL and oom_killed:
            self._fail("oom", "MemoryError", "killed by the kernel, which was out of memory")
        elif code < 0:
            name = signal.Signals(-code).name
            self._fail("crashed", name, f"the worker was killed by {name}")
        else:
            self._fail("crashed", "WorkerExit", f"the worker ended with exit code {code} and no result")

    def _discard_unfinished(self) -> None:
        """Leave no directory without a record, and no empty folder."""
        current = self.current
        if current is None or (current.path / storage.RECORD).exists():
            return  # interrupted between the record's last write and its announcement
        storage.remove(current.path)
        storage.recover(current.path)
        for folder in (current.path.parent, current.path.parent.parent):
            with contextlib.suppress(OSError):
                folder.rmdir()  # fails, as it should, unless empty


def _end(worker: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> None:
    """End a worker and everything it started: politely, unless there is no time, then not."""
    with contextlib.suppress(ProcessLookupError):
        if grace_s:
            os.killpg(worker.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(grace_s)
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def _oom_kills() -> int:
    """Processes that the kernel has killed for memory so far, on this machine and in this container."""
    total = 0
    for path in OOM_COUNTERS:
        with contextlib.suppress(OSError):
            for line in Path(path).read_text().splitlines():
                if line.startswith("oom_kill "):
                    total += int(line.split()[1])
    return total
