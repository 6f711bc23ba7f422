"""Energy is read from a counter or is null with the reason."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from minivllm.bench.hardware import energy as module
from minivllm.bench.hardware.energy import open_meter, per_token
from minivllm.bench.hardware.gpu import Gpu, NullGpu
from tests.bench.fake_nvml import FakeNVML


class Time:
    """Stands in for the module time: sleeping passes time at once."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(module, "time", time)
    return time


def test_the_window_alone_is_counted(clock: Time) -> None:
    nvml, calls = FakeNVML(), []
    meter = open_meter("cuda", Gpu(nvml, None), lambda: calls.append(nvml.energy_mj))
    nvml.energy_mj = 5_000_000  # loading the model costs energy that is not the window's
    meter.begin_window()
    clock.now += 10
    nvml.energy_mj += 4_000_000
    result = meter.end_window(idle_watts=100.0)
    nvml.energy_mj += 9_000_000
    assert result.joules == pytest.approx(4000)
    assert per_token(result, 2000) == pytest.approx(2) and per_token(result, 0) is None
    assert result.mean_watts == pytest.approx(400)
    assert result.window_s == pytest.approx(10)
    assert (result.idle_watts, result.joules_above_idle) == (100.0, pytest.approx(3000))
    assert (result.method, result.reason) == ("nvml", None)
    assert calls == [5_000_000, 9_000_000]  # synchronised before each reading, at the window's ends


def test_a_short_gpu_window_is_flagged(clock: Time) -> None:
    nvml = FakeNVML()
    meter = open_meter("cuda:0", Gpu(nvml, None))
    meter.begin_window()
    clock.now += 4.9
    nvml.energy_mj += 1000
    result = meter.end_window()
    assert result.joules == pytest.approx(1)
    assert result.reason is not None and "4.9 s is below 5 s" in result.reason


def test_idle_power(clock: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNVML()

    def sleep(seconds: float) -> None:
        watts = 600 if clock.now < 101 else 80  # what was done before it is told late
        clock.now += seconds
        nvml.energy_mj += 1000 * watts * seconds

    monkeypatch.setattr(clock, "sleep", sleep)
    assert open_meter("cuda", Gpu(nvml, None)).idle_watts() == pytest.approx(80)


@pytest.mark.parametrize(("window_s", "known"), [(0.1, False), (1.9, False), (2.1, True)])
def test_energy_of_fewer_than_twenty_ticks_is_no_reading(
    clock: Time, window_s: float, known: bool
) -> None:
    """One tick more or less of a counter that moves every 0.1 s would be a large part of it."""
    nvml = FakeNVML()
    gpu = Gpu(nvml, None)
    for meter in (open_meter("cuda", gpu), module.GroupMeter([gpu, gpu])):
        meter.begin_window()
        clock.now += window_s
        nvml.energy_mj += 30_000
        result = meter.end_window(idle_watts=100.0)
        figures = (result.joules, result.mean_watts, result.joules_above_idle)
        assert all((figure is not None) is known for figure in figures)
        assert all((one.joules is not None) is known for one in meter.each)
        assert known or result.reason == (
            f"the nvml energy counter moves every 0.1 s: a window of {window_s:.2g} s is below 20 "
            "of its ticks"
        )


def test_a_counter_that_moves_less_often_than_it_should_has_longer_ticks(
    clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNVML()

    def sleep(seconds: float) -> None:
        clock.now += seconds
        nvml.energy_mj = 80_000 * int(clock.now - 100)  # every second

    monkeypatch.setattr(clock, "sleep", sleep)
    meter = open_meter("cuda", Gpu(nvml, None))
    assert meter.idle_watts() is None  # two ticks
    meter.begin_window()
    clock.now += 10
    nvml.energy_mj += 800_000
    energy = meter.end_window()
    assert energy.joules is None and "counter moves every 2 s" in str(energy.reason)


def test_no_counter_is_null_with_the_reason(tmp_path: Path) -> None:
    old = Gpu(FakeNVML(broken=("nvmlDeviceGetTotalEnergyConsumption",)), None)
    for meter, words in (
        (open_meter("cuda", old), "no energy counter"),
        (open_meter("cuda", NullGpu("NVML: not found")), "NVML: not found"),
        (open_meter("cpu", NullGpu(), root=tmp_path), "no energy counter"),
        (
            open_meter("server at http://x", NullGpu()),
            "may be another machine: runtime.device=cpu or cuda",
        ),
    ):
        meter.begin_window()
        result = meter.end_window(5.0)
        assert result.joules is None and per_token(result, 10) is None and result.method is None
        assert result.window_s is not None
        assert result.reason is not None and words in result.reason
        assert meter.idle_watts() is None


def test_a_counter_that_fails_midway(clock: Time) -> None:
    nvml = FakeNVML()
    meter = open_meter("cuda", Gpu(nvml, None))
    meter.begin_window()
    clock.now += 6
    nvml.broken = ("nvmlDeviceGetTotalEnergyConsumption",)
    result = meter.end_window()
    assert result.joules is None and "could not be read" in str(result.reason)


def replace(file: Path, text: str) -> None:
    """At once: a thread may be reading it."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


def zone(root: Path, name: str, kind: str, energy: int, wrap: int = 1_000_000_000) -> Path:
    folder = root / name
    folder.mkdir()
    (folder / "name").write_text(kind + "\n")
    (folder / "energy_uj").write_text(str(energy))
    (folder / "max_energy_range_uj").write_text(str(wrap))
    return folder / "energy_uj"


def test_rapl_adds_packages_and_memory_and_unwraps(tmp_path: Path, clock: Time) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 990_000_000)
    core = zone(tmp_path, "intel-rapl:0:0", "core", 0)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 1_000_000)
    whole = zone(tmp_path, "intel-rapl:1", "psys", 0)
    meter = open_meter("cpu", NullGpu(), root=tmp_path)
    meter.begin_window()
    clock.now += 2
    package.write_text("20000000")  # 10 J up to the wrap, 20 J after it
    memory.write_text("6000000")
    core.write_text("99000000")
    whole.write_text("99000000")
    result = meter.end_window()
    assert result.joules == pytest.approx(35)
    assert result.mean_watts == pytest.approx(17.5)
    assert per_token(result, 7) == pytest.approx(5)
    assert (result.method, result.reason) == ("rapl", None)  # a short window is no worry on a CPU


def test_a_counter_that_wraps_twice_in_a_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 900_000_000)
    seen = threading.Event()
    read = module.Rapl.read

    def watched(rapl: module.Rapl) -> float | None:
        joules = read(rapl)
        if package.read_text() == "100000000":
            seen.set()
        return joules

    monkeypatch.setattr(module.Rapl, "read", watched)
    monkeypatch.setattr(module, "RAPL_EVERY_S", 0.01)
    monkeypatch.setattr(module, "RAPL_TICK_S", 0.0)
    meter = open_meter("cpu", NullGpu(), root=tmp_path)
    for _ in range(2):  # the thread that reads is begun anew in each window
        before = threading.active_count()
        package.write_text("900000000")
        meter.begin_window()
        replace(package, "100000000")
        assert seen.wait(60)
        replace(package, "50000000")
        assert meter.end_window().joules == pytest.approx(200 + 950)
        assert threading.active_count() == before
        seen.clear()


def test_rapl_that_only_root_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 1)

    def refuse(path: Path) -> float:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(module.Rapl, "_microjoules", staticmethod(refuse))
    meter = open_meter("cpu", NullGpu(), root=tmp_path)
    assert "not readable by this user" in meter.reason
