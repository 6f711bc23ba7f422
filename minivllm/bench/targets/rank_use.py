"""What the ranks of an engine take: memory of all of them, and time and bytes of their
collectives."""

from __future__ import annotations

from minivllm.engine.engine import Engine
from minivllm.extras.ranked_steps import LeadingExecutor, facts
from minivllm.parallel.ranks import ONE_RANK, Ranks


class RankUse:
    """The ranks of one engine, which may be a single one.

    Args:
        engine: rank 0's part.
    """

    def __init__(self, engine: Engine) -> None:
        executor = engine.launcher.executor
        team = executor.team if isinstance(executor, LeadingExecutor) else None
        self._ranks: Ranks = ONE_RANK if team is None else team.ranks
        parts = [facts(engine), *([] if team is None else team.facts)]
        # bytes over all ranks, by name
        self.memory = {name: sum(part[name] for part in parts) for name in parts[0]}
        self._on_gpu = engine.runner.device.type == "cuda"
        self._before_s = 0.0

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._ranks.size

    def devices(self, own: str) -> str:
        """The devices of all ranks, where rank 0 has this one."""
        kind, _, first = own.partition(":")
        if self.size == 1 or kind != "cuda":
            return own
        return f"cuda:{','.join(str(int(first or 0) + rank) for rank in range(self.size))}"

    def take_ms(self) -> float | None:
        """Milliseconds that rank 0 has spent in collectives since the last call, with the wait for
        the other ranks; None on a GPU, where the host does not wait for them."""
        if self._on_gpu:
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
