"""Sampling from outside."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from minivllm.bench.hardware import telemetry as module
from minivllm.bench.hardware.gpu import Gpu, NullGpu, open_gpu
from minivllm.bench.hardware.telemetry import Telemetry, UsedCores, own_peak_rss, peak
from tests.bench.fake_nvml import FakeNVML

REAL_BUSY_SECONDS = module.busy_seconds  # before a fixture puts a quiet machine there


def test_a_busy_child_is_told_from_the_rest() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        telemetry = Telemetry(child.pid, NullGpu(), interval_s=0.1).start()
        begin = time.monotonic()
        # However busy the machine is, the child gets a share of it some time.
        while not any(row["cpu_worker_percent"] for row in telemetry.rows(begin)[1:]):
            assert time.monotonic() < begin + 60, "the child was never seen at work"
            time.sleep(0.1)
        telemetry.stop()
        rows = telemetry.rows(begin)
    finally:
        child.kill()
        child.wait()
    assert all(begin <= row["t_s"] <= time.monotonic() for row in rows)
    assert all(row["cpu_worker_percent"] >= 0 for row in rows[1:])
    assert all(row["cpu_other_percent"] >= 0 for row in rows[1:])
    assert all(row["rss"] > 1e6 and row["rss_peak"] >= row["rss"] * 0.5 for row in rows)
    assert telemetry.rows(begin, begin) == []


class Processor:
    """Stands in for the readings of the processor's time and of the clock."""

    def __init__(self, patch: pytest.MonkeyPatch, cores: UsedCores) -> None:
        self.now, self.worker, self.all, self.near = 100.0, 3.0, 50.0, 20.0
        patch.setattr(module.time, "monotonic", lambda: self.now)
        patch.setattr(module, "busy_seconds", lambda on=(): self.near if on else self.all)
        patch.setattr(module.ProcessTree, "usage", lambda *_: module.Usage((1,), 1, 1, self.worker))
        self.telemetry = Telemetry(os.getpid(), NullGpu(), cores=cores)
        self.telemetry.sample()

    def after(self, seconds: float, worker: float, others: float) -> tuple[float | None, ...]:
        """What is read when so much time has passed: percent of the worker and of others, and the
        share taken."""
        self.now += seconds
        self.worker += worker
        self.all += worker + others
        self.near += worker + others / 2
        row = self.telemetry.sample()
        assert row is not None
        return row["cpu_worker_percent"], row["cpu_other_percent"], row["cpu_taken"]


def test_what_others_take_of_the_cores_that_a_run_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Processor(monkeypatch, UsedCores(2, of=2))
    assert both.after(10, worker=1, others=18) == pytest.approx((10, 180, 0.9))
    one = Processor(monkeypatch, UsedCores(1, of=2))  # the other core is theirs
    assert one.after(10, worker=9, others=9) == pytest.approx((90, 90, 0.0))
    assert one.after(10, worker=4, others=16) == pytest.approx((40, 160, 0.6))
    pinned = Processor(monkeypatch, UsedCores(1, pinned={1}, of=2))  # half of it is on this core
    assert pinned.after(10, worker=5, others=9) == pytest.approx((50, 90, 0.45))
    elsewhere = Processor(monkeypatch, UsedCores(of=2))
    assert elsewhere.after(10, worker=1, others=18) == (10, 180, None)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_server_of_somebody_else_counts_with_its_time_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        telemetry = Telemetry(os.getpid(), NullGpu(), cores=UsedCores(1, of=2))
        alone = telemetry._tree.usage(0.0)
        apart = module.ProcessTree(child.pid)
        others = module.ProcessTree(os.getppid())
        others.adopt((child.pid,), weighed=False)
        telemetry.adopt((), servers=())  # which cannot be found
        assert telemetry._cores.number is None
        assert alone.rss > 0 and apart.usage(0.0).rss > 0
        weighed = others.usage(0.0)
        assert child.pid in weighed.pids
        light = module.ProcessTree(child.pid)
        light.adopt((child.pid,), weighed=False)
        assert light.usage(0.0).rss == 0 and light.usage(0.0).rss_peak is None
    finally:
        child.communicate()


def test_processor_time_below_twenty_ticks_is_not_a_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processor = Processor(monkeypatch, UsedCores(2, of=2))
    tick = module.TICK_S
    assert processor.after(9 * tick, worker=0, others=9 * tick) == (None, None, None)
    read = processor.after(91 * tick, worker=0, others=41 * tick)  # the ticks before are in it
    assert read == pytest.approx((0, 50, 0.25))


