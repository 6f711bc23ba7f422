"""Several GPUs as one: what is summed, what is given of each, which of them a device names."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minivllm import BadInput
from minivllm.bench import device_lock as locking
from minivllm.bench.hardware import energy as energy_module
from minivllm.bench.hardware.energy import open_meter
from minivllm.bench.hardware.gpu import Gpu, GpuGroup, open_gpu, replica_gpus, visible_devices
from minivllm.bench.hardware.readings import DeviceEnergy, Energy
from minivllm.bench.hardware.telemetry import Telemetry, peak
from minivllm.bench.metrics.price import by_device, cost
from minivllm.bench.records.figures import Metrics
from minivllm.config.compose import compose
from minivllm.engines.supported_knobs import require_supported
from minivllm.platform.devices import device_indices
from tests.bench.fake_nvml import FakeNVML


class SeveralNVML(FakeNVML):
    """GPUs 0, 1, ...; that of place n has n times as much of everything, and one more."""

    def __init__(self, broken: tuple[str, ...] = ()) -> None:
        super().__init__(broken)
        self.joules = [0.0] * 4

    def __getattr__(self, name: str) -> Any:
        read = super().__getattr__(name)
        if name == "nvmlDeviceGetHandleByIndex":
            return lambda index: index
        if name == "nvmlDeviceGetUUID":
            return lambda handle: f"GPU-{handle}"
        if name == "nvmlDeviceGetTotalEnergyConsumption" and name not in self.broken:
            return lambda handle: 1000 * self.joules[handle]
        if name == "nvmlDeviceGetMemoryInfo":
            return lambda handle: SimpleNamespace(total=1000, used=400 * (1 + handle))
        if name == "nvmlDeviceGetClockInfo":
            return lambda handle, clock: 1500 - 100 * handle
        if name == "nvmlDeviceGetCurrentClocksThrottleReasons":
            return lambda handle: 1 << handle
        return read


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SeveralNVML:
    fake = SeveralNVML()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


@pytest.mark.parametrize(
    ("device", "indices"),
    [
        ("auto", [0]),
        ("cuda", [0]),
        ("cuda:3", [3]),
        ("cuda:0-2", [0, 1, 2]),
        ("cuda:2,0", [2, 0]),
        ("cuda:0-1,1-2,5", [0, 1, 2, 5]),
    ],
)
def test_a_device_names_gpus(device: str, indices: list[int]) -> None:
    assert device_indices(device) == indices


@pytest.mark.parametrize(
    ("device", "visible", "names"),
    [
        ("cuda:1", None, "1"),
        ("cuda:0-2", None, "0,1,2"),
        ("cuda:1,0", "7,GPU-x", "GPU-x,7"),
        ("cuda", "7", None),
        ("cpu", None, None),
    ],
)
def test_a_process_sees_the_gpus_that_its_device_names(
    device: str, visible: str | None, names: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_devices(device).get("CUDA_VISIBLE_DEVICES") == names


@pytest.mark.parametrize("device", ["cuda:", "cuda:1-", "cuda:2-1", "cuda:a", "cuda:0;1", "cpu:1"])
def test_what_names_none_is_an_error(device: str) -> None:
    with pytest.raises(BadInput, match=r"runtime\.device="):
        compose([f"runtime.device='{device}'"])


def test_several_are_opened_as_one(nvml: SeveralNVML, monkeypatch: pytest.MonkeyPatch) -> None:
    group = open_gpu("cuda:0-1")
    assert isinstance(group, GpuGroup) and group.present and len(group.each) == 2
    assert type(open_gpu("cuda:1")) is Gpu and open_gpu("cuda:1").each == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert [one.describe()["uuid"] for one in open_gpu("cuda:0-1").each] == ["GPU-3", "GPU-1"]
    assert open_gpu("cuda:0-2").reason == "CUDA_VISIBLE_DEVICES hides every GPU"


def test_readings_are_sums_and_each_ones_own(nvml: SeveralNVML) -> None:
    group = open_gpu("cuda:0-1")
    described = group.describe()
    assert described["name"] == "2 x Fake H200" and described["memory"] == 2000
    assert described["power_limit_w"] == 1400
    assert [one["uuid"] for one in described["each"]] == ["GPU-0", "GPU-1"]
    row = group.sample({42})
    assert row["gpu_power_w"] == 600 == 2 * (row["gpu_power_w_1"] or 0)
    assert (row["gpu_memory_used"], row["gpu_memory_used_0"], row["gpu_memory_used_1"]) == (
        *(1200, 400, 800),
    )
    assert (row["gpu_process_memory"], row["gpu_process_memory_0"]) == (600, 300)
    assert row["gpu_other_processes"] == 1 and row["gpu_utilisation"] == 97
    assert row["gpu_sm_mhz"] == 1400  # the slower one's
    assert row["gpu_throttle_reasons"] == 0b11
    one = open_gpu("cuda:1").sample({42})
    assert set(one) == {name for name in row if not name[-1].isdigit()}


def test_a_reading_that_one_of_them_lacks_is_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", SeveralNVML(("nvmlDeviceGetPowerUsage",)))
    group = open_gpu("cuda:0-1")
    assert group.power_watts() is None and group.sample(())["gpu_power_w"] is None
    assert group.sample(())["gpu_process_memory"] is None  # of none of the processes


def test_energy_is_the_sum_and_each_ones_own(
    nvml: SeveralNVML, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now, sleep=lambda s: None, now=0.0)
    monkeypatch.setattr(energy_module, "time", clock)
    meter = open_meter("cuda:0-1", open_gpu("cuda:0-1"))
    nvml.joules[:2] = [5000.0, 7000.0]
    meter.begin_window()
    clock.now = 10.0
    nvml.joules[:2] = [6000.0, 10_000.0]
    energy = meter.end_window(idle_watts=100.0)
    assert (energy.joules, energy.mean_watts, energy.joules_above_idle) == (4000, 400, 3000)
    assert meter.each == [DeviceEnergy(1000, 100), DeviceEnergy(3000, 300)]
    meter.begin_window()
    clock.now = 20.0
    nvml.broken = ("nvmlDeviceGetTotalEnergyConsumption",)
    assert meter.end_window().joules is None
    assert meter.each == [DeviceEnergy(), DeviceEnergy()]


def test_cost_and_throughput_of_each() -> None:
    """Two devices for half an hour at 4 an hour: 2 each; and 2 kWh of the first, 1 of the other at
    0.5."""
    price = {"device_hour": 4.0, "kwh": 0.5}
    metrics = Metrics(
        output_tokens=2_000_000, duration_s=1800, output_tokens_per_s=1000.0, requests_per_s=3.0
    )
    each = [("A", DeviceEnergy(7.2e6, 4000.0)), ("B", DeviceEnergy(3.6e6, 2000.0))]
    devices = by_device(each, metrics, metrics, price)
    assert devices is not None and devices.count == 2
    assert (devices.output_tokens_per_s, devices.requests_per_s) == (500, 1.5)
    assert devices.total_tokens_per_s is None
    costs = [device.cost_per_million_output_tokens for device in devices.each]
    assert costs == pytest.approx([(2 + 1) / 2, (2 + 0.5) / 2])
    together = cost(price, metrics, Energy(joules=10.8e6), devices=2)
    assert together.per_million_output_tokens == pytest.approx(sum(map(float, costs)))  # type: ignore[arg-type]
    assert by_device([], metrics, metrics, price) is None


def test_the_peak_of_each_is_in_telemetry(nvml: SeveralNVML) -> None:
    telemetry = Telemetry(os.getpid(), open_gpu("cuda:0-1"))
    row = telemetry.sample()
    assert row is not None
    assert peak([row], "gpu_memory_used_1") == 800


def test_every_device_is_locked(
    nvml: SeveralNVML, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locking.tempfile, "gettempdir", lambda: str(tmp_path))

    def config(device: str) -> dict[str, Any]:
        return {"runtime": {"device": device}, "engine": {"_target_": "some.Engine"}}

    waited: list[str] = []

    def waiting(holder: str) -> None:
        waited.append(holder)
        held.close()  # or it would wait for ever

    with ExitStack() as held:
        held.enter_context(locking.device_lock(config("cuda:1")))
        with locking.device_lock(config("cuda:0")):  # another one is free
            pass
        with locking.device_lock(config("cuda:0-1"), waiting):
            assert {path.name for path in tmp_path.iterdir()} == {
                *("minivllm-GPU-0.lock", "minivllm-GPU-1.lock"),
            }
            assert all(path.read_text() for path in tmp_path.iterdir())
    assert len(waited) == 1 and "process" in waited[0]
    assert not any(path.read_text() for path in tmp_path.iterdir())


def test_an_engine_of_one_device_takes_one() -> None:
    for engine in ("minivllm", "transformers"):
        config = compose([f"engine={engine}", "runtime.device=cuda:0-1"])
        with pytest.raises(BadInput, match=rf"engine={engine} computes on one device"):
            require_supported(config)
    require_supported(compose(["engine=openai", "runtime.device=cuda:0-1"]))


def test_gpus_are_named_one_by_one() -> None:
    assert replica_gpus(compose(["runtime.device=cpu", "parallel.replicas=2"])) == []
    assert replica_gpus(compose(["runtime.device=cuda:0-1", "parallel.replicas=2"])) == [0, 1]
    with pytest.raises(BadInput, match=r"runtime\.device=cuda:0-1"):
        replica_gpus(compose(["runtime.device=cuda", "parallel.replicas=2"]))
    with pytest.raises(BadInput, match=r"each rank of each replica, .*=cuda:0-5"):
        replica_gpus(compose(["runtime.device=cuda", "parallel.replicas=2", "parallel.tensor=3"]))
