"""Code that several kernels of quantised layers share: conversion of a weight some rows at a time,
and the late import of Triton's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

SLICE = 8 * 1024 * 1024  # weights converted at once, so that no whole layer exists in 16 bits
# The compute capability from which on few_rows.four_bits is not launched: there Triton 3.6 to 3.8
# compiles two products into one accumulator wrongly (triton#10821).
TWO_PRODUCTS_BELOW = (10, 0)


def triton_products() -> ModuleType:
    """The Triton kernels for products with few rows; imported only where they are used."""
    from minivllm.quant.kernels import products

    return products


def by_rows(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some rows of each tensor at a time: about SLICE numbers of the first one, [rows, columns]."""
    step = max(1, SLICE // tensors[0].shape[1])
    return zip(*(tensor.split(step) for tensor in tensors), strict=True)


def converted_product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    convert: Callable[[Tensor], Tensor] = lambda part: part,
) -> Tensor:
    """(x W^T) * scale, with W converted to the dtype of x some rows at a time.

    In float16 the scale, [out], multiplies the weight: sums without it may exceed 65,504."""
    narrow, parts = x.dtype is torch.float16, []
    for stored, factor in by_rows(weight, scale):
        part = convert(stored).to(x.dtype)
        parts.append(F.linear(x, part.mul_(factor[:, None]) if narrow else part))
    product = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return product if narrow else product.mul_(scale)
