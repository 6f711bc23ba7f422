"""The operations that choose tokens, by the kernels in use."""

from __future__ import annotations

from functools import cache, partial
from typing import cast

from torch import Tensor

from minivllm.engine.batch_inputs import SamplingColumns
from minivllm.engine.sampler import TORCH, SamplerOps
from minivllm.kernels.cpu.library import Kernels


@cache
def sampler_ops(cpu: Kernels | None, triton: bool) -> SamplerOps:
    """What tokens are chosen with: Triton's kernels if they are to be used, else those for CPUs as
    far as there are any."""
    if triton:
        from minivllm.engine.kernels.sampling import argmax, draw  # imports Triton

        return SamplerOps(partial(argmax, flag=True), draw, fused=True)
    if cpu is None:
        return TORCH

    def draw_on_cpu(scores: Tensor, columns: SamplingColumns) -> Tensor:
        return cast(
            Tensor, cpu.draw(scores, columns.seeds, columns.positions, columns.temperatures)
        )

    return SamplerOps(partial(cpu.argmax, flag=True), draw_on_cpu)
