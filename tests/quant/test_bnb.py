"""The import of bitsandbytes, by a package of its name that does what it does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from minivllm.errors import BadInput
from minivllm.quant.bnb import import_bitsandbytes

PACKAGE = """
import torch
try:
    import kernels
except ImportError:
    kernels = None

def plain():
    return torch.is_grad_enabled()

compiled = torch.compile(plain, dynamic=False)

@torch.compile(dynamic=False)
def decorated():
    return plain()
"""


@pytest.mark.parametrize("ending", ["", "raise RuntimeError('no library')"])
def test_it_downloads_and_compiles_nothing(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bitsandbytes.py").write_text(PACKAGE + ending)
    (tmp_path / "kernels.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    usual = torch.compile
    if ending:
        with pytest.raises(BadInput, match=r"quant=nf4 needs bitsandbytes, .*no library"):
            import_bitsandbytes("nf4")
    else:
        found = import_bitsandbytes("nf4")
        assert found.kernels is None and found.compiled is found.plain
        assert found.decorated() is True and type(found.decorated) is type(found.plain)
        del sys.modules["bitsandbytes"]
    assert torch.compile is usual and "kernels" not in sys.modules
