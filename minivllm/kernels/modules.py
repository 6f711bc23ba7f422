"""What modules of a model say of themselves: how they multiply, and whether CUDA graphs can hold
them."""

from __future__ import annotations

from typing import Literal

from torch import nn


class LinearKernel(nn.Module):
    """A linear layer on stored weights, and the kernel that multiplies them.

    A user's own layer need not derive from it: then its class is its kernel's name, and its
    products are taken to be in the dtype of the activations.
    """

    kernel_name: str
    # of the products, where it is another than that of the activations
    matrix_dtype: str | None = None


class GraphLimited:
    """A module that CUDA graphs cannot hold, or hold only where they are asked for; beside
    nn.Module as a base."""

    in_graphs: Literal[
        "waits", "untried"
    ]  # it waits for the device within a step; no GPU has replayed it yet


def kernel_name(linear: nn.Module) -> str:
    """The kernel that a linear layer multiplies with."""
    return linear.kernel_name if isinstance(linear, LinearKernel) else type(linear).__name__


def matrix_dtype(linear: nn.Module) -> str | None:
    """The dtype of a linear layer's products, where it says that it is another than that of the
    activations."""
    return linear.matrix_dtype if isinstance(linear, LinearKernel) else None
