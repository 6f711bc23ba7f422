"""What a pass says that it did to a loaded model; the passes themselves are in passes/."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PassReport:
    """What one pass changed."""

    name: str
    count: int = 0  # modules that it replaced or changed
    bytes: int = 0  # by which the model's memory grew; negative where it shrank
    seconds: float = 0.0  # that it took; measured by who applies it, unless the pass says so itself
    notes: tuple[str, ...] = ()  # warnings for the record
    # Further counts by name; the pass may go on counting while requests are served.
    counters: Mapping[str, int] = field(default_factory=dict)
