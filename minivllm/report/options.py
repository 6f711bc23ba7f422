"""The knobs of `report`: how results are shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minivllm.platform.options import Options, option
from minivllm.platform.plug_ins import names_class

MAX_PERCENTILES = 5  # of each of four latencies


@option("report")
@dataclass(frozen=True)
class ReportOptions(Options):
    """report."""

    group = "report"
    percentiles: list[float] = field(default_factory=list)
    """Percentiles of TTFT, ITL, TPOT and E2E in the tables, such as [50,90,99]; []: TTFT p50 and
    p99, ITL p50."""
    studies: dict[str, Any] = field(default_factory=dict)
    """Studies of your own: {mine: {_target_: my_package.MyStudy, ...}}, see
    docs/guides/reports.md."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(map(names_class, self.studies.values())):
            raise self.bad(
                "studies", "must name a class each, such as {mine: {_target_: my_package.MyStudy}}"
            )
        if not all(0 < p < 100 and round(p, 3) == p for p in self.percentiles):
            raise self.bad(
                "percentiles", "must be numbers above 0 and below 100, such as [50,90,99.9]"
            )
        if (
            len(self.percentiles) != len(set(self.percentiles))
            or len(self.percentiles) > MAX_PERCENTILES
        ):
            raise self.bad("percentiles", f"must be at most {MAX_PERCENTILES} different ones")
