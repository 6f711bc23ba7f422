"""An engine under a virtual clock, with noise, in which one knob sleeps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from minivllm.bench.hardware.clock import VirtualClock
from minivllm.engine.options import SamplingParams
from minivllm.engines.base import EngineInfo, EngineOutput
from tests.bench.faulty import FaultyEngine

STEP_S = 0.001
NOISE = 0.004  # of a process, beside that of its steps


class SleepyEngine(FaultyEngine):
    """A step takes a millisecond, times one plus `sleep`, times noise.

    Args:
        config: the resolved configuration.
        sleep: fraction of a step that is slept besides.
    """

    def __init__(self, config: dict[str, Any], sleep: float = 0.0) -> None:
        super().__init__(config)
        self.clock = VirtualClock()
        self.info = EngineInfo(**{**vars(self.info), "clock": self.clock})
        # The same noise in every run of a test: a right interval leaves the truth out once in
        # twenty.
        rng = np.random.default_rng(sum(1 for _ in Path("runs").rglob("record.json")))
        self.step_s = STEP_S * (1 + sleep) * math.exp(rng.normal(0, NOISE))

    def submit(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        super().submit(request_id, list(prompt_token_ids), params)

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        if not self.running:
            self.clock.sleep(timeout_s or STEP_S)
            return []
        start = self.clock.now()
        self.clock.sleep(self.step_s)
        outputs = []
        for request_id in list(self.running)[: self.info.max_num_seqs]:
            self.running[request_id] -= 1
            done = self.running[request_id] == 0
            if done:
                del self.running[request_id]
            outputs.append(EngineOutput(request_id, (7,), "length" if done else None, start))
        return outputs

    def steps(self) -> list[dict[str, Any]]:
        return []

    def liveness(self) -> dict[str, dict[str, float | str]]:
        """See BenchEngine: the cache that nobody asks is not used."""
        return {"cache": {"prefix_tokens_reused": 0.0}}
