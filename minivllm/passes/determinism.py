"""runtime.determinism: what may change a request's tokens.

off    the fastest kernels, whose rounding depends on how many tokens share a step
run    the same requests at the same time give the same tokens: only deterministic kernels
batch  a request's tokens depend on nothing but the request: not on its neighbours, on chunks,
       on the prefix cache, or on preemption
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.engine.engine import Engine
from minivllm.errors import BadInput
from minivllm.models.layers import MLP
from minivllm.models.load.loading import LoadedModel
from minivllm.passes.base import PassContext, PassReport, Wrapper

ROWS = 16  # rows of every matrix product at the level "batch"
# Models of engines with deterministic kernels.
_DETERMINISTIC: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def deterministic_kernels(only: bool) -> None:
    """The level "run": torch raises where it has no deterministic kernel. The setting holds for the
    whole process, as long as it has an engine with this level (`keep_deterministic`)."""
    if only:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    elif _DETERMINISTIC:
        gc.collect()  # models of engines that no longer exist
    is_deterministic = only or bool(_DETERMINISTIC)
    # Setting the mode, even to the same value, imports torch's compiler: a second or more.
    if torch.get_deterministic_debug_mode() != (2 if is_deterministic else 0):
        torch.use_deterministic_algorithms(is_deterministic)
    # Everything here is written before it is read. (The stubs do not know the attribute.)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def keep_deterministic(model: nn.Module) -> None:
    """Keep kernels deterministic for the whole process, as long as this model exists."""
    _DETERMINISTIC.add(model)


def close_engine(engine: Engine) -> None:
    """Close an engine, whose model needs no such kernels from then on: it need not be searched for
    as garbage, which takes a tenth of a second where much is imported."""
    engine.close()
    _DETERMINISTIC.discard(engine.loaded.model)


class FixShapes:
    """The level "batch": every linear layer multiplies fixed shapes, and activations on a CPU are
    computed row by row.

    At the level "run" the pass keeps other engines of the process from switching kernels back."""

    name = "determinism"

    def apply(self, loaded: LoadedModel, context: PassContext) -> PassReport:
        keep_deterministic(loaded.model)
        if context.runtime["determinism"] == "batch":
            make_batch_invariant(loaded, context.device)
            return PassReport(self.name, len(loaded.linear_inputs))
        return PassReport(self.name)


class BatchInvariantLinear(Wrapper):
    """A linear layer that always multiplies the same number of rows, so that a row gets the same
    kernel in any batch.

    Args:
        inner: takes [rows, in] to [rows, out].
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        pieces = []
        for piece in x.split(ROWS):
            missing = ROWS - piece.shape[0]
            padded = F.pad(piece, (0, 0, 0, missing)) if missing else piece
            pieces.append(self.inner(padded)[: piece.shape[0]])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def by_rows(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """An elementwise function, applied row by row. torch splits all numbers over its threads, and
    computes the last numbers of a thread's share, which fill no vector, in another way."""
    return lambda x: torch.stack([function(row) for row in x])


@torch.inference_mode()
def make_batch_invariant(loaded: LoadedModel, device: torch.device) -> None:
    """Give every linear layer of the model fixed shapes, and on a CPU apply every activation row by
    row.

    Raises:
        BadInput: a row of a layer depends on its place or on the other rows even so (LLM.int8 looks
            for outliers in all of them).
    """
    for name, width in loaded.linear_inputs.items():
        inner = loaded.model.get_submodule(name)
        if not _are_rows_independent(
            inner, torch.randn(ROWS, width, device=device).to(loaded.model.dtype)
        ):
            raise BadInput(
                f"runtime.determinism=batch: in layer {name} ({type(inner).__name__}) a token's "
                "result depends on the others of its step; use another quant, or "
                "runtime.determinism=run"
            )
        loaded.model.set_submodule(name, BatchInvariantLinear(inner))
    for module in loaded.model.modules():
        if isinstance(module, MLP) and device.type == "cpu":
            module.activation = by_rows(module.activation)


def _are_rows_independent(linear: nn.Module, x: Tensor) -> bool:
    """Whether rows give the same bits at other places, and with other rows that are a hundred times
    as large."""
    out = linear(x)
    moved = linear(x.roll(5, 0)).roll(-5, 0)
    beside = x * 100
    beside[3] = x[3]
    return torch.equal(out, moved) and torch.equal(linear(beside)[3], out[3])
