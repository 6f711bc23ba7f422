"""Linear layers in 16 bits whose products with few rows use Triton's kernel:
runtime.linear_kernel=triton."""

from __future__ import annotations

from torch import Tensor, nn

from minivllm.quant.kernels import products
from minivllm.quant.plain import PlainLinear


class StreamedLinear(PlainLinear):
    """PlainLinear whose kernel reads the weight once for up to 64 rows; torch multiplies more
    rows."""

    kernel_name = "StreamedLinear"

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        if x.shape[0] > products.MOST_ROWS:
            return super().forward(x)
        return products.whole_product(x, self.weight, None, self.bias)


def stream(model: nn.Module) -> int:
    """Replace every PlainLinear in 16 bits below `model` by a StreamedLinear. Returns the number of
    replaced layers.

    The layers keep their weights."""
    replaced = 0
    for name, module in list(model.named_modules()):
        if type(module) is PlainLinear and module.weight.itemsize == 2:
            model.set_submodule(name, StreamedLinear(module.weight, module.bias))
            replaced += 1
    return replaced
