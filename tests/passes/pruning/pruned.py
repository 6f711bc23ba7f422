"""Plans of pruning for checkpoints that tests make."""

from __future__ import annotations

from pathlib import Path

from minivllm.assembly import build_engine
from minivllm.config.compose import compose
from minivllm.config.groups import Config
from minivllm.passes.pruning.calibration import pruning_plan
from minivllm.passes.pruning.plan import PruningPlan


def plan_of(folder: Path, *overrides: str) -> PruningPlan:
    """What these knobs of `pruning` leave out of a checkpoint, in float32."""
    fixed = ["model=hf", f"model.path={folder}", "quant=fp32"]
    config = Config.of(compose([*fixed, "runtime.device=cpu", "runtime.threads=1", *overrides]))
    plan = pruning_plan(config, config["model"], config["pruning"], build_engine)
    assert plan is not None
    return plan
