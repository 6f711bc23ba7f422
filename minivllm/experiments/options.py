"""The knobs of `sweep` and `ablation`, which choose the cells of a command."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from minivllm.platform.options import Options, knob, option, require_folder_name


@option("sweep")
@dataclass(frozen=True)
class SweepOptions(Options):
    """sweep."""

    group = "sweep"
    name: str | None = None
    """The folder of the sweep's records; null: a hash of the sweep's definition, so that the same
    command resumes."""
    fresh: bool = False
    """true: measure recorded cells again."""
    retry: Literal["failed"] | None = None
    """failed: measure failed cells again."""
    dry_run: bool = False
    """true: check everything, print the plan and an estimate of time, measure nothing."""
    skip_absent: bool = False
    """true: arms whose engine is not installed are named and left out."""
    objective: str | None = None
    """Goal of a search (preset=tune): a number of the record, e.g. metrics.output_tokens_per_s."""
    direction: Literal["maximize", "minimize"] = "maximize"
    """Direction of a search."""
    limits: dict[str, float] = field(default_factory=dict)
    """Limits of a search: numbers of the record with their upper bounds."""
    params: list[dict[str, Any]] = field(default_factory=list)
    """Products of a study (docs/guides/studies.md), each {key: "value,value", ...}."""
    plan: str | None = None
    """Set by the sweeper for its jobs: the file that says what this job does."""
    cwd: str | None = None
    """Set by the sweeper for its jobs: the folder of relative paths."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_folder_name(self, "name")


@option("ablation")
@dataclass(frozen=True)
class AblationOptions(Options):
    """ablation."""

    group = "ablation"
    design: Literal["leave_one_out", "add_one_in", "pairs", "factorial"] = "leave_one_out"
    """arms: all optimisations but one, none but one, every two, or every combination."""
    metric: str | None = None
    """Metric of the verdicts: a field below `metrics` in a record; null: the metric of the ranking,
    as in task=compare."""
    baseline: list[str] = field(default_factory=list)
    """Overrides of an arm without any optimisation."""
    optimisations: dict[str, Any] = field(default_factory=dict)
    """Optimisations by name: {fused: {overrides: [attention=sdpa], requires: [...], lossless:
    true}}."""
    only: list[str] = field(default_factory=list)
    """Names from that list; empty: all."""
    max_arms: int = knob(64, at_least=2)
    """More arms are an error: a factorial of k optimisations may have 2^k."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.optimisations:
            raise self.bad(
                "optimisations",
                "names nothing to measure, e.g. {fused: {overrides: [attention=sdpa]}}",
            )
        for name, entry in self.optimisations.items():
            wrong = not isinstance(entry, dict) or set(entry) - {
                "overrides",
                "requires",
                "lossless",
            }
            if (
                wrong
                or not isinstance(entry.get("lossless", False), bool)
                or not _texts(entry.get("overrides"))
                or not _texts(entry.get("requires", []), empty=True)
            ):
                raise self.bad(
                    "optimisations",
                    f"is wrong at {name}: it takes overrides: [key=value, ...], requires: [...] "
                    "and lossless: true",
                )
        for name in self.only:
            if name not in self.optimisations:
                raise self.bad("only", f"names {name}; choose from {', '.join(self.optimisations)}")


def _texts(value: Any, empty: bool = False) -> bool:
    """Whether a value is a list of texts; `empty` allows one without items."""
    return (
        isinstance(value, list)
        and all(isinstance(v, str) for v in value)
        and (empty or bool(value))
    )
