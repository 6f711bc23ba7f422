"""Compile every Triton kernel to machine code, which takes no GPU; run as a program, as the interpreter must be off.

    python tests/kernels/compiling.py [COMPUTE_CAPABILITY ...]

Prints a line a kernel: registers are not told by the compiler's metadata, shared memory in bytes is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minivllm.attention.kernels import paged, write
from minivllm.models.kernels import small
from minivllm.quant.kernels import products

SHARED_MEMORY = {80: 166912, 90: 232448}  # bytes that a program may have
FLOAT32 = "partial maxima sums key_scales value_scales levels nested_levels nested_scales offset"
KINDS = {
    **dict.fromkeys(FLOAT32.split(), "*fp32"),
    **dict.fromkeys(["tiles", "block_table", "query_starts", "seq_lens"], "*i32"),
    **dict.fromkeys(["scale", "soft_cap", "eps"], "fp32"),
    "slots": "*i64",
    "codes": "*u8",
}
FLOATS = "q out qk v weight cos sin qk_out x delta total gate_up bias scales_and_zeros"


def kernels() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """Kernel, types that differ from KINDS, constants, and how it is launched."""
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        floats = dict.fromkeys(FLOATS.split(), f"*{name}")
        for dim, storage, window, capped in ((128, 0, 0, False), (64, 1, 0, False), (256, 2, 4096, True)):
            cache = dict.fromkeys(("keys", "values"), "*i8" if storage else f"*{name}")
            heads = {"HEADS": 16, "KV_HEADS": 4, "HEAD_DIM": dim, "DIM": dim}
            for rows, split in ((16, 512), (paged.prompt_rows(dim, dtype), 0)):
                constants = {
                    **heads,
                    "BLOCK_SIZE": 16,
                    "WINDOW": window,
                    "CAPPED": capped,
                    "FORMAT": storage,
                    "SPLIT_SIZE": split,
                    "BLOCK_M": rows,
                    "BLOCK_N": paged.keys_per_step(dim, dtype),
                }
                yield paged._attend, {**floats, **cache}, constants, {"num_stages": 2}
            yield paged._combine, floats, {**heads, "BLOCK_M": 16}, {}
            written = {"ROTARY_DIM": dim, "NORM": 1, "CACHED": True, "FORMAT": storage}
            yield write._write, {**floats, **cache}, {**heads, **written}, {"num_warps": 1}
        for rows in (16, 64):
            tile = {"BLOCK_M": rows, "BLOCK_K": 128}
            outputs = {"BLOCK_N": 64}
            yield products._int8, {**floats, "weight": "*i8"}, {**tile, **outputs}, {"num_stages": 3}
            for nested in (0, 256):
                scales = {"scales": "*u8" if nested else "*fp32"}
                constants = {**tile, **outputs, "GROUP": 64, "NESTED": nested}
                yield products._nf4, {**floats, **scales}, constants, {"num_stages": 1}
            yield products._int4, {**floats, "weight": "*u8"}, {**tile, "GROUP": 128}, {"num_stages": 3}
        summed = {"SCALED": True, "BIASED": True, "BLOCK": 1024}
        yield products._add, {**floats, "scale": f"*{name}"}, summed, {}
        yield small._norm, floats, {"ADD": True, "GEMMA": True, "BLOCK": 4096}, {}
        yield small._gated, floats, {"ACTIVATION": 1, "BLOCK": 1024}, {}


def main(capabilities: list[int]) -> None:
    for capability in capabilities:
        target = GPUTarget("cuda", capability, 32)
        for kernel, kinds, constants, options in kernels():
            known = {**KINDS, **kinds, **dict.fromkeys(constants, "constexpr")}
            signature = {name: known.get(name, "i32") for name in kernel.arg_names}
            source = ASTSource(kernel, signature=signature, constexprs=constants)
            made = triton.compile(source, target=target, options=options)
            assert made.metadata.shared <= SHARED_MEMORY[capability], (kernel, constants)
            print(capability, kernel.__name__, signature.get("x", ""), constants, made.metadata.shared)


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or list(SHARED_MEMORY))
