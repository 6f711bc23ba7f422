"""A mixture of experts: grouped on a GPU, on the C++ kernels on a CPU, beside a loop of torch's
products."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minivllm.bench.microbench.case import DTYPE, ITEM, Case, Setting, Side
from minivllm.kernels.cpu.library import Kernels
from minivllm.models.cpu_layers import use_kernels
from minivllm.models.layers import Linear
from minivllm.models.moe import MoE
from minivllm.passes.grouped import GroupedMoE
from minivllm.quant.plain import plain_linear

_COPIES = 16  # of the activations: other tokens, other experts


def cases(setting: Setting) -> Iterator[Case]:
    """For each number of rows; none of a dense model."""
    if not setting.model.num_experts:
        return
    theirs, ours = _mixture(setting), _mixture(setting, setting.kernels)
    if setting.triton:
        ours = GroupedMoE(ours)
    c = setting.model
    expert = 3 * c.hidden_size * c.moe_intermediate_size
    for rows in setting.rows:
        x = setting.random(_COPIES, rows, c.hidden_size)
        experts = 0.0
        for i in range(_COPIES):
            theirs(x[i])
            experts += float(theirs.experts_run) / _COPIES

        yield Case(
            "mixture of experts",
            f"{c.num_experts_per_token} of {c.num_experts} of {c.hidden_size} x "
            f"{c.moe_intermediate_size}",
            rows,
            Side("grouped_mm" if setting.triton else "loop, C++", _caller(ours, x)),
            Side("loop", _caller(theirs, x)),
            bytes=ITEM * (experts * expert + 2 * rows * c.hidden_size),
            operations=2.0 * rows * c.num_experts_per_token * expert,
            copies=_COPIES,
        )


def _caller(moe: MoE, x: Tensor) -> Callable[[int], Tensor]:
    def call(i: int) -> Tensor:
        out: Tensor = moe(x[i % _COPIES])
        return out

    return call


def _mixture(setting: Setting, kernels: Kernels | None = None) -> MoE:
    """The same weights at every call."""
    with torch.device("meta"):
        moe = MoE(setting.model, setting.model.norm_topk_prob)
    generator = torch.Generator(setting.device).manual_seed(0)
    for name, module in list(moe.named_modules()):
        if isinstance(module, Linear):
            shape = (sum(module.parts.values()), module.in_features)
            weight = (
                torch.randn(shape, device=setting.device, generator=generator) / shape[1] ** 0.5
            )
            moe.set_submodule(name, plain_linear(weight.to(DTYPE), None, kernels))
    use_kernels(moe, kernels)
    return moe