def test_time_that_a_hypervisor_gave_away_is_others_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Times:
        user, nice, system, irq, softirq, steal, idle = 1.0, 0.5, 0.25, 0.0, 0.0, 8.0, 100.0

    def cpu_times(percpu: bool = False) -> Any:
        return [Times] * 2 if percpu else Times

    monkeypatch.setattr(module.psutil, "cpu_times", cpu_times)
    assert REAL_BUSY_SECONDS() == 9.75 == REAL_BUSY_SECONDS({1})
    assert REAL_BUSY_SECONDS({0, 1}) == 19.5


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_worker_starts_counts_with_it() -> None:
    grown = "x = bytearray(100 << 20); import sys; print(flush=True); sys.stdin.read()"
    alone = own_peak_rss()
    child = subprocess.Popen(
        [sys.executable, "-c", grown], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "\n"
        row, together = Telemetry(os.getpid(), NullGpu()).sample(), own_peak_rss()
        without = own_peak_rss(with_self=False)
    finally:
        child.communicate()
    after = Telemetry(os.getpid(), NullGpu()).sample()
    assert row is not None and after is not None and alone is not None and together is not None
    assert row["rss"] - after["rss"] > 90 << 20 and row["rss_peak"] - after["rss_peak"] > 90 << 20
    assert together - alone > 90 << 20
    # of an engine in a process of its own: what this one takes is not the engine's
    assert without is not None and 90 << 20 < without < together


def test_the_limit_counts_except_while_probing() -> None:
    telemetry = Telemetry(os.getpid(), NullGpu(), memory_limit=1)
    telemetry.phase = "probing"
    telemetry.sample()
    assert not telemetry.over_limit.is_set()
    telemetry.phase = "measuring"
    telemetry.sample()
    assert telemetry.over_limit.is_set()


def test_a_worker_that_is_gone_gives_no_row() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    telemetry = Telemetry(child.pid, NullGpu()).start()
    assert telemetry.sample() is None
    telemetry.stop()
    assert telemetry.rows(0) == []


def test_gpu_readings_and_what_a_driver_lacks() -> None:
    row = Gpu(FakeNVML(), None).sample({42, 43})
    assert (
        row["gpu_power_w"] == 300
        and row["gpu_memory_used"] == 400
        and row["gpu_process_memory"] == 300
    )
    assert row["gpu_processes"] == 2 and row["gpu_utilisation"] == 97 and row["gpu_sm_mhz"] == 1500
    broken = (
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetComputeRunningProcesses",
    )
    row = Gpu(FakeNVML(broken), None).sample({42, 43})
    assert (
        row["gpu_power_w"] is None
        and row["gpu_memory_used"] is None
        and row["gpu_process_memory"] is None
    )
    described = Gpu(FakeNVML(), None).describe()
    assert (
        described["uuid"] == "GPU-1234"
        and described["power_limit_w"] == 700
        and described["driver"] == "580.1"
    )


def test_telemetry_rows_hold_the_gpu() -> None:
    telemetry = Telemetry(os.getpid(), Gpu(FakeNVML(), None))
    row = telemetry.sample()
    assert row is not None and row["gpu_power_w"] == 300 and row["rss"] > 0


def test_a_run_on_the_cpu_has_no_gpu() -> None:
    gpu = open_gpu("cpu")
    assert not gpu.present and "cpu" in str(gpu.reason)
    assert gpu.sample({1}) == {} and gpu.describe() == {} and gpu.energy_joules() is None


def test_hidden_gpus_stay_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not open_gpu("auto").present


def test_a_visible_gpu_may_be_named_by_the_beginning_of_its_uuid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML(("nvmlDeviceGetHandleByUUID",)))
    for visible, present in (("GPU-12", True), ("GPU-1234", True), ("GPU-9", False), ("0", True)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert open_gpu("cuda").present == present, visible


def test_peaks_leave_out_the_probe() -> None:
    rows: list[dict[str, Any]] = [
        {"phase": "loading", "rss": 5},
        {"phase": "probing", "rss": 50},
        {"phase": "measuring", "rss": None},
    ]
    assert peak(rows, "rss") == 5
    assert peak(rows, "gpu_process_memory") is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_own_peak_can_be_reset() -> None:
    # A mapping of its own: an allocator may keep memory that is freed, munmap gives it back.
    with mmap.mmap(-1, 64 << 20) as hoard:
        for start in range(0, len(hoard), mmap.PAGESIZE):
            hoard[start] = 1
        high = own_peak_rss()
    if not module.reset_own_peak_rss():
        pytest.skip("the kernel does not let us")
    low = own_peak_rss()
    assert high is not None and low is not None and high - low > 32 << 20
