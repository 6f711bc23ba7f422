"""The knobs of `quant`: how weights are stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from minivllm.platform.options import Options, knob, option

Dtype = Literal["bfloat16", "float16", "float32"]


@option("minivllm.quant.plain.Plain")
@dataclass(frozen=True)
class PlainQuantOptions(Options):
    """quant=bf16, fp16, fp32."""

    group = "quant"
    dtype: Dtype = "bfloat16"


@option("minivllm.quant.int8.Int8")
@dataclass(frozen=True)
class Int8Options(Options):
    """quant=int8."""

    group = "quant"
    dtype: Dtype = "bfloat16"
    skip: list[str] = field(default_factory=list)
    lm_head: bool = False
    kernel: Literal["auto", "triton", "torch"] = "auto"


@option("minivllm.quant.fp8.FP8")
@dataclass(frozen=True)
class FP8Options(Options):
    """quant=fp8."""

    group = "quant"
    dtype: Dtype = "bfloat16"
    skip: list[str] = field(default_factory=list)
    lm_head: bool = False


@option("minivllm.quant.int4.Int4")
@dataclass(frozen=True)
class Int4Options(Options):
    """quant=int4."""

    group = "quant"
    dtype: Dtype = "bfloat16"
    group_size: Literal[32, 64, 128, 256] = 128
    skip: list[str] = field(default_factory=list)
    lm_head: bool = False
    kernel: Literal["auto", "triton", "torch"] = "auto"


@option("minivllm.quant.int8_mixed.Int8Mixed")
@dataclass(frozen=True)
class Int8MixedOptions(Options):
    """quant=int8_mixed."""

    group = "quant"
    dtype: Dtype = "bfloat16"
    threshold: float = knob(6.0, at_least=0)
    skip: list[str] = field(default_factory=list)
    lm_head: bool = False


@option("minivllm.quant.nf4.NF4")
@dataclass(frozen=True)
class NF4Options(Options):
    """quant=nf4."""

    group = "quant"
    dtype: Dtype = "bfloat16"
    block_size: Literal[64, 128, 256, 512, 1024, 2048, 4096] = 64
    double_quant: bool = True
    skip: list[str] = field(default_factory=list)
    lm_head: bool = False
    kernel: Literal["auto", "triton", "bitsandbytes"] = "auto"
