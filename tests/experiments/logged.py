"""A fake engine that leaves a line for everything it does, so that a test can count across
processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from minivllm.engine.options import SamplingParams
from tests.bench.faulty import FaultyEngine

# relative: wherever a launcher starts its jobs, they must be in the sweep's folder
LOG = "engine.log"


class LoggedEngine(FaultyEngine):
    """FaultyEngine that writes `build PID`, `measured DELAY REQUESTS` and `close PID`
    to LOG.

    Args:
        config, delay_s, fault, meeting: see FaultyEngine.
    """

    def __init__(
        self,
        config: dict[str, Any],
        delay_s: float,
        fault: str | None = None,
        meeting: str | None = None,
    ) -> None:
        super().__init__(config, fault, delay_s, meeting=meeting)
        self.submitted = 0
        self._note(f"build {os.getpid()}")

    def submit(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self.submitted += 1
        super().submit(request_id, prompt_token_ids, params)

    def reset(self) -> None:
        """See BenchEngine; called before a window and after it."""
        super().reset()
        self.submitted = 0

    def liveness(self) -> dict[str, dict[str, float | str]]:
        """See BenchEngine; asked for once a measurement, when it is over."""
        self._note(f"measured {self.delay_s:g} {self.submitted}")
        return super().liveness()

    def close(self) -> None:
        self._note(f"close {os.getpid()}")

    def _note(self, line: str) -> None:
        with Path(LOG).open("a") as file:
            file.write(f"{line}\n")
