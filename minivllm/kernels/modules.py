"""Attributes of a model's modules: how they multiply, and whether CUDA graphs can hold them."""

from __future__ import annotations

from typing import Literal

from torch import nn


class LinearKernel(nn.Module):
    """A linear layer on stored weights, and the kernel that multiplies them.

    A user's own layer need not be a subclass: then its class is the name of its kernel, and its
    products have the dtype of the activations."""

    kernel_name: str
    # Dtype of the products, where it is not that of the activations.
    matrix_dtype: str | None = None


class GraphLimited:
    """A base class, beside nn.Module, of modules that CUDA graphs cannot hold, or hold only if
    asked to."""

    # "waits": it waits for the device within a step; "untried": no GPU has replayed it yet.
    in_graphs: Literal["waits", "untried"]


def kernel_name(linear: nn.Module) -> str:
    """The kernel that a linear layer multiplies with."""
    return linear.kernel_name if isinstance(linear, LinearKernel) else type(linear).__name__


def matrix_dtype(linear: nn.Module) -> str | None:
    """The dtype of a linear layer's products, where it is not that of the activations; otherwise
    None."""
    return linear.matrix_dtype if isinstance(linear, LinearKernel) else None
