"""minivllm/kernels/device.py: which kernels a GPU gets, by its compute capability."""

from __future__ import annotations

import pytest
import torch

from minivllm.errors import BadInput
from minivllm.kernels.device import takes_triton
from minivllm.quant.kernels.common import TWO_PRODUCTS_BELOW

GPU = torch.device("cuda")


def on(capability: tuple[int, int], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


@pytest.mark.parametrize(
    ("capability", "every", "two_products"),
    [((7, 5), False, False), ((8, 0), True, True), ((9, 0), True, True), ((10, 0), True, False)],
)
def test_auto_takes_the_kernels_that_a_gpu_runs(
    capability: tuple[int, int], every: bool, two_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(capability, monkeypatch)
    assert takes_triton("knob", "auto", "torch", GPU) is every
    assert takes_triton("knob", "auto", "torch", GPU, TWO_PRODUCTS_BELOW) is two_products


def test_a_kernel_that_is_compiled_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on((10, 3), monkeypatch)
    assert takes_triton("quant.kernel", "triton", "torch", GPU)  # one product at a time
    with pytest.raises(BadInput, match=r"quant\.kernel=triton is not for .* 10\.3.*=torch"):
        takes_triton("quant.kernel", "triton", "torch", GPU, TWO_PRODUCTS_BELOW)
