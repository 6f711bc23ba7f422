"""Models as named tensors, and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from minivllm.kernels.cpu.library import Kernels
from minivllm.kernels.cpu.linear import PanelLinear
from minivllm.kernels.device import BuildContext
from minivllm.models.load.packed_cache.model import CannotKeep, parts_of, put_parts
from minivllm.quant.int4 import Int4
from minivllm.quant.int8 import Int8
from minivllm.quant.nf4 import NF4
from minivllm.quant.plain import Plain


class Tiny(nn.Module):
    """As much of a model as weights need."""

    def __init__(self, layer: nn.Module, head: nn.Module, embedding: nn.Parameter) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Module()
        self.model.embed_tokens.weight = embedding
        self.model.layer = layer
        self.lm_head = head


def packed(kernels: Kernels, method: Any, bias: bool = False) -> nn.Module:
    weight = torch.empty(100, 128).normal_(generator=torch.Generator().manual_seed(0)).bfloat16()
    own = method.within(BuildContext(torch.device("cpu"), kernels))
    return own.pack(weight, torch.ones(100).bfloat16() if bias else None)


LINEARS = ["model.layer", "lm_head"]


def meta() -> Any:
    embedding = nn.Parameter(torch.empty(100, 128, device="meta"), requires_grad=False)
    return Tiny(nn.Identity(), nn.Identity(), embedding)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "method",
    [
        *(Plain(), Int8(), Int4(), Int4(group_size=32), NF4()),
        *(Int8(activations="int8"), Int4(activations="int8")),
    ],
    ids=["bf16", "int8", "int4", "int4-32", "nf4", "int8 of int8", "int4 of int8"],
)
def test_a_layer_is_the_same_again(method: Any, bias: bool, panels: Kernels) -> None:
    """All attributes: what a layer gains and does not list would be lost."""
    layer = packed(panels, method, bias)
    assert isinstance(layer, PanelLinear)
    facts = {name: getattr(layer, name) for name in layer.facts}
    again = PanelLinear.again(panels, dict(layer.named_parameters()), facts)

    for name in {*vars(layer), *layer._parameters, *vars(again)} - {"_parameters"}:
        mine, theirs = getattr(layer, name), getattr(again, name)
        same = torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs
        assert same, name
    x = torch.randn(3, 128).bfloat16()
    assert torch.equal(layer(x), again(x))
    assert torch.equal(layer.first(64)(x), again.first(64)(x))


def test_parts_are_put_into_their_places(panels: Kernels) -> None:
    layer, head = packed(panels, Int8()), packed(panels, Plain())
    embedding = nn.Parameter(torch.ones(100, 128), requires_grad=False)
    parts = parts_of(Tiny(layer, head, embedding), LINEARS)  # type: ignore[arg-type]
    assert parts.looked_up == ("model.embed_tokens.weight",) and not parts.is_tied
    model = meta()
    put_parts(model, parts, LINEARS, panels)
    assert isinstance(model.model.layer, PanelLinear)
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    missing = replace(parts, tensors={k: v for k, v in parts.tensors.items() if "embed" not in k})
    fresh = meta()
    with pytest.raises(ValueError, match="does not have all tensors"):
        put_parts(fresh, missing, LINEARS, panels)
    assert isinstance(fresh.model.layer, nn.Identity)


def test_layers_of_another_kind_are_told(panels: Kernels) -> None:
    embedding = nn.Parameter(torch.ones(100, 128), requires_grad=False)
    model: Any = Tiny(nn.Linear(4, 4), packed(panels, Plain()), embedding)
    with pytest.raises(CannotKeep, match=r"model\.layer is Linear"):
        parts_of(model, LINEARS)
    model.model.layer = packed(panels, Plain())
    model.register_buffer("mask", torch.zeros(4, dtype=torch.complex64))
    with pytest.raises(CannotKeep, match=r"mask is torch\.complex64"):
        parts_of(model, LINEARS)
