"""The knobs of `attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minivllm.errors import BadInput
from minivllm.platform.options import Options, knob, option

# Attention that can be the same in any batch, and that returns how much of it a token got; `auto`
# finds one.
AUTO = "minivllm.attention.auto.select"
INVARIANT = (
    AUTO,
    "minivllm.attention.invariant.InvariantBackend",
    "minivllm.attention.triton.TritonBackend",
)
SCORING = (AUTO, "minivllm.attention.eager.EagerBackend")


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
    """attention=triton."""

    group = "attention"
    split_size: int | None = knob(512, at_least=64)
    """Most keys of one program in decoding, a power of two, and a quarter of them where a GPU would
    not be full otherwise; null: all of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split_size is not None and self.split_size & (self.split_size - 1):
            raise self.bad("split_size", "must be a power of two, or null (never split)")


@option("minivllm.attention.flash.FlashBackend")
@dataclass(frozen=True)
class FlashAttentionOptions(Options):
    """attention=flash."""

    group = "attention"
    version: Literal["auto", 2, 3, 4] = "auto"
    """Version of flash-attn; auto: the first that is installed of those made for this GPU."""


def require_invariant(attention: str, determinism: str) -> None:
    """Raise BadInput if attention is to be the same in any batch, and this `_target_` cannot be
    so."""
    if determinism == "batch" and attention not in INVARIANT:
        raise BadInput(
            f"attention: {attention.rpartition('.')[2]} is not batch-invariant, as "
            "runtime.determinism=batch asks; use attention=auto, attention=invariant or "
            "attention=triton"
        )
