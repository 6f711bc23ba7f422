"""What a linear layer has beside its product, and what is assumed of a user's own."""

from __future__ import annotations

from torch import nn

from minivllm.quant.base import kernel_name, matrix_dtype


class Named(nn.Module):
    kernel_name, matrix_dtype = "another name", "int8"


class Unnamed(nn.Module):
    pass


def test_a_kernel_is_what_the_layer_has_or_else_its_class() -> None:
    assert [kernel_name(module) for module in (Named(), Unnamed())] == ["another name", "Unnamed"]
    assert [matrix_dtype(module) for module in (Named(), Unnamed())] == ["int8", None]
