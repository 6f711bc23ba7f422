"""LLM.int8: 8-bit products with the outlier columns of the activations in 16 bits.

Dettmers et al. 2022, "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale". Rows of
the activations and of the weight are scaled to int8 by their largest value. Input columns in which
any activation reaches the threshold are multiplied in the compute dtype instead. bitsandbytes
computes the products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minivllm.quant.base import Quantizer, frozen
from minivllm.quant.bnb import import_bitsandbytes
from minivllm.quant.kernels.common import by_rows
from minivllm.quant.options import Int8MixedOptions


class Int8Mixed(Quantizer, Int8MixedOptions):
    """Weights and activations in int8, outlier columns in 16 bits."""

    name = "int8_mixed"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.library = import_bitsandbytes(self.name)

    def pack(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        quantized = torch.empty_like(weight, dtype=torch.int8)
        maxima = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
        for rows, out, largest in by_rows(weight, quantized, maxima):
            # In the range of float16, which bitsandbytes quantises: a power of two is exact.
            exponent = rows.float().abs().amax(1).frexp().exponent
            narrow = torch.ldexp(rows.float(), -exponent[:, None]).to(torch.float16)
            codes, row_maxima, _ = self.library.functional.int8_vectorwise_quant(narrow)
            out.copy_(codes)
            largest.copy_(torch.ldexp(row_maxima, exponent))
        return self.linear(quantized, maxima, bias)

    def linear(self, weight: Tensor, maxima: Tensor, bias: Tensor | None) -> nn.Module:
        """The layer of a quantised weight: int8 [out, in], and the largest value of each row,
        float32 [out]."""
        return Int8MixedLinear(self.library, weight, maxima, bias, self.threshold)


class Int8MixedLinear(nn.Module):
    """A linear layer through bitsandbytes' `matmul`: int8 weight [out, in], float32 row maxima
    [out]."""

    kernel_name, matrix_dtype = "Int8MixedLinear", "int8"
    # bitsandbytes looks for outlier columns in all rows, rows of padding included.
    in_graphs = "waits"

    def __init__(
        self, library: Any, weight: Tensor, maxima: Tensor, bias: Tensor | None, threshold: float
    ) -> None:
        super().__init__()
        self.weight, self.maxima = frozen(weight), frozen(maxima)
        self.bias = None if bias is None else frozen(bias)
        self.multiply = library.matmul
        self.state = library.MatmulLtState()
        self.state.CB, self.state.SCB = self.weight.data, self.maxima.data
        self.state.threshold = threshold
        self.state.has_fp16_weights = self.state.is_training = False

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        out: Tensor = self.multiply(x, self.state.CB, bias=self.bias, state=self.state)
        return out.to(x.dtype)
