"""Layers on the C++ kernels: which layers change, and that their results stay close."""

from __future__ import annotations

import torch
from torch import nn

from minivllm.kernels.cpu.library import Kernels
from minivllm.models.cpu_layers import CPUMLP, CPUNorm, plain_class, use_kernels
from minivllm.models.families.gemma import GemmaNorm
from minivllm.models.layers import MLP, RMSNorm


class OwnNorm(RMSNorm):
    """A user's own norm."""


def test_only_known_classes_of_fitting_sizes_change(kernels: Kernels) -> None:
    layers = [
        RMSNorm(32, 1e-6),
        RMSNorm(40, 1e-6),  # no multiple of 16
        OwnNorm(32, 1e-6),
        GemmaNorm(32, 1e-6),
        MLP(32, 48, "silu"),
        MLP(32, 48, "gelu_tanh"),
    ]
    before = [type(layer) for layer in layers]
    model = nn.ModuleList(layers)
    use_kernels(model, None)
    assert [type(layer) for layer in layers] == before
    use_kernels(model, kernels)
    changed = [CPUNorm, RMSNorm, OwnNorm, GemmaNorm, CPUMLP, MLP]
    assert [type(layer) for layer in layers] == changed
    assert [plain_class(layer) for layer in layers] == before


def test_a_changed_norm_keeps_its_weight(kernels: Kernels) -> None:
    norm = RMSNorm(64, 1e-6)
    norm.weight.data = torch.randn(64)
    x = torch.randn(3, 64)
    expected = norm(x)
    use_kernels(norm, kernels)
    torch.testing.assert_close(norm(x), expected)
    assert torch.equal(norm(x[None])[0], expected)  # other shapes stay with torch
