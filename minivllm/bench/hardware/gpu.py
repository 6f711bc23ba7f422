"""The GPU as its driver sees it, read through NVML without touching torch or CUDA."""

from __future__ import annotations

import functools
import operator
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from minivllm.errors import BadInput
from minivllm.platform.devices import device_indices
from minivllm.redaction import hide


class NullGpu:
    """Stands in where there is no GPU, or where the run does not use one. Every reading is None."""

    present = False
    reason: str | None

    def __init__(self, reason: str = "no GPU in use") -> None:
        self.reason = reason

    def describe(self) -> dict[str, Any]:
        """Name, driver and identity; empty here."""
        return {}

    def sample(self, pids: Collection[int]) -> dict[str, float | int | None]:
        """One row of telemetry; empty here."""
        return {}

    def energy_joules(self) -> float | None:
        """The driver's energy counter; none here."""
        return None

    def power_watts(self) -> float | None:
        """Present power draw; none here."""
        return None

    @property
    def each(self) -> Sequence[NullGpu]:
        """The GPUs that this one stands for, where it stands for several; else none."""
        return ()


class Gpu(NullGpu):
    """One NVIDIA GPU. A reading that the driver does not offer is None.

    Args:
        nvml: the module `pynvml`, initialised (or a stand-in for it).
        handle: NVML's device handle.
    """

    present = True

    def __init__(self, nvml: Any, handle: Any) -> None:
        super().__init__("")
        self.reason = None
        self._nvml = nvml
        self._handle = handle

    def _read(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self._nvml, name)(self._handle, *args)
        except self._nvml.NVMLError:
            return None

    def describe(self) -> dict[str, Any]:
        """Name, UUID, driver version, maximum clocks (MHz), power limit (W), memory (bytes)."""
        memory = self._read("nvmlDeviceGetMemoryInfo")
        limit = self._read("nvmlDeviceGetEnforcedPowerLimit")
        return {
            "name": _text(self._read("nvmlDeviceGetName")),
            "uuid": _text(self._read("nvmlDeviceGetUUID")),
            "driver": _text(self._nvml.nvmlSystemGetDriverVersion()),
            "memory": None if memory is None else int(memory.total),
            "power_limit_w": None if limit is None else limit / 1000,
            "max_sm_mhz": self._read("nvmlDeviceGetMaxClockInfo", self._nvml.NVML_CLOCK_SM),
            "max_memory_mhz": self._read("nvmlDeviceGetMaxClockInfo", self._nvml.NVML_CLOCK_MEM),
        }

    def sample(self, pids: Collection[int]) -> dict[str, float | int | None]:
        """One row of telemetry: power, memory, clocks, utilisation, throttling, and the memory of
        `pids`."""
        memory = self._read("nvmlDeviceGetMemoryInfo")
        utilisation = self._read("nvmlDeviceGetUtilizationRates")
        processes = self._read("nvmlDeviceGetComputeRunningProcesses") or []
        own = [process.usedGpuMemory for process in processes if process.pid in pids]
        return {
            "gpu_power_w": self.power_watts(),
            "gpu_memory_used": None if memory is None else int(memory.used),
            "gpu_process_memory": sum(filter(None, own)) or None,
            "gpu_processes": len(processes),
            # In a container the driver may know the worker by a number that we do not: it is taken
            # for one process.
            "gpu_other_processes": max(0, len(processes) - max(1, len(own))),
            "gpu_utilisation": None if utilisation is None else utilisation.gpu,
            "gpu_sm_mhz": self._read("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM),
            "gpu_memory_mhz": self._read("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_MEM),
            "gpu_temperature": self._read(
                "nvmlDeviceGetTemperature", self._nvml.NVML_TEMPERATURE_GPU
            ),
            "gpu_throttle_reasons": self._read("nvmlDeviceGetCurrentClocksThrottleReasons"),
        }

    def energy_joules(self) -> float | None:
        """The driver's energy counter since it was loaded, in joules."""
        millijoules = self._read("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1000

    def power_watts(self) -> float | None:
        """Present power draw in watts."""
        milliwatts = self._read("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1000


class GpuGroup(NullGpu):
    """Several GPUs as one: power, memory and energy are sums.

    Args:
        gpus: two or more.
    """

    present = True

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        super().__init__("")
        self.reason = None
        self._gpus = tuple(gpus)

    @property
    def each(self) -> Sequence[NullGpu]:
        """The GPUs."""
        return self._gpus

    def describe(self) -> dict[str, Any]:
        """As of one GPU, with sums of memory and power limits, and each one's own below `each`."""
        each = [gpu.describe() for gpu in self._gpus]
        names = [str(one["name"]) for one in each]
        name = f"{len(each)} x {names[0]}" if len(set(names)) == 1 else " + ".join(names)
        return {
            **each[0],
            "name": name,
            "memory": _total(one["memory"] for one in each),
            "power_limit_w": _total(one["power_limit_w"] for one in each),
            "each": each,
        }

    def sample(self, pids: Collection[int]) -> dict[str, float | int | None]:
        """A row with sums of power, memory and processes, the lowest clock, the highest
        temperature, and what each GPU has of power and memory in columns that end in its place."""
        rows = [gpu.sample(pids) for gpu in self._gpus]
        result = {name: _JOINED.get(name, _total)([row[name] for row in rows]) for name in rows[0]}
        for place, row in enumerate(rows):
            result |= {f"{name}_{place}": row[name] for name in OF_EACH}
        return result

    def energy_joules(self) -> float | None:
        """The sum of the energy counters; None where one cannot be read."""
        return _total(gpu.energy_joules() for gpu in self._gpus)

    def power_watts(self) -> float | None:
        """The sum of the present power draws."""
        return _total(gpu.power_watts() for gpu in self._gpus)


def _total(values: Iterable[Any]) -> Any:
    known = list(values)
    return None if None in known else sum(known)


def _known(choose: Callable[[list[Any]], Any]) -> Callable[[Iterable[Any]], Any]:
    """A choice among the values that were read; None where none was."""

    def chosen(values: Iterable[Any]) -> Any:
        known = [value for value in values if value is not None]
        return choose(known) if known else None

    return chosen


def _any_bit(values: list[int]) -> int:
    return functools.reduce(operator.or_, values)


# What is given of each GPU, and how what is no sum comes together.
OF_EACH = ("gpu_power_w", "gpu_memory_used", "gpu_process_memory")
_JOINED: dict[str, Callable[[Iterable[Any]], Any]] = {
    "gpu_process_memory": _known(sum),
    "gpu_processes": _known(max),
    "gpu_other_processes": _known(max),
    "gpu_utilisation": _known(lambda values: sum(values) / len(values)),
    "gpu_sm_mhz": _known(min),
    "gpu_memory_mhz": _known(min),
    "gpu_temperature": _known(max),
    "gpu_throttle_reasons": _known(_any_bit),
}


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def _by_uuid(nvml: Any, name: str) -> Any:
    """The handle of a GPU by its UUID, or by as much of its beginning as CUDA_VISIBLE_DEVICES may
    say."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(name)
    except nvml.NVMLError:
        for index in range(nvml.nvmlDeviceGetCount()):
            with suppress(nvml.NVMLError):  # one that is lost
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                if (_text(nvml.nvmlDeviceGetUUID(handle)) or "").startswith(name):
                    return handle
        raise


def device_of(config: dict[str, Any], override: str | None = None) -> str:
    """What the engine of a run computes on, as far as this process can tell.

    Args:
        config: the resolved configuration.
        override: the device that the loaded engine reports; it wins over the configuration.

    Returns:
        "cpu", "cuda..." or, of a server that runs already, "server at <url>", unless
        `runtime.device` claims it for here.
    """
    device = str(override or (config.get("runtime") or {}).get("device") or "auto")
    if device != "auto":
        return device
    engine = config.get("engine") or {}
    if engine.get("url") and not engine.get("command"):
        return f"server at {hide(str(engine['url']), strict=True)}"
    torch = sys.modules.get("torch")  # a process that does without is not made to load it
    has_gpu = open_gpu("auto").present or (torch is not None and torch.cuda.is_available())
    return "cuda" if has_gpu else "cpu"


def open_gpu(device: str) -> NullGpu:
    """The GPU that `runtime.device` means, as CUDA numbers it by the bus
    (CUDA_DEVICE_ORDER=PCI_BUS_ID), or a null object.

    Args:
        device: "auto", or one that `device_of` returns.

    Returns:
        `Gpu`, `GpuGroup` for a device that names several, or `NullGpu` whose `reason` says why
        there is none.
    """
    if device != "auto" and not device.startswith("cuda"):
        return NullGpu(f"the run is on device {device!r}")
    if device == "auto" and not is_torch_for_gpus():
        return NullGpu("runtime.device=auto is the CPU: the torch that is installed knows no GPU")
    try:
        import pynvml
    except ImportError:
        return NullGpu("pynvml (package nvidia-ml-py) is not installed")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        pynvml.nvmlInit()
        gpus = [_open(pynvml, index, visible) for index in device_indices(device)]
        return gpus[0] if len(gpus) == 1 else GpuGroup(gpus)
    except LookupError:
        return NullGpu("CUDA_VISIBLE_DEVICES hides every GPU")
    except pynvml.NVMLError as error:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
        return NullGpu(f"NVML: {error}")


def _open(nvml: Any, index: int, visible: str | None) -> Gpu:
    """One GPU by its number of CUDA; LookupError where CUDA_VISIBLE_DEVICES hides it."""
    if visible is not None:  # CUDA numbers only the visible devices, NVML numbers all
        names = [name.strip() for name in visible.split(",") if name.strip()]
        if names[index] == "-1":
            raise LookupError
        if not names[index].isdigit():
            return Gpu(nvml, _by_uuid(nvml, names[index]))
        index = int(names[index])
    return Gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index))


def replica_gpus(config: dict[str, Any]) -> list[int]:
    """The numbers of the GPUs that replicas are placed on; none: they compute on CPUs.

    Raises:
        BadInput: the replicas would share the one GPU that `runtime.device` means.
    """
    device = device_of(config)
    if not device.startswith("cuda"):
        return []
    if ":" not in device:
        parallel = config.get("parallel") or {}
        replicas, ranks = (parallel.get(degree, 1) for degree in ("replicas", "tensor"))
        whose = "each replica" if ranks == 1 else "each rank of each replica"
        raise BadInput(
            f"parallel.replicas={replicas}: name a GPU for {whose}, such as "
            f"runtime.device=cuda:0-{replicas * ranks - 1}"
        )
    return device_indices(device)


def visible_devices(device: str) -> dict[str, str]:
    """The environment of a process to which only the GPUs that a device names by number are
    visible; empty for one that names none."""
    if not device.startswith("cuda:"):
        return {}
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    names = [
        visible[index] if index < len(visible) else str(index) for index in device_indices(device)
    ]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


@cache
def is_torch_for_gpus() -> bool:
    """Whether the installed torch was built with CUDA, found without importing it; True where
    nothing tells."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return True
    return re.search(r"^cuda\b[^=\n]*=\s*None", text, re.MULTILINE) is None
