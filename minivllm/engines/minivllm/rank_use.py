"""What the ranks of an engine take: devices and memory of all of them, and time and bytes of their
collectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minivllm.engine.engine import Engine
from minivllm.extras.ranked_steps import LeadingExecutor, facts
from minivllm.parallel.ranks import ONE_RANK, Ranks
from minivllm.platform.devices import devices_of_ranks
from minivllm.platform.threads import wanted_cores


class RankUse:
    """The ranks of one engine, which may be a single one.

    Args:
        engine: rank 0's part.
        runtime: the group that it was built with.
    """

    def __init__(self, engine: Engine, runtime: Mapping[str, Any]) -> None:
        executor = engine.launcher.executor
        team = executor.team if isinstance(executor, LeadingExecutor) else None
        self._ranks: Ranks = ONE_RANK if team is None else team.ranks
        parts = [facts(engine), *([] if team is None else team.facts)]
        # bytes over all ranks, by name
        self.memory = {name: sum(part[name] for part in parts) for name in parts[0]}
        self._device, self._runtime = engine.runner.device, runtime
        self._before_s = self._ranks.traffic.seconds  # of building it

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._ranks.size

    @property
    def devices(self) -> str:
        """The devices of all ranks of this machine, as torch writes one."""
        if self.size == 1 or self._device.type != "cuda":
            return str(self._device)
        named = str(self._runtime["device"])
        each = devices_of_ranks(named if ":" in named else "cuda", self._ranks.on_this_machine)
        return f"cuda:{','.join(device.partition(':')[2] for device in each)}"

    @property
    def placed_at(self) -> str:
        """The GPUs of all ranks of this machine, or the cores that they share."""
        if self._device.type == "cuda":
            return self.devices
        return ",".join(map(str, sorted(wanted_cores(dict(self._runtime)))))

    def take_ms(self) -> float | None:
        """Milliseconds that rank 0 has spent in collectives since the last call, with the wait for
        the other ranks; None on a GPU, where the host does not wait for them."""
        if self._device.type == "cuda":
            return None
        seconds = self._ranks.traffic.seconds
        passed, self._before_s = seconds - self._before_s, seconds
        return 1e3 * passed

    def counters(self) -> dict[str, float]:
        """What rank 0 has given to collectives since it was built."""
        traffic = self._ranks.traffic
        return {
            "collectives": float(traffic.collectives),
            "collective_bytes": float(traffic.num_bytes),
        }
