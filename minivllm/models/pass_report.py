"""The report of a pass on what it changed in a loaded model; the passes are in passes/."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PassReport:
    """What one pass changed."""

    name: str
    count: int = 0  # modules that it replaced or changed
    bytes: int = 0  # growth of the model's memory; negative where it shrank
    seconds: float = 0.0  # duration; `apply_passes` measures it if the pass leaves it 0
    notes: tuple[str, ...] = ()  # warnings for the record
    # Further counts by name, which the pass may change while requests are served.
    counters: Mapping[str, int] = field(default_factory=dict)
