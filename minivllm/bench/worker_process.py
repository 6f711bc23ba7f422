"""The process of a worker as its supervisor sees it: commands down, events up, telemetry beside."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from minivllm.bench.hardware.gpu import NullGpu, device_of, open_gpu
from minivllm.bench.hardware.telemetry import Telemetry, UsedCores
from minivllm.bench.options import MeasureOptions
from minivllm.bench.records import storage
from minivllm.bench.records.identity import engine_id
from minivllm.bench.records.measurement import Measurement
from minivllm.platform.processes.children import module_path
from minivllm.platform.threads import (
    THREAD_VARIABLES,
    thread_count,
    usable_cores,
    wanted_cores,
)

POLL_S = 0.05  # how soon a timeout or a broken memory limit is noticed
GRACE_S = 3.0  # between asking a worker to end and killing it
# Of `measure`: what the supervisor, a session or an engine reads once for all measurements of a
# worker.
WATCH_KNOBS = (
    *("isolation", "timeout_s", "memory_limit_gb", "telemetry_interval_s"),
    *("roofline", "prefix_cache"),
)
OOM_COUNTERS = ("/proc/vmstat", "/sys/fs/cgroup/memory.events")


def served(measurement: Measurement) -> tuple[Any, ...]:
    """What must be the same for one worker under one watch."""
    measure = measurement.settings.measure
    return engine_id(measurement.config), *(getattr(measure, knob) for knob in WATCH_KNOBS)


class WorkerProcess:
    """A worker's process, the pipe that it speaks up, and its telemetry.

    Args:
        first: its first measurement, whose directory is there.
    """

    def __init__(self, first: Measurement) -> None:
        measure: MeasureOptions = first.settings.measure
        self.serves = served(first)
        self.log = first.path / storage.LOG  # that it writes
        self._buffer = b""
        self._ooms = _oom_kills()
        self._pipe, progress = os.pipe()
        try:
            self._process = self._spawn(first, progress)
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(progress)
        gpu: NullGpu = open_gpu(device_of(first.config))
        limit = measure.memory_limit_gb
        interval = measure.telemetry_interval_s
        self.telemetry = Telemetry(
            self._process.pid, gpu, interval, limit and limit * 1e9, _used_cores(first)
        ).start()

    def _spawn(self, first: Measurement, progress: int) -> subprocess.Popen[bytes]:
        threads = str(thread_count(first.config["runtime"], first.settings.parallel.tensor))
        environment = {
            **os.environ,
            **dict.fromkeys(THREAD_VARIABLES, threads),
            "PYTHONPATH": module_path(),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",  # a crash in native code leaves its stack in the log
            "TOKENIZERS_PARALLELISM": "false",
        }
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "minivllm.bench.worker", str(progress), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(progress,),
                env=environment,
                start_new_session=True,  # a terminal's Ctrl-C reaches the parent, which decides
            )

    def send(self, measurement: Measurement) -> None:
        """Let it begin with a measurement whose directory is ready."""
        assert self._process.stdin is not None
        self.log = measurement.path / storage.LOG
        with contextlib.suppress(BrokenPipeError):  # it has died: its exit code tells
            self._process.stdin.write(
                json.dumps(measurement.to_dict(), default=str).encode() + b"\n"
            )
            self._process.stdin.flush()

    def listen(self) -> list[dict[str, Any]] | None:
        """What it says within POLL_S; None once it has nothing more to say."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            if not selector.select(POLL_S):
                # A process that the engine started may hold the pipe open.
                return [] if self._process.poll() is None else None
        chunk = os.read(self._pipe, 1 << 16)
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        return [json.loads(line) for line in lines] if chunk else None

    def wait(self) -> tuple[int, bool]:
        """Its exit code, and whether the kernel has killed for memory since it began."""
        return self._process.wait(), _oom_kills() > self._ooms

    def end(self, grace_s: float) -> None:
        """End it and everything it started: politely, unless there is no time, then not."""
        with contextlib.suppress(ProcessLookupError):
            if grace_s:
                os.killpg(self._process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(grace_s)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self, patience_s: float) -> None:
        """Tell it that all is done and wait so long for it to release its engine; with 0 end it as
        it is."""
        assert self._process.stdin is not None
        deadline = time.monotonic() + patience_s
        try:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            while time.monotonic() < deadline and self.listen() is not None:
                pass
        finally:
            if self._process.poll() is None:
                self.end(GRACE_S)
            os.close(self._pipe)
            self.telemetry.stop()


def _used_cores(measurement: Measurement) -> UsedCores:
    """The cores that a measurement uses: the threads of all its processes, or those to which it is
    pinned."""
    runtime, parallel = measurement.config["runtime"], measurement.settings.parallel
    pinned = wanted_cores(runtime) if runtime.get("cores") is not None else set()
    threads = thread_count(runtime, parallel.tensor) * parallel.tensor * parallel.replicas
    return UsedCores(min(threads, len(pinned) or usable_cores()), pinned)


def _oom_kills() -> int:
    """Processes that the kernel has killed for memory so far, on this machine and in this
    container."""
    total = 0
    for path in OOM_COUNTERS:
        with contextlib.suppress(OSError):
            for line in Path(path).read_text().splitlines():
                if line.startswith("oom_kill "):
                    total += int(line.split()[1])
    return total
