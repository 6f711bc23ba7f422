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
    fresh: bool = False
    retry: Literal["failed"] | None = None
    dry_run: bool = False
    skip_absent: bool = False
    objective: str | None = None
    direction: Literal["maximize", "minimize"] = "maximize"
    limits: dict[str, float] = field(default_factory=dict)
    params: list[dict[str, Any]] = field(default_factory=list)
    plan: str | None = None
    cwd: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_folder_name(self, "name")


@option("ablation")
@dataclass(frozen=True)
class AblationOptions(Options):
    """ablation."""

    group = "ablation"
    design: Literal["leave_one_out", "add_one_in", "pairs", "factorial"] = "leave_one_out"
    metric: str | None = None
    baseline: list[str] = field(default_factory=list)
    optimisations: dict[str, Any] = field(default_factory=dict)
    only: list[str] = field(default_factory=list)
    max_arms: int = knob(64, at_least=2)

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
