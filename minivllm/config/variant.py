"""The configuration of the running command with further overrides. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.config.compose import compose
from minivllm.config.groups import GROUPS


def variant(further: Sequence[str]) -> dict[str, Any]:
    """Compose the running command's configuration anew, with further overrides.

    A group that `further` chooses loses the knobs that the command sets in it, which the new option
    may not have.

    Raises:
        BadInput: see `compose`.
    """
    from hydra.core.hydra_config import HydraConfig

    running = HydraConfig.get()
    folder = next(
        (s.path for s in running.runtime.config_sources if s.provider == "command-line"), None
    )
    chosen = {text.partition("=")[0].lstrip("+") for text in further} & {*GROUPS}
    kept = [
        text
        for text in running.overrides.task
        if text.lstrip("+~").partition("=")[0].partition(".")[0] not in chosen
    ]
    return compose([*kept, *further], folder)
