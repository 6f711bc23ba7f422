"""The hardware under an engine: its limits, the energy of a measured window, and the memory that it
took."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from typing import Any

from minivllm.bench.hardware.energy import NullMeter, open_meter
from minivllm.bench.hardware.gpu import NullGpu, device_of, open_gpu
from minivllm.bench.hardware.limits import last_level_cache, probe
from minivllm.bench.hardware.readings import DeviceEnergy, Energy, Roofline
from minivllm.bench.hardware.telemetry import own_peak_rss, reset_own_peak_rss
from minivllm.bench.metrics.roofline import exceeds, raised, usage
from minivllm.bench.metrics.rows import Rows, kv_waste
from minivllm.bench.records.figures import Memory
from minivllm.bench.records.record import SERVERS_MEMORY
from minivllm.config.groups import Config
from minivllm.config.support import is_elsewhere
from minivllm.engines.base import BenchEngine
from minivllm.platform.devices import device_indices

NOT_COMPUTED = "simulated: nothing was computed"
# A clock that rises by less, or has so much of its greatest, is as high as it gets; and most
# warm-ups that wait for it.
RISING, HIGH, MOST_WARM_UPS = 1.05, 0.95, 8


class EngineHardware:
    """What is measured of the machine beside an engine that has just been loaded.

    Attributes:
        notes: sentences on the limits, for every record.

    Args:
        engine: the engine; a simulated one has no hardware.
        config: the resolved configuration.
        emit: tells the supervisor what goes on.
    """

    def __init__(
        self, engine: BenchEngine, config: dict[str, Any], emit: Callable[..., None]
    ) -> None:
        self.notes: list[str] = []
        self._engine, self._config, self._emit = engine, config, emit
        self._load_peak = self._peak_rss()
        self._gpu = NullGpu()
        self._meter: NullMeter = NullMeter(NOT_COMPUTED)
        self._idle_watts: float | None = None
        self._limits = Roofline()
        self._probed = False
        self._names: list[str | None] = []  # of several devices

    @property
    def device(self) -> str:
        """Where the engine computes, as torch writes it."""
        return device_of(self._config, self._engine.info.model.get("device"))

    @property
    def assembler(self) -> str | None:
        """Release of the assembler of Triton's kernels; None where a GPU has none of them."""
        triton, torch = sys.modules.get("triton"), sys.modules.get("torch")
        if triton is None or torch is None or not self.device.startswith("cuda"):
            return None
        newer = torch.cuda.get_device_capability(self._first) >= (10, 0)
        try:
            tools = triton.knobs.nvidia
            return str((tools.ptxas_blackwell if newer else tools.ptxas).version)
        except (AttributeError, RuntimeError):  # another release of Triton, or no such program
            return None

    @property
    def _first(self) -> str:
        """The first of several devices, whose rank tells its steps: the roofline is that of one."""
        return re.split("[,-]", self.device)[0]

    def probe_once(self) -> None:
        """Measure the hardware's limits and the idle power, with the engine loaded and at rest."""
        if self._probed:
            return
        self._probed = True
        if self._engine.info.clock is not None:
            return
        device, costs = self.device, self._engine.info.model
        # Before the probes, whose heat a GPU's counter still tells of when they have ended.
        gpu = self._gpu = open_gpu(device)
        self._names = [one.describe().get("name") for one in gpu.each]
        reason = self._engine.info.unmetered
        self._meter = (
            open_meter(device, gpu, _synchroniser(device)) if reason is None else NullMeter(reason)
        )
        self._idle_watts = self._meter.idle_watts()
        if Config.of(self._config).measure.roofline and "dtype" in costs and "torch" in sys.modules:
            self._emit("probing")
            self._limits, notes = probe(
                self._first, costs.get("matrix_dtype") or costs.get("dtype", "float32")
            )
            self.notes += notes
            if not reset_own_peak_rss():
                self.notes.append("host_rss_peak may include the bandwidth probe's buffer")

    def reached(self, steps: Rows, overlapped: bool, duration_s: float | None) -> Roofline:
        """The limits, and the shares of them that a run reached.

        A run that passes the limits says that others used the machine while they were measured:
        then they are measured again.
        """

        def against(limits: Roofline) -> Roofline:
            model = self._engine.info.model
            return usage(model, steps, limits, self._cache_bytes(), overlapped, duration_s)

        found = against(self._limits)
        if not exceeds(found):
            return found
        self._limits = raised(self._limits, self._first, against)
        self.notes.append(
            "the hardware's limits were measured again, after a run that had passed the first "
            "figures"
        )
        return against(self._limits)

    def _cache_bytes(self) -> int | None:
        """Bytes of the last cache before the memory that the engine computes from."""
        torch = sys.modules.get("torch")
        if self.device.startswith("cuda") and torch is not None:
            return int(torch.cuda.get_device_properties(self._first).L2_cache_size)
        return last_level_cache()

    def warmed_up(self, warm_up: Callable[[], float | None]) -> float | None:
        """What the first warm-up returns; it is repeated while a GPU's clock, which was low while
        the GPU waited, still rises."""
        first, before = warm_up(), self._clock_mhz()
        enough = HIGH * (self._gpu.describe().get("max_sm_mhz") or math.inf)
        for _ in range(MOST_WARM_UPS - 1 if first is not None else 0):
            if before is None or before >= enough:
                break
            warm_up()
            now = self._clock_mhz()
            before = None if now is None or now <= RISING * before else now
        return first

    def _clock_mhz(self) -> float | None:
        return self._gpu.sample(()).get("gpu_sm_mhz")

    def begin_window(self) -> None:
        """Begin to count energy, and the peak of memory, which the kernel keeps from earlier
        measurements of this worker."""
        reset_own_peak_rss(self._engine.info.processes)
        self._meter.begin_window()

    def end_window(self) -> Energy:
        """The energy since `begin_window`."""
        if self._engine.info.clock is not None:
            return Energy(reason=NOT_COMPUTED)
        return self._meter.end_window(self._idle_watts)

    def each(self) -> list[tuple[str | None, DeviceEnergy]]:
        """The names of several devices, and what each took in the last window; none for one."""
        energies = self._meter.each or [DeviceEnergy() for _ in self._names]
        return list(zip(self._names, energies, strict=True))

    def _peak_rss(self) -> int | None:
        info = self._engine.info
        return own_peak_rss(info.processes, info.computes_here)

    def memory(self, steps: Rows) -> Memory:
        """Bytes that the engine took, of which a simulated one has only the waste of its blocks."""
        if self._engine.info.clock is not None:
            return Memory(kv_waste=kv_waste(steps))
        if is_elsewhere(self._config):
            return Memory(reason=SERVERS_MEMORY)
        memory = self._engine.info.memory
        known: dict[str, Any] = {
            name: memory.get(name)
            for name in ("weights", "weights_16bit", "linear", "linear_16bit", "kv_pool")
        }
        peaks = [peak for peak in (self._load_peak, self._peak_rss()) if peak is not None]
        result = Memory(**known, kv_waste=kv_waste(steps), host_rss_peak=max(peaks, default=None))
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            result.device_peak_allocated = torch.cuda.max_memory_allocated()
            result.device_peak_reserved = torch.cuda.max_memory_reserved()
        return result


def _synchroniser(device: str) -> Callable[[], object]:
    torch = sys.modules.get("torch")
    if not device.startswith("cuda") or torch is None:
        return lambda: None
    if len(indices := device_indices(device)) == 1:
        synchronise: Callable[[], object] = torch.cuda.synchronize
        return synchronise
    # Not those of other ranks: to wait for them would make a context there.
    return lambda: [torch.cuda.synchronize(i) for i in indices if torch.cuda.memory_reserved(i)]
