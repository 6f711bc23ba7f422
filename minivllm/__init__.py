"""minivllm: a benchmarking and ablation harness around a from-scratch LLM inference engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.bench.records.reading import load_records
    from minivllm.engine.options import SamplingParams
    from minivllm.errors import BadInput, NonFiniteLogits
    from minivllm.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "BadInput", "NonFiniteLogits", "SamplingParams", "__version__", "load_records"]

_HOMES = {
    "LLM": "minivllm.llm",
    "BadInput": "minivllm.errors",
    "NonFiniteLogits": "minivllm.errors",
    "SamplingParams": "minivllm.engine.options",
    "load_records": "minivllm.bench.records.reading",
}


def __getattr__(name: str) -> object:
    """Import the public names when they are first used: the command line must not pay for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
