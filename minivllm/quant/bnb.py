"""The way to bitsandbytes: imported only when a method that needs it is made (it takes seconds)."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

from minivllm.errors import BadInput


def import_bitsandbytes(method: str) -> ModuleType:
    """The package, without its notices, and without the kernels it would fetch from the network.

    Raises:
        BadInput: it is not installed, or does not load here.
    """
    # A notice at each import and each layer, on conversions that the methods here intend.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    fetcher = sys.modules.get("kernels")
    try:
        if "bitsandbytes" not in sys.modules:
            sys.modules["kernels"] = None  # type: ignore[assignment]  # makes `import kernels` fail: no remote code
        import bitsandbytes
    except (ImportError, OSError, RuntimeError) as error:
        raise BadInput(
            f"quant={method} needs bitsandbytes, which does not load ({error}): pip install "
            "bitsandbytes, or choose quant=int8"
        ) from None
    finally:
        if fetcher is not None:
            sys.modules["kernels"] = fetcher
        elif sys.modules.get("kernels", 0) is None:
            del sys.modules["kernels"]
    return bitsandbytes
