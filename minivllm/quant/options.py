"""The knobs of `quant`: how weights are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minivllm.platform.options import Options, knob, option


@option("minivllm.quant.plain.Plain")
@dataclass(frozen=True)
class PlainQuantOptions(Options):
    """quant=bf16, fp16, fp32, and what every option of quant has.

    Args:
        dtype: of activations, and of every weight that is not quantised.
    """

    group = "quant"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"


@option("minivllm.quant.fp8.FP8")
@dataclass(frozen=True)
class QuantizerOptions(PlainQuantOptions):
    """quant=fp8, and what every option of quant has that quantises.

    Args:
        skip: layers to leave alone, by any part of their name, e.g. "layers.0." or "down_proj".
            Fused layers have one name: qkv_proj, gate_up_proj.
        lm_head: quantise the head too. One that shares the embedding's weight becomes a copy beside
            it.
    """

    skip: tuple[str, ...] = ()
    lm_head: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.skip, str) or "" in (self.skip or ()):
            raise self.bad("skip", "must be a list of parts of layer names, e.g. [down_proj]")
        super().__post_init__()


@dataclass(frozen=True)
class IntegerOptions(QuantizerOptions):
    """What options of quant have whose weights are integers.

    Args:
        kernel: "triton" for products with few rows, "torch", or "auto": on a GPU torch's where it
            has one for the format and dtype, else Triton's; on a CPU the C++ kernels if they are in
            use, else torch's.
        activations: of the products: "none" leaves them in `dtype`, "int8" rounds each token's to 8
            bits and multiplies integers.
    """

    kernel: Literal["auto", "triton", "torch"] = "auto"
    activations: Literal["none", "int8"] = knob("none", unasked=True)


@option("minivllm.quant.int8.Int8")
@dataclass(frozen=True)
class Int8Options(IntegerOptions):
    """quant=int8.

    Args:
        activation_group_size: with activations=int8, consecutive inputs of a token that share a
            scale; 0 for all of them.
    """

    activation_group_size: Literal[0, 32, 64, 128, 256] = knob(128, unasked=True)


@option("minivllm.quant.int4.Int4")
@dataclass(frozen=True)
class Int4Options(IntegerOptions):
    """quant=int4.

    Args:
        group_size: consecutive inputs that share a scale; of activations in 8 bits, too.
        symmetric: without zero points: the levels of a group are multiples of its scale.
    """

    group_size: Literal[32, 64, 128, 256] = 128
    symmetric: bool = knob(False, unasked=True)


@option("minivllm.quant.int8_mixed.Int8Mixed")
@dataclass(frozen=True)
class Int8MixedOptions(QuantizerOptions):
    """quant=int8_mixed.

    Args:
        threshold: activations of this size or more are outliers; 0 quantises every column.
    """

    threshold: float = knob(6.0, at_least=0)


@option("minivllm.quant.nf4.NF4")
@dataclass(frozen=True)
class NF4Options(QuantizerOptions):
    """quant=nf4.

    Args:
        block_size: weights that share a scale.
        double_quant: store the scales in eight bits too. The C++ kernels, and bitsandbytes' for
            AVX512-BF16, want them in bfloat16: there the rounding of double quantisation is kept
            but not its saving.
        kernel: "triton" for products with few rows, "bitsandbytes", or "auto": Triton's on a GPU,
            the C++ kernels on a CPU that uses them, else bitsandbytes'.
    """

    block_size: Literal[64, 128, 256, 512, 1024, 2048, 4096] = 64
    double_quant: bool = True
    kernel: Literal["auto", "triton", "bitsandbytes"] = "auto"
