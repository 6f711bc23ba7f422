"""Compile every Triton kernel to machine code, which takes no GPU; run as a program, as the
interpreter must be off.

    python tests/kernels/compiling.py [--loops] [COMPUTE_CAPABILITY ...]

Prints a line a kernel: its constants, shared memory in bytes, bytes a thread that its registers do
not hold, and with --loops how many instructions its longest loop has.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from machine_code import disassembled, longest_loop, overwritten, spilled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minivllm.attention.kernels import paged, tiles, write
from minivllm.engine import sampling_kernels
from minivllm.passes import fused_kernels
from minivllm.quant.kernels import few_rows, integers, narrow, products
from minivllm.quant.kernels.common import TWO_PRODUCTS_BELOW

# Bytes that a program may have.
SHARED_MEMORY = {80: 166912, 89: 101376, 90: 232448, 100: 232448}
# its kernels stand for those of the others where they have the same instructions, in the memory of
# each
FIRST = 80
ADDED = r"st\.global.*bar\.sync.*atom\.global\.gpu\.acq_rel\.add.*bar\.sync.*ld\.global"
SPILLED = 64  # most bytes a thread that a kernel for speed may keep in memory
FLOAT32 = (
    "scores tops temperatures partial maxima sums key_scales value_scales levels nested_levels "
    "nested_scales offset"
)
KINDS = {
    **dict.fromkeys(FLOAT32.split(), "*fp32"),
    **dict.fromkeys(
        ["tiles", "block_table", "query_starts", "seq_lens", "positions", "tokens"], "*i32"
    ),
    **dict.fromkeys(["scale", "soft_cap", "eps"], "fp32"),
    "slots": "*i64",
    "counters": "*i32",
    "seeds": "*i64",
    "codes": "*u8",
}
FLOATS = "q out qk v weight cos sin qk_out x delta total gate_up bias scales_and_zeros"

Made = tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]
"""Kernel, types that differ from KINDS, constants, and how it is launched."""


def kernels(capability: int) -> Iterator[Made]:
    """What is compiled for these GPUs."""
    yield from attention("bf16", torch.bfloat16)
    if capability != 89:  # which has the instructions of 80
        for made in others("bf16", torch.bfloat16):
            if made[0] is not few_rows.four_bits or capability < 10 * TWO_PRODUCTS_BELOW[0]:
                yield made
        yield from halves(capability)
    if capability == FIRST:  # whole float32 numbers are multiplied in the same way on all
        yield from attention("fp32", torch.float32)
        yield from others("fp32", torch.float32)


def attention(name: str, dtype: torch.dtype) -> Iterator[Made]:
    """Attention over the cache, and what writes into it."""
    floats = dict.fromkeys(FLOATS.split(), f"*{name}")
    for dim, storage, window, capped, block_size in (
        (128, 0, 0, False, 16),
        (64, 1, 0, False, 16),
        (256, 2, 4096, True, 16),
        (128, 0, 2047, False, 256),
    ):
        cache = dict.fromkeys(("keys", "values"), "*i8" if storage else f"*{name}")
        heads = {"HEADS": 16, "KV_HEADS": 4, "HEAD_DIM": dim, "DIM": dim}
        keys = {"WINDOW": window, "BLOCK_N": tiles.keys_per_step(dim, dtype)}
        prompt = tiles.prompt_rows(dim, dtype, bool(storage))
        for rows, split in ((16, 512), (16, 128), (16, 0), (prompt, 0)):
            tile = {
                "SPLIT_SIZE": split,
                "BLOCK_M": rows,
                "BLOCK_SIZE": block_size,
                "CAPPED": capped,
                "FORMAT": storage,
            }
            options = tiles.launch_options(rows, dim, bool(storage))
            yield paged._attend, {**floats, **cache}, {**heads, **keys, **tile}, options
        for split in (512, 128):
            pieces = {"SPLIT_SIZE": split, "BLOCK_M": 16, "PIECES": paged.PIECES}
            yield paged._combine, floats, {**heads, **keys, **pieces}, {"num_warps": 1}
        yield from writes({**floats, **cache}, dim, storage)


def writes(kinds: dict[str, str], dim: int, storage: int) -> Iterator[Made]:
    """Into the cache, with each norm or with keys and values as they are, and beside it."""
    options = {"num_warps": 1 if dim <= 128 else 2}
    cached = {"HEADS": 16, "KV_HEADS": 4, "CACHED": True, "FORMAT": storage}
    alone = {"HEADS": 20, "KV_HEADS": 0, "CACHED": False, "FORMAT": 0}
    turned = [{"NORM": norm, "ROTARY_DIM": dim} for norm in (0, 1, 2)]
    forms = [{**form, **turning} for form in (cached, alone) for turning in turned]
    forms.append({**cached, "HEADS": 0, "NORM": 0, "ROTARY_DIM": 0})
    for form in forms:
        yield write._write, kinds, {"HEAD_DIM": dim, "DIM": dim, **form}, options


def others(name: str, dtype: torch.dtype) -> Iterator[Made]:
    """Products of few rows, norms, activations and draws."""
    # takes long to compile and is not for speed: few rows stand for many
    wide = dtype is torch.float32
    # a number for each output
    floats = {**dict.fromkeys(FLOATS.split(), f"*{name}"), "scale": f"*{name}"}
    for rows, end in ends(16, 4, (16,) if wide else (16, 64)):
        for stored in ("i8", name):
            constants = {
                "BLOCK_M": rows,
                "BLOCK_N": 64,
                "BLOCK_K": 128,
                **end,
                "SCALED": stored == "i8",
            }
            yield few_rows.whole, {**floats, "weight": f"*{stored}"}, constants, {"num_stages": 3}
    pairs = {"pairs": "*i64" if wide else "*i32"}
    for rows, end in ends(8, 2, (8,) if wide else (8, 16, 32, 64)):
        tile = {
            "BLOCK_M": rows,
            "BLOCK_N": 64,
            "BLOCK_K": 64,
            "dtype": products._DTYPES[dtype],
            **end,
        }
        for scales, group, nested in (
            ("fp32", 64, 0),
            ("u8", 64, 256),
            (name, 128, 0),
            (name, 32, 0),
        ):
            constants = {
                **tile,
                "AFFINE": group != 64,
                "BLOCK_K": min(group, 64),
                "GROUP": group,
                "NESTED": nested,
            }
            options = {"num_stages": 4, "num_warps": 2 if rows <= 32 else 4}
            yield (
                few_rows.four_bits,
                {**floats, "scales": f"*{scales}", **pairs},
                constants,
                options,
            )
    if not wide:  # integers are multiplied in the same way whatever the activations are
        yield from narrow_products(floats)
    for rows in (2, 4):
        summed = {"SCALED": True, "BIASED": True, "FACTOR": 1.0, "BLOCK_M": rows, "BLOCK_N": 64}
        yield few_rows.add, floats, summed, {"num_warps": rows}
    for size in (1024, 4096):
        warps = {"num_warps": min(16, max(4, size // 512))}
        for add, gemma in ((True, False), (True, True), (False, False), (False, True)):
            form = {"ADD": add, "GEMMA": gemma, "BLOCK": size}
            yield fused_kernels._norm, floats, form, warps
    for draws in (True, False):
        logits = {"logits": f"*{name}"}
        blocks = {"DRAWS": draws, "BLOCK": sampling_kernels.BLOCK}
        yield sampling_kernels._best_of_block, logits, blocks, {}
        for flag in (False, True):
            form = {"DRAWS": draws, "FLAG": flag, "BLOCK": 128}
            yield sampling_kernels._best_of_row, {"out": "*i64"}, form, {}
    for activation in fused_kernels.ACTIVATIONS.values():
        yield fused_kernels._gated, floats, {"ACTIVATION": activation, "BLOCK": 1024}, {}


def narrow_products(floats: dict[str, str]) -> Iterator[Made]:
    """Activations in 8 bits."""
    kinds = {"x_scales": "*fp32", "x_sums": "*fp32", "zeros": floats["out"]}
    rounding = {"out": "*i8", "scales": "*fp32"}
    yield integers.round_rows, {**floats, **rounding}, {"GROUP": 128, "BLOCK": 128}, {}
    for rows in (1, 64, 512):
        block_m, block_n, warps = narrow.tile_of(rows)
        tile = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BIASED": True}
        for codes, group, grouped in (("*i8", 1024, False), ("*u8", 128, True), ("*u8", 32, True)):
            form = {"GROUP": group, "STEP": min(group, narrow.MOST_STEP)}
            form |= {"PAIRS": grouped, "GROUPED": grouped, "ZEROS": grouped}
            types = {**floats, **kinds, "x": "*i8", "codes": codes, "scales": floats["out"]}
            yield integers.multiply, types, {**tile, **form}, {"num_warps": warps}


def halves(capability: int) -> Iterator[Made]:
    """float16 where its code is not that of bfloat16: keys, values and weights that are widened to
    it or narrowed from it."""
    for made in attention("fp16", torch.float16):
        kernel, _, constants, _ = made
        # products are other instructions on 90
        needed = kernel is paged._attend or capability == FIRST
        if needed and constants.get("FORMAT") and not constants.get("SPLIT_SIZE"):
            yield made
    for made in others("fp16", torch.float16) if capability == FIRST else ():
        kernel, kinds, constants, _ = made
        if kernel in (few_rows.whole, few_rows.four_bits) and not constants["PARTED"]:
            stored = kinds["weight"] if kernel is few_rows.whole else kinds["scales"]
            if stored in ("*i8", "*fp32") or constants.get("GROUP") == 128:
                yield made


def ends(
    least: int, adding: int, several: tuple[int, ...]
) -> Iterator[tuple[int, dict[str, bool | int | float]]]:
    """Rows of a product's tile, and how its programs end: with an output, with a part, or with all
    parts added."""
    end = {"SCALED": False, "BIASED": True, "FACTOR": 0.5, "PARTED": True, "ADDING": 0}
    yield least, {**end, "PARTED": False}
    for rows in several:
        yield rows, {**end, "ADDING": adding if rows == least else 0}


def main(capabilities: list[int], loops: bool = False) -> None:
    for capability in capabilities:
        target = GPUTarget("cuda", capability, 32)
        memory = min(SHARED_MEMORY.values()) if capability == FIRST else SHARED_MEMORY[capability]
        for kernel, kinds, constants, options in kernels(capability):
            known = {**KINDS, **kinds, **dict.fromkeys(constants, "constexpr")}
            signature = {name: known.get(name, "i32") for name in kernel.arg_names}
            # what does not vary is specialised, and of almost every model a multiple of 16
            attributes = {
                (param.num,): [["tt.divisibility", 16]]
                for param in kernel.params
                if signature[param.name].startswith(("*", "i32"))
                and not (param.do_not_specialize or param.do_not_specialize_on_alignment)
            }
            source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
            made = triton.compile(source, target=target, options=options)
            assert made.metadata.shared <= memory, (kernel, constants)
            stack = spilled(made.asm["cubin"])
            assert stack <= SPILLED or kinds.get("out") == "*fp32", (kernel, constants, stack)
            if constants.get("ADDING"):  # the parts are there before the count, and read after it
                assert re.search(ADDED, made.asm["ptx"], re.DOTALL), (kernel, constants)
            code = disassembled(made.asm["cubin"])
            assert not overwritten(code), (kernel, constants, overwritten(code))
            print(
                capability,
                kernel.__name__,
                kinds.get("x"),
                constants,
                made.metadata.shared,
                stack,
                longest_loop(code) if loops else "",
            )


if __name__ == "__main__":
    wanted = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    main(wanted or list(SHARED_MEMORY), loops="--loops" in sys.argv)
