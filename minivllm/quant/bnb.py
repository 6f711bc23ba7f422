"""The late import of bitsandbytes, which takes seconds: only when a method that needs it is
built."""

from __future__ import annotations

import importlib.util
import logging
import sys
from types import ModuleType
from typing import Any

import torch

from minivllm.errors import BadInput


def require_bitsandbytes(method: str) -> None:
    """Raise BadInput where the package is not installed; does not import it."""
    try:
        found = importlib.util.find_spec("bitsandbytes") is not None
    except ValueError:  # an entry of sys.modules without a specification
        found = sys.modules.get("bitsandbytes") is not None
    if not found:
        raise _needed(method, "it is not installed")


def _needed(method: str, reason: object) -> BadInput:
    return BadInput(
        f"quant={method} needs bitsandbytes, which does not load ({reason}): pip install "
        "bitsandbytes, or choose quant=int8"
    )


def _as_it_is(function: Any = None, **options: Any) -> Any:
    """In the place of `torch.compile`, also where that is a decorator with options. bitsandbytes
    has optimizers and fallbacks compiled, which weights of usual shapes do not reach where its
    library loads: for these torch imports all of its compiler, in 0.9 s."""
    return _as_it_is if function is None else function


def import_bitsandbytes(method: str) -> ModuleType:
    """The package, with its notices off, and without the kernels that it would download.

    Raises:
        BadInput: it is not installed, or does not load here.
    """
    # Notices at each import and each layer, on conversions that the methods here intend.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    fetcher, compiled = sys.modules.get("kernels"), torch.compile
    try:
        if "bitsandbytes" not in sys.modules:
            sys.modules["kernels"] = None  # type: ignore[assignment]  # makes `import kernels` fail: no remote code
            torch.compile = _as_it_is  # type: ignore[assignment]
        import bitsandbytes
    except (ImportError, OSError, RuntimeError) as error:
        raise _needed(method, error) from None
    finally:
        torch.compile = compiled
        if fetcher is not None:
            sys.modules["kernels"] = fetcher
        elif sys.modules.get("kernels", 0) is None:
            del sys.modules["kernels"]
    return bitsandbytes
