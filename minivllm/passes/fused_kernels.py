"""Small steps between the matrix products, each as one kernel: residual and norm, and the gated
activation.

They compute little and read much, so on a GPU one kernel saves a launch and a pass over memory.
Results are rounded where the layers of models/ round them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.kernels.common import narrow

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
_SILU = tl.constexpr(ACTIVATIONS["silu"])


@triton.jit
def _norm(
    x,
    delta,
    weight,
    total,
    out,
    size,
    eps,
    ADD: tl.constexpr,
    GEMMA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program computes one token."""
    row = tl.program_id(0).to(tl.int64) * size
    i = tl.arange(0, BLOCK)
    inside = i < size
    dtype: tl.constexpr = x.dtype.element_ty
    value = tl.load(x + row + i, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + row + i, mask=inside, other=0.0).to(tl.float32)
        rounded = narrow(value, dtype)
        tl.store(total + row + i, rounded, mask=inside)
        value = rounded.to(tl.float32)
    factor = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    normed = narrow(value * tl.rsqrt(tl.sum(value * value, 0) / size + eps), dtype).to(tl.float32)
    if GEMMA:
        normed += normed * factor
    else:
        normed *= factor
    tl.store(out + row + i, narrow(normed, dtype), mask=inside)


@triton.jit
def _gated(gate_up, out, inner, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """A program computes BLOCK inner dimensions of one token."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < inner
    dtype: tl.constexpr = gate_up.dtype.element_ty
    gate = tl.load(gate_up + token * 2 * inner + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * inner + inner + i, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == _SILU:
        argument = gate
    else:  # (1 + tanh(u)) / 2 is the logistic function of 2 u, with u = sqrt(2 / pi) (...)
        argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = gate / (1.0 + tl.exp(-argument))
    tl.store(
        out + token * inner + i,
        narrow(narrow(active, dtype).to(tl.float32) * up, dtype),
        mask=inside,
    )


def norm(x: Tensor, weight: Tensor, eps: float, gemma: bool) -> Tensor:
    """RMSNorm, or with `gemma` GemmaNorm, of x [tokens, size]: the same."""
    return _launch_norm(x, None, weight, eps, gemma)[1]


def add_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, gemma: bool
) -> tuple[Tensor, Tensor]:
    """x + delta, and the norm of the sum; all [tokens, size]."""
    return _launch_norm(x, delta, weight, eps, gemma)


def _launch_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, gemma: bool
) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if delta is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, size = x.shape
    block = triton.next_power_of_2(size)
    _norm[(tokens,)](
        x,
        x if delta is None else delta.contiguous(),
        weight,
        total,
        out,
        size,
        eps,
        ADD=delta is not None,
        GEMMA=gemma,
        BLOCK=block,
        num_warps=min(16, max(4, block // 512)),
    )
    return total, out


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up (SwiGLU or GeGLU, Shazeer 2020).

    Args:
        gate_up: [tokens, 2 inner], the gate first.
        activation: "silu" or "gelu_tanh".

    Returns:
        [tokens, inner].
    """
    gate_up = gate_up.contiguous()
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, inner, dtype=gate_up.dtype, device=gate_up.device)
    _gated[(tokens, triton.cdiv(inner, 1024))](
        gate_up, out, inner, ACTIVATION=ACTIVATIONS[activation], BLOCK=1024
    )
    return out
