"""pruning.kernels=semi_structured: weights of which two in every four are 0, in torch's
semi-structured tensors (Mishra et al. 2021), which hold the other two and where they are.

Experimental: torch calls the format a prototype, and no measurement here shows its speed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.errors import BadInput
from minivllm.kernels.modules import GraphLimited, LinearKernel
from minivllm.models.load.loading import LoadedModel
from minivllm.passes.base import PassContext, PassReport
from minivllm.passes.pruning.options import SEMI_STRUCTURED
from minivllm.quant.base import QuantMethod, frozen
from minivllm.quant.plain import Plain, PlainLinear

CAPABILITY = (8, 0)  # of the first GPUs with sparse matrix units
ROWS, COLUMNS = 32, 64  # of a 16-bit matrix that torch takes: multiples of these

Compress = Callable[[Tensor], Tensor]


class SemiStructuredLinear(LinearKernel, GraphLimited):
    """A linear layer on a compressed weight.

    Args:
        weight: in torch's semi-structured form, [out, in] from outside.
        bias: [out] or None.
    """

    kernel_name = "SemiStructuredLinear"
    in_graphs = "untried"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.compressed = weight
        # Its parts are all its memory, which is counted by buffers.
        for name in weight.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            self.register_buffer(name, getattr(weight, name))
        self.bias = None if bias is None else frozen(bias)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        return F.linear(x, self.compressed, self.bias)


def compress(weight: Tensor) -> Tensor:
    """torch's semi-structured form of a matrix [out, in] on a GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is a prototype, which the docs say
        compressed: Tensor = torch.sparse.to_sparse_semi_structured(weight.contiguous())
    return compressed


def is_compressible(weight: Tensor) -> bool:
    """Whether a matrix [out, in] has at most two numbers other than 0 in every four of a row, and
    sizes that torch takes."""
    if weight.shape[0] % ROWS or weight.shape[1] % COLUMNS:
        return False
    return bool(((weight != 0).unflatten(1, (-1, 4)).sum(-1) <= 2).all())


def require_semi_structured(
    pruning: Mapping[str, Any], quant: QuantMethod, device: torch.device
) -> None:
    """Raise BadInput where kernels are asked for that are not there, before weights are loaded.

    Args:
        pruning: the knobs of the group.
        quant: how weights are stored.
        device: of the model.
    """
    if pruning.get("kernels") != SEMI_STRUCTURED:
        return
    what = f"pruning.kernels={SEMI_STRUCTURED}"
    if device.type != "cuda":
        raise BadInput(f"{what} needs runtime.device=cuda; on {device} use pruning.kernels=dense")
    if (found := torch.cuda.get_device_capability(device)) < CAPABILITY:
        raise BadInput(
            f"{what} needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]}, and this "
            f"one has {found[0]}.{found[1]}: use pruning.kernels=dense"
        )
    if not isinstance(quant, Plain) or quant.dtype is torch.float32:
        raise BadInput(
            f"{what} needs quant=bf16 or fp16; quant={quant.name} has kernels of its own"
        )


class SemiStructured:
    """Compresses every plain linear layer whose weight allows it.

    Args:
        compress: makes torch's form of a matrix.
    """

    name = SEMI_STRUCTURED

    def __init__(self, compress: Compress = compress) -> None:
        self._compress = compress

    def apply(self, loaded: LoadedModel, context: PassContext) -> PassReport:
        """See ModelPass.

        Raises:
            BadInput: no layer can be compressed.
        """
        count = growth = 0
        for name, module in list(loaded.model.named_modules()):
            if name not in loaded.linear_inputs or type(module) is not PlainLinear:
                continue
            if not is_compressible(module.weight):
                continue
            made = SemiStructuredLinear(self._compress(module.weight.detach()), module.bias)
            difference = _bytes(made) - _bytes(module)
            loaded.model.set_submodule(name, made)
            loaded.linear_bytes += difference * (name != "lm_head")
            loaded.weight_bytes += difference
            growth += difference
            count += 1
        if not count:
            raise BadInput(
                f"pruning.kernels={SEMI_STRUCTURED}: no layer of this model can be compressed, as "
                f"sizes must be multiples of {ROWS} and {COLUMNS}; use pruning.kernels=dense"
            )
        return PassReport(self.name, count, growth)


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
