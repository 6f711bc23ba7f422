"""The knobs of `quant`: how weights are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from minivllm.platform.options import Options, knob, option

if TYPE_CHECKING:
    # A method (`quant/base.py`) has the torch.dtype, unknown here, in the place of its name.
    Dtype = object
else:
    Dtype = Literal["bfloat16", "float16", "float32"]


@option("minivllm.quant.plain.Plain")
@dataclass(frozen=True)
class PlainQuantOptions(Options):
    """quant=bf16, fp16, fp32, and what every option of quant has."""

    group = "quant"
    dtype: Dtype = "bfloat16"
    """Dtype of activations, and of every weight that is not quantised: the embedding and, unless
    lm_head, the head."""


@option("minivllm.quant.fp8.FP8")
@dataclass(frozen=True)
class QuantizerOptions(PlainQuantOptions):
    """quant=fp8, and what every option of quant has that quantises."""

    skip: tuple[str, ...] = ()
    """Layers without quantisation, by any part of their name: down_proj, layers.0., ...; fused
    layers are qkv_proj and gate_up_proj."""
    lm_head: bool = False
    """Quantise the head too; a tied one becomes a copy beside the embedding."""

    def __post_init__(self) -> None:
        if isinstance(self.skip, str) or "" in (self.skip or ()):
            raise self.bad("skip", "must be a list of parts of layer names, e.g. [down_proj]")
        super().__post_init__()


@dataclass(frozen=True)
class IntegerOptions(QuantizerOptions):
    """What options of quant have whose weights are integers."""

    kernel: Literal["auto", "triton", "torch"] = "auto"
    """Kernel of products with few rows; auto: on a GPU torch's where it has one for the format and
    dtype, else triton; on a CPU C++ if in use, else torch."""
    activations: Literal["none", "int8"] = knob("none", unasked=True)
    """Of the products; int8 rounds each token's to 8 bits and multiplies integers (C++ on a
    CPU)."""


@option("minivllm.quant.int8.Int8")
@dataclass(frozen=True)
class Int8Options(IntegerOptions):
    """quant=int8."""

    activation_group_size: Literal[0, 32, 64, 128, 256] = knob(128, unasked=True)
    """With activations=int8, consecutive inputs of a token that share a scale; 0: all."""


@option("minivllm.quant.int4.Int4")
@dataclass(frozen=True)
class Int4Options(IntegerOptions):
    """quant=int4."""

    group_size: Literal[32, 64, 128, 256] = 128
    """Consecutive inputs that share a scale; of activations in 8 bits, too."""
    symmetric: bool = knob(False, unasked=True)
    """Without zero points, the levels of a group being multiples of its scale: 4.5 bits a weight in
    groups of 32, not 5."""


@option("minivllm.quant.int8_mixed.Int8Mixed")
@dataclass(frozen=True)
class Int8MixedOptions(QuantizerOptions):
    """quant=int8_mixed."""

    threshold: float = knob(6.0, at_least=0)
    """Columns with an activation this large stay in 16 bits; 0: none."""


@option("minivllm.quant.nf4.NF4")
@dataclass(frozen=True)
class NF4Options(QuantizerOptions):
    """quant=nf4."""

    block_size: Literal[64, 128, 256, 512, 1024, 2048, 4096] = 64
    """Weights that share a scale."""
    double_quant: bool = True
    """Scales in eight bits too, except where the kernel of a CPU (C++, or bitsandbytes' for
    AVX512-BF16) reads bfloat16: the rounding alone is kept."""
    kernel: Literal["auto", "triton", "bitsandbytes"] = "auto"
    """Kernel of products with few rows; auto: triton on a GPU, C++ on a CPU if in use, else
    bitsandbytes."""
