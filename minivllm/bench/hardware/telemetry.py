"""What the machine did while a worker measured, sampled by the supervisor from outside."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from minivllm.bench.hardware.gpu import NullGpu
from minivllm.bench.hardware.readings import TICKS

Sample = dict[str, Any]
FREQUENCY_EVERY_S = 1.0  # reading clocks walks over every core, so it is done less often
FAMILY_EVERY_S = 1.0
# The memory that the roofline probe, quality and the profiler take is not the run's.
UNCOUNTED_PHASES = ("probing", "quality", "profiling")
TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01  # of processor time


@dataclass(frozen=True)
class UsedCores:
    """The cores that a run uses.

    Args:
        number: how many at a time; None: it computes elsewhere, or that is not known.
        pinned: which, where it may run on no others; empty: on any.
        of: the cores of the machine.
    """

    number: int | None = None
    pinned: Collection[int] = ()
    of: int = field(default_factory=lambda: psutil.cpu_count() or 1)

    def share_taken(self, others: float) -> float | None:
        """The share of their processor time that others take.

        Args:
            others: the cores that other processes keep busy: of the pinned ones, or of all, of
                which they have those first that the run does not use.
        """
        if not self.number:
            return None
        spare = (len(self.pinned) or self.of) - self.number
        return min(1.0, max(0.0, others - spare) / self.number)


class Telemetry:
    """A thread that samples a worker, whatever it has started, and its GPU until stopped.

    Rows hold `t_s` (`time.monotonic()`, which processes on one machine share, so that a worker's
    own timestamps compare), `phase`, `rss` (bytes), `rss_peak` (bytes, the kernel's high-water
    mark), `cpu_worker_percent` and `cpu_other_percent` (100 is one core), `cpu_taken` (see
    `UsedCores.share_taken`), `cpu_mhz`, `cpu_fastest_mhz`, and `gpu_*` readings. Memory and CPU are
    the worker's and its descendants' together: some engines compute in a process of their own.
    Processor time is counted in ticks: where the cores have had fewer than TICKS of them since the
    last percentages, there are none, and the next row's are of that time, too.

    Args:
        pid: the worker.
        gpu: its GPU or a null object.
        interval_s: seconds between samples.
        memory_limit: bytes of resident memory past which `over_limit` is set; None is no limit.
        cores: that the run uses.
    """

    def __init__(
        self,
        pid: int,
        gpu: NullGpu,
        interval_s: float = 0.2,
        memory_limit: float | None = None,
        cores: UsedCores | None = None,
    ) -> None:
        self.over_limit = threading.Event()
        self.phase = "loading"
        self._gpu = gpu
        self._pid = pid
        self._interval = interval_s
        self._limit = memory_limit
        self._cores = cores or UsedCores()
        self._rows: list[Sample] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._tree = ProcessTree(pid)
        # time, worker's CPU seconds, all processes', and those on the cores that it is pinned to
        self._last: tuple[float, float, float, float] | None = None
        self._clocks: dict[str, float | None] = {}
        self._clocks_s = float("-inf")

    def start(self) -> Telemetry:
        """Begin sampling."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """End sampling; returns once the thread has ended."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.sample()
            self._stop.wait(self._interval)

    def adopt(self, pids: Sequence[int], servers: Sequence[int] | None = None) -> None:
        """Count these processes and their descendants as the worker's, too.

        Args:
            pids: all of what they use.
            servers: the processor time that they use, not their memory; empty: they are on this
                machine and cannot be found, so that nobody knows what of its time is others'.
        """
        with self._lock:
            self._tree.adopt(pids)
            self._tree.adopt(servers or (), weighed=False)
            if servers is not None and not servers:
                self._cores = UsedCores()
            self._last = None

    def sample(self) -> Sample | None:
        """Take one row now; None once the worker is gone."""
        with self._lock:
            try:
                row = self._row()
            except psutil.Error:
                return None
            self._rows.append(row)
        if self._limit and row["rss"] > self._limit and row["phase"] not in UNCOUNTED_PHASES:
            self.over_limit.set()
        return row

    def _row(self) -> Sample:
        now = time.monotonic()
        usage = self._tree.usage(now)
        return {
            "t_s": now,
            "phase": self.phase,
            "rss": usage.rss,
            "rss_peak": usage.rss_peak,
            **self._processor_use(now, usage.cpu_s),
            **self._cpu_clocks(now),
            **self._gpu.sample({self._pid, *usage.pids}),
        }

    def _processor_use(self, now: float, worker: float) -> dict[str, float | None]:
        """What of the processor's time since the last such reading the worker and others had."""
        use: dict[str, float | None] = dict.fromkeys(
            ("cpu_worker_percent", "cpu_other_percent", "cpu_taken")
        )
        cores = self._cores
        read = now, worker, busy_seconds(), busy_seconds(cores.pinned)
        if self._last is None:
            self._last = read
            return use
        span, mine, total, near = (b - a for a, b in zip(self._last, read, strict=True))
        if span * cores.of < TICKS * TICK_S:
            return use
        self._last = read
        # a process may have ended
        use["cpu_worker_percent"] = max(0.0, 100 * mine / span)
        use["cpu_other_percent"] = max(0.0, 100 * (total - max(0.0, mine)) / span)
        use["cpu_taken"] = cores.share_taken((near - max(0.0, mine)) / span)
        return use

    def _cpu_clocks(self, now: float) -> dict[str, float | None]:
        if now - self._clocks_s >= FREQUENCY_EVERY_S:
            clocks = cpu_clocks()
            self._clocks_s = now
            self._clocks = {
                "cpu_mhz": sum(clocks) / len(clocks) if clocks else None,
                "cpu_fastest_mhz": max(clocks, default=None),
            }
        return self._clocks

    def rows(self, since: float, until: float | None = None) -> list[Sample]:
        """Rows taken from `since` to `until` (monotonic seconds)."""
        with self._lock:
            return [
                row
                for row in self._rows
                if row["t_s"] >= since and (until is None or row["t_s"] <= until)
            ]


