"""What a module says of itself, and what is taken for granted of a user's own."""

from __future__ import annotations

from torch import nn

from minivllm.kernels.modules import LinearKernel, kernel_name, matrix_dtype


class Named(LinearKernel):
    kernel_name, matrix_dtype = "another name", "int8"


class Unnamed(nn.Module):
    pass


def test_a_kernel_is_what_the_layer_says_or_else_its_class() -> None:
    assert [kernel_name(module) for module in (Named(), Unnamed())] == ["another name", "Unnamed"]
    assert [matrix_dtype(module) for module in (Named(), Unnamed())] == ["int8", None]
