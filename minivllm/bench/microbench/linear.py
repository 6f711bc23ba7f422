"""Products with weights in each format, for the shapes of a model's linear layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from minivllm.bench.microbench.case import ITEM, MOST_COPIES, Case, Setting, Side
from minivllm.kernels.device import BuildContext
from minivllm.quant.base import kernel_name, matrix_dtype
from minivllm.quant.int4 import Int4
from minivllm.quant.int8 import Int8
from minivllm.quant.nf4 import NF4
from minivllm.quant.plain import plain_linear

# int8 and int4 whose activations have 8 bits, beside themselves with activations in 16
NARROW = {"w8a8": "int8", "w4a8": "int4"}
GROUP = 128  # inputs that share a scale there, or as many as divide the layer's
NARROW_TOLERANCE = 0.02  # rounding to 127 steps of a group's largest value
LIBRARIES = {"int8": "torch", "int4": "torch", "nf4": "bitsandbytes"}  # values of quant.kernel
METHODS: dict[str, Callable[..., Int8 | Int4 | NF4]] = {"int8": Int8, "int4": Int4, "nf4": NF4}


def shapes(setting: Setting) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a layer's products, and of the head."""
    c = setting.model
    width = c.num_heads * c.head_dim
    inner = c.moe_intermediate_size if c.num_experts else c.intermediate_size
    return {
        "qkv_proj": (width + 2 * c.num_kv_heads * c.head_dim, c.hidden_size),
        "o_proj": (c.hidden_size, width),
        "gate_up_proj": (2 * inner, c.hidden_size),
        "down_proj": (c.hidden_size, inner),
        "lm_head": (c.vocab_size, c.hidden_size),
    }


def cases(setting: Setting) -> Iterator[Case]:
    """Every format on every shape; the head is not quantised by default and so is here in bf16
    alone."""
    for name, shape in shapes(setting).items():
        for form in setting.formats:
            lacks = setting.kernels is None or not setting.kernels.has_linear
            if form in NARROW and lacks and not setting.triton:
                continue  # no kernel of this device multiplies 8 bits
            if name != "lm_head" or form == "bf16":
                yield from _products(setting, name, shape, form)


def _products(setting: Setting, name: str, shape: tuple[int, int], form: str) -> Iterator[Case]:
    weight = setting.random(*shape) / shape[1] ** 0.5
    ours = _layers(setting, weight, form, own=True)
    theirs = _layers(setting, weight, form, own=False)
    kernel, other = kernel_name(ours[0]), kernel_name(theirs[0])
    stored = sum(t.nbytes for t in (*ours[0].parameters(), *ours[0].buffers()))
    for rows in setting.rows:
        x = setting.random(len(ours), rows, shape[1])
        yield Case(
            f"linear {form}",
            f"{name} {shape[0]} x {shape[1]}",
            rows,
            Side(kernel, _caller(ours, x)),
            Side(other, _caller(theirs, x)) if kernel != other else None,
            bytes=stored + ITEM * rows * sum(shape),
            operations=2.0 * rows * shape[0] * shape[1],
            copies=len(ours),
            tolerance=NARROW_TOLERANCE if form in NARROW else Case.tolerance,
            matrix_dtype=matrix_dtype(ours[0]) or Case.matrix_dtype,
        )


def _caller(layers: Sequence[nn.Module], x: Tensor) -> Callable[[int], Tensor]:
    def call(i: int) -> Tensor:
        i %= len(layers)
        out: Tensor = layers[i](x[i])
        return out

    return call


def _layers(setting: Setting, weight: Tensor, form: str, own: bool) -> list[nn.Module]:
    """The same weight again and again, as one side stores it."""
    wide, narrow = NARROW.get(form, form), form in NARROW
    bits = {"bf16": 16, "int8": 8}.get(wide, 4)
    copies = min(MOST_COPIES, setting.copies(weight.numel() * bits / 8))
    context = BuildContext(setting.device, setting.kernels if own or narrow else None)
    kernel = "triton" if setting.triton else "auto"
    knobs: dict[str, Any] = {"kernel": kernel if own or narrow else LIBRARIES.get(form)}
    if narrow:
        size = "activation_group_size" if wide == "int8" else "group_size"
        group = math.gcd(weight.shape[1], GROUP)
        knobs |= {"activations": "int8" if own else "none", size: group}
    method = METHODS[wide](**knobs).within(context) if wide in METHODS else None

    def make() -> nn.Module:
        if method is None:
            return plain_linear(weight.clone(), None, context.kernels)
        return method.pack(weight.clone(), None)

    layers = nn.ModuleList(make() for _ in range(copies))
    if own and setting.triton:
        from minivllm.quant.kernels.products import stream  # imports Triton

        stream(layers)
    return list(layers)
