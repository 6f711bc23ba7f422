"""Energy of a window, from a hardware counter or not at all.

begin_window() and end_window() bracket the measured window as zeus does (https://ml.energy/zeus);
null objects stand where there is no counter, so that callers need no case for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from minivllm.bench.hardware.gpu import NullGpu
from minivllm.bench.hardware.readings import TICKS, DeviceEnergy, Energy

POWERCAP = Path("/sys/class/powercap")
SHORT_GPU_WINDOW_S = 5.0
# Seconds between two values of a counter: at least these, and more where more are seen.
NVML_TICK_S, RAPL_TICK_S = 0.1, 0.001
IDLE_S = 0.5  # over which idle power is measured at least
REST_S = 1.0  # after which it tells no more of what was before
# a counter of 262 kJ is through in 4 minutes at 1 kW, and a reading can unwrap one wrap
RAPL_EVERY_S = 60.0


class NullMeter:
    """Stands in where no energy counter can be read; says why."""

    method: str | None = None

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.each: list[DeviceEnergy] = []  # of several devices, after a window
        self._began_s: float | None = None

    def begin_window(self) -> None:
        """Note the start of the measured window."""
        self._began_s = time.monotonic()

    def end_window(self, idle_watts: float | None = None) -> Energy:
        """The window's energy: nulls, with the reason."""
        began, self._began_s = self._began_s, None
        window = None if began is None else time.monotonic() - began
        return Energy(window_s=window, method=self.method, reason=self.reason)

    def idle_watts(self, seconds: float = IDLE_S) -> float | None:
        """Power while nothing runs, watts; None here."""
        return None


class CounterMeter(NullMeter):
    """Reads a counter of joules on both sides of the window, the device idle at both readings.

    Args:
        read: the counter's value in joules; None where it fails.
        method: "nvml" or "rapl".
        synchronise: waits until the device has finished what it was given.
        short_s: windows shorter than this are flagged.
        every_s: within a window, read the counter as often as this; None where it never wraps
            around.
        tick_s: seconds between two values of the counter. What it gains in fewer than TICKS of them
            is not a reading.
    """

    def __init__(
        self,
        read: Callable[[], float | None],
        method: str,
        synchronise: Callable[[], object] = lambda: None,
        short_s: float = 0.0,
        every_s: float | None = None,
        tick_s: float = 0.0,
    ) -> None:
        super().__init__("")
        self.method = method
        self._read = read
        self._synchronise = synchronise
        self._short = short_s
        self._every = every_s
        self._tick = tick_s
        self._ended = threading.Event()
        self._reader: threading.Thread | None = None
        self._began_joules: float | None = None

    def begin_window(self) -> None:
        """Wait for the device, then read the counter."""
        self._synchronise()
        self._began_joules = self._read()
        if self._every is not None:
            self._ended.clear()
            self._reader = threading.Thread(target=self._keep_reading, name="energy", daemon=True)
            self._reader.start()
        super().begin_window()

    def _keep_reading(self) -> None:
        while not self._ended.wait(self._every):
            self._read()

    def end_window(self, idle_watts: float | None = None) -> Energy:
        """Wait for the device, read the counter again, and make figures of the difference.

        Args:
            idle_watts: from `idle_watts()`, for the joules that the work alone took.
        """
        self._synchronise()
        if self._reader is not None:
            self._ended.set()
            self._reader.join()
            self._reader = None
        ended = self._read()
        energy = super().end_window()
        energy.reason = None
        if self._began_joules is None or ended is None or not energy.window_s:
            energy.reason = f"the {self.method} energy counter could not be read"
            return energy
        joules = ended - self._began_joules
        if joules < 0:
            energy.reason = f"the {self.method} energy counter ran backwards"
            return energy
        if self._too_short(energy.window_s):
            energy.reason = (
                f"the {self.method} energy counter moves every {self._tick:.2g} s: a window of "
                f"{energy.window_s:.2g} s is below {TICKS} of its ticks"
            )
            return energy
        energy.joules = joules
        energy.mean_watts = joules / energy.window_s
        energy.idle_watts = idle_watts
        if idle_watts is not None:
            energy.joules_above_idle = joules - idle_watts * energy.window_s
        if energy.window_s < self._short:
            energy.reason = (
                f"window of {energy.window_s:.1f} s is below {self._short:g} s: coarse reading"
            )
        return energy

    def idle_watts(self, seconds: float = IDLE_S) -> float | None:
        """Mean power over `seconds`, or over TICKS of the counter where that is more, in which the
        caller gives the device nothing to do, after some rest, watts.

        Meanwhile the counter is looked at as often as it should move: one that moves less often has
        longer ticks, and one that hardly moves gives no reading.
        """
        self._synchronise()
        time.sleep(REST_S)
        began, first = time.monotonic(), self._read()
        looks, moves, last = 2 * TICKS, 0, first
        for _ in range(looks):
            time.sleep(max(seconds, TICKS * self._tick) / looks)
            now = self._read()
            moves, last = moves + (now != last), now
        span = time.monotonic() - began
        if first is None or last is None or last < first:
            return None
        if moves < looks / 2:
            self._tick = max(self._tick, span / max(moves, 1))
        return None if self._too_short(span) else (last - first) / span

    def _too_short(self, seconds: float) -> bool:
        """Whether the counter moves fewer than TICKS times within them, to the nearest move."""
        return seconds < (TICKS - 0.5) * self._tick


