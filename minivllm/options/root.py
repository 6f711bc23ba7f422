"""Settings outside every group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from minivllm.options.base import Options, knob, require_folder_name
from minivllm.options.measure import QualityOptions

MAX_PERCENTILES = 5  # of each of four latencies


@dataclass(frozen=True)
class SweepOptions(Options):
    """sweep."""

    group = "sweep"
    name: str | None = None
    fresh: bool = False
    retry: Literal["failed"] | None = None
    dry_run: bool = False
    skip_absent: bool = False
    objective: str | None = None
    direction: Literal["maximize", "minimize"] = "maximize"
    limits: dict[str, float] = field(default_factory=dict)
    params: list[dict[str, Any]] = field(default_factory=list)
    plan: str | None = None
    job: int | None = knob(None, at_least=0)
    cwd: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_folder_name(self, "name")


@dataclass(frozen=True)
class ReportOptions(Options):
    """report."""

    group = "report"
    percentiles: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 < p < 100 and round(p, 3) == p for p in self.percentiles):
            raise self.bad("percentiles", "must be numbers above 0 and below 100, such as [50,90,99.9]")
        if len(self.percentiles) != len(set(self.percentiles)) or len(self.percentiles) > MAX_PERCENTILES:
            raise self.bad("percentiles", f"must be at most {MAX_PERCENTILES} different ones")


@dataclass(frozen=True)
class RootOptions(Options):
    """Settings outside every group."""

    name: str | None = None
    runs_dir: str = "runs"
    reports_dir: str = "reports"
    runs: list[str] = field(default_factory=list)
    quality: QualityOptions = field(default_factory=QualityOptions)
    sweep: SweepOptions = field(default_factory=SweepOptions)
    report: ReportOptions = field(default_factory=ReportOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_folder_name(self, "name")
