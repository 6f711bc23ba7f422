"""The model arguments of lm-eval's command line, as options and overrides of the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from minivllm.config.compose import GROUPS
from minivllm.errors import BadInput, nearest

# Groups of the benchmark harness, which have no effect under lm-eval.
UNUSED = (
    *("ablation", "arrival", "decoding", "engine", "hydra", "measure", "name", "preset", "quality"),
    *("report", "reports_dir", "runs", "runs_dir", "sweep", "task", "tracker", "view", "workload"),
)


def engine_overrides(given: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Split model arguments as `LLM` takes them: options by group, and overrides of single knobs.

    Args:
        given: `quant="nf4"`, `{"cache.block_size": 32}`; values as lm-eval's parser leaves them,
            which turns texts into numbers, booleans and None.

    Raises:
        BadInput: a name is neither a group of the engine nor a knob of one.
    """
    groups: dict[str, str] = {}
    overrides: list[str] = []
    chosen = [group for group in GROUPS if group not in (*UNUSED, "model", "runtime")]
    for name, value in given.items():
        group = name.partition(".")[0]
        if group in UNUSED:
            raise BadInput(f"{name}: lm-eval and its tasks decide this; {group} has no effect here")
        if "." in name:
            overrides.append(f"{name}={value if isinstance(value, str) else json.dumps(value)}")
        elif name in chosen:
            groups[name] = "none" if value is None else str(value)
        else:
            valid = [
                "pretrained",
                "device",
                "config_dir",
                "enable_thinking",
                "think_end_token",
                *chosen,
            ]
            hint = nearest(name, valid)
            raise BadInput(
                f"{name}: no such model argument; {hint}; a knob is written group.knob=value"
            )
    return groups, overrides
