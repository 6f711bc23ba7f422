"""A stand-in for the module pynvml: one GPU whose counters a test sets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class FakeNVML:
    """Counters of one GPU; a reading named in `broken` raises as NVML does."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        """As pynvml's."""

    def __init__(self, broken: tuple[str, ...] = ()) -> None:
        self.broken = broken
        self.energy_mj = 0.0
        self.power_mw = 300_000
        self.readings: dict[str, Any] = {
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetName": "Fake H200",
            "nvmlDeviceGetUUID": b"GPU-1234",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=1000, used=400),
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97),
            "nvmlDeviceGetComputeRunningProcesses": [
                SimpleNamespace(pid=1, usedGpuMemory=5),
                SimpleNamespace(pid=42, usedGpuMemory=300),
            ],
            "nvmlDeviceGetClockInfo": 1500,
            "nvmlDeviceGetTemperature": 60,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0,
        }

    def nvmlInit(self) -> None:
        """Nothing to do."""

    def nvmlDeviceGetCount(self) -> int:
        """GPUs."""
        return 1

    def nvmlShutdown(self) -> None:
        """Nothing to do."""

    def nvmlSystemGetDriverVersion(self) -> str:
        """Driver version."""
        return "580.1"

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)

        def read(handle: object, *args: object) -> Any:
            if name in self.broken:
                raise self.NVMLError("Not Supported")
            if name == "nvmlDeviceGetTotalEnergyConsumption":
                return self.energy_mj
            return self.power_mw if name == "nvmlDeviceGetPowerUsage" else self.readings[name]

        return read
