"""Linear layers in 16 bits whose products with few rows go through Triton's kernel:
runtime.linear_kernel=triton."""

from __future__ import annotations

from torch import Tensor, nn

from minivllm.quant.kernels import products
from minivllm.quant.plain import PlainLinear


class StreamedLinear(PlainLinear):
    """PlainLinear, whose weight is read once and multiplied with up to 64 rows as it arrives; more
    go to torch."""

    kernel_name = "StreamedLinear"

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        if x.shape[0] > products.MOST_ROWS:
            return super().forward(x)
        return products.whole_product(x, self.weight, None, self.bias)


def stream(model: nn.Module) -> int:
    """Put StreamedLinear in the place of every PlainLinear in 16 bits below `model`; how many those
    were.

    Weights stay where they are.
    """
    replaced = 0
    for name, module in list(model.named_modules()):
        if type(module) is PlainLinear and module.weight.itemsize == 2:
            model.set_submodule(name, StreamedLinear(module.weight, module.bias))
            replaced += 1
    return replaced