def cpu_clocks() -> list[float]:
    """The clock of each core as the system tells it, MHz; of some systems one for all, or none."""
    with suppress(Exception):  # psutil raises what the platform's files happen to cause
        return [float(core.current) for core in psutil.cpu_freq(percpu=True)]
    return []


def cpu_mhz() -> float | None:
    """The mean clock of the cores; None where the system does not tell it."""
    clocks = cpu_clocks()
    return sum(clocks) / len(clocks) if clocks else None


def cpu_max_mhz() -> float | None:
    """The greatest clock that any core can run at; None where the system does not tell it."""
    with suppress(Exception):
        return max(float(core.max) for core in psutil.cpu_freq(percpu=True)) or None
    return None


@dataclass(frozen=True)
class Usage:
    """What a process and its descendants use at one moment."""

    pids: tuple[int, ...]
    rss: int  # bytes, summed: pages that they share count more than once
    rss_peak: int | None  # the sum of each one's own peak, so an upper bound
    cpu_s: float  # CPU seconds of those alive


class ProcessTree:
    """A process and its descendants, and others with theirs.

    Args:
        pid: the process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._adopted: list[tuple[psutil.Process, bool]] = []
        self._unweighed: set[int] = set()
        self._members: list[psutil.Process] = []
        self._looked_s = float("-inf")

    def adopt(self, pids: Sequence[int], weighed: bool = True) -> None:
        """Count these processes and their descendants, too; `weighed` is with their memory."""
        for pid in pids:
            with suppress(psutil.Error):
                self._adopted.append((psutil.Process(pid), weighed))
        self._looked_s = float("-inf")

    def usage(self, now: float) -> Usage:
        """What they use. Descendants are looked for once a second: that takes a walk over all
        processes.

        Raises:
            psutil.Error: the process itself is gone.
        """
        if not self._members or now - self._looked_s >= FAMILY_EVERY_S:
            head = self._members[0] if self._members else psutil.Process(self._pid)
            self._members = [head, *head.children(recursive=True)]
            for other, weighed in self._adopted:
                with suppress(psutil.Error):  # it may have ended
                    family = [other, *other.children(recursive=True)]
                    self._members += family
                    self._unweighed |= set() if weighed else {one.pid for one in family}
            self._members = list(dict.fromkeys(self._members))
            self._looked_s = now
        pids, rss, peaks, cpu_s = [], 0, [], 0.0
        for index, member in enumerate(self._members):
            try:
                with member.oneshot():
                    times = member.cpu_times()
                    weighed = member.pid not in self._unweighed
                    rss += member.memory_info().rss if weighed else 0
            except psutil.Error:
                if index == 0:
                    raise
                continue
            cpu_s += times.user + times.system
            pids.append(member.pid)
            if weighed and (mark := _high_water_mark(member.pid)) is not None:
                peaks.append(mark)
        return Usage(tuple(pids), rss, sum(peaks) or None, cpu_s)


def busy_seconds(cores: Collection[int] = ()) -> float:
    """CPU seconds that all processes together have used since the machine started, and that its
    hypervisor gave to others.

    Args:
        cores: only on these; empty: on all.
    """
    each = psutil.cpu_times(percpu=True) if cores else []
    known = [each[core] for core in cores if core < len(each)] or [psutil.cpu_times()]
    # Linux counts a guest's time in user and nice already; waiting for a disk is idleness.
    busy = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(float(getattr(times, name, 0.0)) for times in known for name in busy)


def _high_water_mark(pid: int | str) -> int | None:
    """Peak resident bytes of a process since it started or since the mark was reset."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def own_peak_rss(others: Sequence[int] = (), with_self: bool = True) -> int | None:
    """Peak resident bytes of this process, of those that it has started, and of others and those
    that they have started, each one's own.

    Args:
        others: ids of processes.
        with_self: whether this process counts, not only those that it has started.
    """
    marks = [_high_water_mark("self")] if with_self else []
    marks += map(_high_water_mark, _descendants(others))
    return sum(mark for mark in marks if mark is not None) or None


def reset_own_peak_rss(others: Sequence[int] = ()) -> bool:
    """Restart those high-water marks at their present size; False where that is not allowed."""
    try:
        for pid in ("self", *_descendants(others)):
            Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _descendants(others: Sequence[int]) -> list[int]:
    """Ids of this process's descendants, and of other processes with theirs."""
    found = []
    with suppress(psutil.Error):
        found = [process.pid for process in psutil.Process().children(recursive=True)]
    for pid in others:
        with suppress(psutil.Error):
            found += [pid, *(p.pid for p in psutil.Process(pid).children(recursive=True))]
    return list(dict.fromkeys(found))


def peak(rows: list[Sample], column: str) -> int | None:
    """Greatest value of a column outside UNCOUNTED_PHASES; None where it was never read."""
    values = [
        row[column]
        for row in rows
        if row.get(column) is not None and row["phase"] not in UNCOUNTED_PHASES
    ]
    return int(max(values)) if values else None
