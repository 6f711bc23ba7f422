"""The knobs of `attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minivllm.platform.options import Options, knob, option


@option(
    "minivllm.attention.auto.select",
    "minivllm.attention.eager.EagerBackend",
    "minivllm.attention.invariant.InvariantBackend",
    "minivllm.attention.kernels.cpu.CPUBackend",
    "minivllm.attention.sdpa.SDPABackend",
)
@dataclass(frozen=True)
class PlainAttentionOptions(Options):
    """A backend that has no knobs."""

    group = "attention"


@option("minivllm.attention.triton.TritonBackend")
@dataclass(frozen=True)
class TritonAttentionOptions(Options):
    """attention=triton.

    Args:
        split_size: most keys that one program goes through when requests decode, a power of two; a
            quarter of them where a GPU would not be full otherwise; None: all keys of a request.
    """

    group = "attention"
    split_size: int | None = knob(512, at_least=64)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split_size is not None and self.split_size & (self.split_size - 1):
            raise self.bad("split_size", "must be a power of two, or null (never split)")


@option("minivllm.attention.flash.FlashBackend")
@dataclass(frozen=True)
class FlashAttentionOptions(Options):
    """attention=flash.

    Args:
        version: takes this version of flash-attn, "auto" the first that is installed of those made
            for the GPU.
    """

    group = "attention"
    version: Literal["auto", 2, 3, 4] = "auto"