class GroupMeter(CounterMeter):
    """Reads the counters of several GPUs, whose sum is the energy; what each took is in `each`
    after the window.

    Args:
        gpus: each has a counter.
        synchronise: waits until all have finished what they were given.
    """

    def __init__(
        self, gpus: Sequence[NullGpu], synchronise: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(self._sum, "nvml", synchronise, SHORT_GPU_WINDOW_S, tick_s=NVML_TICK_S)
        self._gpus = gpus
        self._latest: list[float | None] = []
        self._first: list[float | None] = []

    def _sum(self) -> float | None:
        self._latest = [gpu.energy_joules() for gpu in self._gpus]
        known = [joules for joules in self._latest if joules is not None]
        return sum(known) if len(known) == len(self._latest) else None

    def begin_window(self) -> None:
        """Wait for the devices, then read their counters."""
        super().begin_window()
        self._first = self._latest

    def end_window(self, idle_watts: float | None = None) -> Energy:
        energy = super().end_window(idle_watts)
        self.each = []
        for first, last in zip(self._first, self._latest, strict=True):
            if energy.joules is None or first is None or last is None or not energy.window_s:
                self.each.append(DeviceEnergy())
            else:
                self.each.append(DeviceEnergy(last - first, (last - first) / energy.window_s))
        return energy


def per_token(energy: Energy, output_tokens: int) -> float | None:
    """Joules a token: all of the window's, over the tokens that throughput and cost count
    (`Metrics.output_tokens`)."""
    return None if energy.joules is None or not output_tokens else energy.joules / output_tokens


class Rapl:
    """Intel's and AMD's running average power limit counters, packages and memory together.

    Args:
        root: the kernel's powercap folder.

    Raises:
        OSError: there are no counters, or this user may not read them.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self._zones: list[tuple[Path, float]] = []
        for zone in sorted(root.glob("intel-rapl:*")):
            name = (zone / "name").read_text().strip()
            # Cores and uncore are part of their package; psys holds packages; memory stands beside.
            if name.startswith("package") or name == "dram":
                wrap = float((zone / "max_energy_range_uj").read_text())
                self._zones.append((zone / "energy_uj", wrap))
        if not self._zones:
            raise FileNotFoundError(f"no RAPL counters under {root}")
        self._last = [self._microjoules(path) for path, _ in self._zones]
        self._total = 0.0

    @staticmethod
    def _microjoules(path: Path) -> float:
        return float(path.read_text())

    def read(self) -> float | None:
        """Joules since construction. A counter that wrapped around once since the last reading is
        unwrapped."""
        for i, (path, wrap) in enumerate(self._zones):
            try:
                now = self._microjoules(path)
            except OSError:
                return None
            gained = now - self._last[i]
            self._total += gained if gained >= 0 else gained + wrap
            self._last[i] = now
        return self._total / 1e6


def open_meter(
    device: str,
    gpu: NullGpu,
    synchronise: Callable[[], object] = lambda: None,
    root: Path = POWERCAP,
) -> NullMeter:
    """The energy counter of the device that computes, or a null meter with the reason.

    Args:
        device: what the engine computes on, see `device_of`.
        gpu: its GPU or a null object.
        synchronise: waits for the device.
        root: the kernel's powercap folder.
    """
    if device.startswith("server"):
        return NullMeter(
            f"the {device} may be another machine: runtime.device=cpu or cuda says that it "
            "computes on this one"
        )
    if device.startswith("cuda"):
        if not gpu.present:
            return NullMeter(gpu.reason or "no GPU")
        if gpu.energy_joules() is None:
            return NullMeter("this GPU has no energy counter (NVML)")
        if gpu.each:
            return GroupMeter(gpu.each, synchronise)
        return CounterMeter(
            gpu.energy_joules, "nvml", synchronise, SHORT_GPU_WINDOW_S, tick_s=NVML_TICK_S
        )
    try:
        rapl = Rapl(root)
    except PermissionError as error:
        return NullMeter(f"RAPL counters are not readable by this user: {error.filename}")
    except (OSError, ValueError) as error:
        return NullMeter(f"no energy counter on this machine: {error}")
    return CounterMeter(rapl.read, "rapl", synchronise, every_s=RAPL_EVERY_S, tick_s=RAPL_TICK_S)
