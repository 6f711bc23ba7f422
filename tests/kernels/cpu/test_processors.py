"""The C++ kernels compile for every kind of processor that they have a way for, though only one of
them is at hand; products also run, with every set of instructions that it has and with their twins
of plain C++."""

from __future__ import annotations

import ctypes
import functools
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from minivllm.kernels.cpu import library
from minivllm.kernels.cpu.linear import Format
from minivllm.quant.iq4_nl import LEVELS

pytestmark = pytest.mark.real  # the C++ compiler, for each kind of processor
FOLDER = Path(library.__file__).parent
KINDS = {
    "x86-64": "no AVX2: vectors alone",
    "haswell": "AVX2",
    "skylake-avx512": "AVX-512 that multiplies no bfloat16",
    "cascadelake": "AVX-512 that multiplies 8 bits, but no bfloat16",
    "cooperlake": "AVX512-BF16",
    "alderlake": "AVX2 that multiplies 8 bits",
    "sapphirerapids": "the matrix unit",
}
COMPILER = shutil.which("c++")
QUICKLY = ["-O1", "-fno-tree-pta"]  # an analysis that takes a tenth of the time


@pytest.mark.skipif(
    COMPILER is None or platform.machine() != "x86_64", reason="needs a C++ compiler for x86-64"
)
@pytest.mark.parametrize("processor", KINDS)
@pytest.mark.parametrize("source", ["attention", "fused", "linear", "linear_int8"])
def test_the_kernels_compile(source: str, processor: str) -> None:
    flags = [flag for flag in library._FLAGS if not flag.startswith(("-march", "-O"))]
    command = [str(COMPILER), *flags, f"-march={processor}", "-std=c++17", "-fsyntax-only"]
    done = subprocess.run(
        [*command, str(FOLDER / f"{source}.cpp")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# Instructions of the products of 8 bits: compiler flags, and what the processor must have to run.
WAYS: dict[str, tuple[list[str], set[str]]] = {
    "plain C++": (["-mno-avx"], set()),
    "twin of wide vectors": (["-mavx2", "-mfma", "-mf16c", "-DMINIVLLM_ONE_BY_ONE"], {"avx2"}),
    "AVX2": (["-mavx2", "-mfma", "-mf16c"], {"avx2"}),
    "AVX-VNNI": (["-mavx2", "-mfma", "-mf16c", "-mavxvnni"], {"avx2", "avx_vnni"}),
    "AVX-512": (["-march=skylake-avx512"], {"avx512bw", "avx512vl", "avx512dq"}),
    "AVX512-VNNI": (["-march=cascadelake"], {"avx512_vnni", "avx512vl", "avx512dq"}),
    "the matrix unit's twin": (
        ["-march=cascadelake", "-DMINIVLLM_TWIN_TILES"],
        {"avx512_vnni", "avx512vl", "avx512dq"},
    ),
    "the matrix unit": (["-march=sapphirerapids"], {"amx_int8"}),
}
ENTRY = """
#include "linear_int8.cpp"
using namespace minivllm;
extern "C" __attribute__((visibility("default"))) void run(
    long format, long outputs, long inputs, long group, long scale_groups, long rows, long few_rows,
    const uint8_t* weight, const BFloat16* scales, const BFloat16* zeros, const BFloat16* x,
    uint8_t* packed, BFloat16* out) {
  const auto kind = static_cast<Format>(format);
  const long bytes = panel_bytes(kind, inputs);
  for (long p = 0; p * kPanel < outputs; ++p)
    pack_quads(kind, weight + p * kPanel * inputs, outputs - p * kPanel, inputs,
               packed + p * bytes);
  const Weight panels{kind, packed, scales, zeros, inputs, outputs, group, scale_groups, few_rows};
  linear_int8(x, inputs, rows, panels, nullptr, out);
}
"""
OUTPUTS, INPUTS = 100, 768
# Format, inputs of a scale of activations, scales of the weight, whether it has zeros.
SHAPES = [
    (Format.INT8_QUADS, INPUTS, 1, False),
    (Format.INT8_QUADS, 128, 1, False),
    (Format.INT8_QUADS, 32, INPUTS // 32, False),
    (Format.INT4_QUADS, 128, INPUTS // 128, True),
    (Format.INT4_QUADS, 32, INPUTS // 32, False),
    (Format.UINT4_QUADS, 32, INPUTS // 32, True),
]


@functools.cache
def flags_here() -> set[str]:
    text = Path("/proc/cpuinfo").read_text()
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return set(found[1].split()) if found else set()


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Floats cut to bfloat16."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def floats(values: NDArray[np.uint16]) -> NDArray[np.float64]:
    return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def levels(form: Format, codes: NDArray[Any]) -> NDArray[np.float64]:
    """The values of stored integers before they are scaled."""
    if form is Format.IQ4_NL:
        return np.array(LEVELS, np.float64)[codes]
    return codes - 8.0 * (form in (Format.INT4, Format.INT4_QUADS))


def product(
    x: NDArray[np.uint16], weight: NDArray[np.float64], group: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The exact product of activations rounded to 8 bits, and the sum of its magnitudes."""
    groups = floats(x).astype(np.float32).reshape(len(x), -1, group)
    largest = np.abs(groups).max(-1, keepdims=True)
    integers = np.rint(groups * (np.float32(127) / largest)).astype(np.float64)
    rounded = (integers * (largest / np.float32(127))).reshape(len(x), -1)
    return rounded @ weight.T, np.abs(rounded) @ np.abs(weight.T)


def compiled(options: list[str], needed: set[str], text: str, folder: Path) -> Callable[..., None]:
    """The function `run` of a C++ program, compiled for some instructions."""
    if COMPILER is None or platform.machine() != "x86_64":
        pytest.skip("needs a C++ compiler for x86-64")
    if needed - flags_here():
        pytest.skip(f"this processor has no {', '.join(sorted(needed - flags_here()))}")
    (folder / "entry.cpp").write_text(text)
    flags = [flag for flag in library._FLAGS if not flag.startswith(("-march", "-O", "-fopenmp"))]
    command = [COMPILER, *flags, *options, *QUICKLY, "-std=c++17", "-shared", "-fPIC"]
    command.append(f"-I{FOLDER}")
    files = [folder / "entry.cpp", "-o", folder / "products.so"]
    done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    entry = ctypes.CDLL(str(folder / "products.so")).run

    def call(numbers: Sequence[int], tensors: Sequence[NDArray[Any] | None]) -> None:
        pointers = (None if t is None else t.ctypes.data_as(ctypes.c_void_p) for t in tensors)
        entry(*map(ctypes.c_long, numbers), *pointers)

    return call


@pytest.fixture(params=WAYS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """ENTRY, compiled for some instructions."""
    return compiled(*WAYS[request.param], ENTRY, tmp_path)


def test_products_of_8_bits_are_the_same_everywhere(run: Callable[..., None]) -> None:
    """Weights are all integers of their format, the extremes in whole rows; every number of rows
    meets some other part of the kernel, in the way for few rows and in that for many."""
    random = np.random.default_rng(0)
    for form, group, scales_of, has_zeros in SHAPES:
        low, high = (-128, 127) if form is Format.INT8_QUADS else (0, 15)
        integers = random.integers(low, high, (OUTPUTS, INPUTS), endpoint=True)
        integers[:2] = [[low], [high]]
        scales, zeros = (bfloat16(random.normal(size=(2, scales_of, 64))) for _ in range(2))
        x = bfloat16(random.normal(size=(60, INPUTS)))
        x[3] = bfloat16(np.full(INPUTS, -2.0))
        scale, zero = (
            floats(t).transpose(0, 2, 1).reshape(128, -1)[:OUTPUTS].repeat(INPUTS // scales_of, 1)
            for t in (scales, zeros)
        )
        dense = levels(form, integers) * scale + zero * has_zeros
        exact, magnitudes = product(x, dense, group)
        packed = np.empty((2, INPUTS * 64 // (1 if low else 2)), np.uint8)
        outs = []
        for rows in (1, 2, 6, 7, 20, 60):
            out = np.zeros((rows, OUTPUTS), np.uint16)
            weight = integers.astype(np.int8)
            tensors = (weight, scales, zeros if has_zeros else None, x, packed, out)
            for few_rows in (-1, 1, 6, 256):
                out[:] = 0
                run((form, OUTPUTS, INPUTS, group, scales_of, rows, few_rows), tensors)
                outs.append(out.copy())
            limit = 2**-8 * np.abs(exact[:rows]) + 2**-20 * magnitudes[:rows]
            assert (np.abs(floats(out) - exact[:rows]) <= limit).all(), (form, group, rows)
        assert all(np.array_equal(out, outs[-1][: len(out)]) for out in outs)


# Instructions of the products of 16 bits; the twin is that of the matrix unit.
BF16_WAYS: dict[str, tuple[list[str], set[str]]] = {
    "AVX2": (["-mavx2", "-mfma", "-mf16c"], {"avx2", "fma", "f16c"}),
    "AVX-512": (["-march=skylake-avx512"], {"avx512bw", "avx512vl", "avx512dq"}),
    "AVX512-BF16": (["-march=cooperlake"], {"avx512_bf16", "avx512_vnni"}),
    "the matrix unit's twin": (
        ["-march=cooperlake", "-DMINIVLLM_TWIN_TILES"],
        {"avx512_bf16", "avx512_vnni"},
    ),
    "the matrix unit": (["-march=sapphirerapids"], {"amx_bf16"}),
}
BF16_ENTRY = ENTRY.replace("linear_int8.cpp", "linear.cpp").replace("linear_int8(", "linear(")
BF16_ENTRY = BF16_ENTRY.replace("pack_quads(", "pack_panel(").replace(
    "weight + p * kPanel * inputs",
    "weight + p * kPanel * inputs * (kind == Format::kBfloat16 ? 2 : 1)",
)
# What is compiled apart, with tests of its own, and is not reached from the formats below.
BF16_ENTRY += """
#include <cstdlib>
void minivllm::pack_quads(Format, const uint8_t*, int64_t, int64_t, uint8_t*) { std::abort(); }
void minivllm::linear_int8(const BFloat16*, int64_t, int64_t, const Weight&, const BFloat16*,
                           BFloat16*) { std::abort(); }
"""
# Format, inputs of a scale, whether it has zeros.
BF16_SHAPES = [
    (Format.BFLOAT16, INPUTS, False),
    (Format.INT8, INPUTS, False),
    (Format.INT8, 32, False),
    (Format.INT4, 32, True),
    (Format.INT4, 128, False),
    (Format.UINT4, 32, True),
    (Format.IQ4_NL, 32, False),
]


@pytest.mark.parametrize("way", BF16_WAYS)
def test_products_of_16_bits_are_right_with_every_set_of_instructions(
    way: str, tmp_path: Path
) -> None:
    """Weights of all formats; a row has the same bits in any batch."""
    multiply = compiled(*BF16_WAYS[way], BF16_ENTRY, tmp_path)
    random = np.random.default_rng(0)
    for form, group, has_zeros in BF16_SHAPES:
        groups = INPUTS // group
        scales, zeros = (bfloat16(random.normal(size=(2, groups, 64))) for _ in range(2))
        x = bfloat16(random.normal(size=(60, INPUTS)))
        if form is Format.BFLOAT16:
            weight: NDArray[Any] = bfloat16(random.normal(size=(OUTPUTS, INPUTS)))
            dense = floats(weight)
        else:
            low, high = (-127, 127) if form is Format.INT8 else (0, 15)
            weight = random.integers(low, high, (OUTPUTS, INPUTS), endpoint=True).astype(np.int8)
            scale, zero = (
                floats(t).transpose(0, 2, 1).reshape(128, -1)[:OUTPUTS].repeat(group, 1)
                for t in (scales, zeros)
            )
            dense = levels(form, weight) * scale + zero * has_zeros
        exact, magnitudes = floats(x) @ dense.T, np.abs(floats(x)) @ np.abs(dense.T)
        packed = np.empty((2, 2 * INPUTS * 64), np.uint8)
        outs = []
        for rows in (1, 2, 6, 7, 20, 60):
            out = np.zeros((rows, OUTPUTS), np.uint16)
            tensors = (weight, scales, zeros if has_zeros else None, x, packed, out)
            multiply((form, OUTPUTS, INPUTS, group, groups, rows, -1), tensors)
            outs.append(out)
            limit = 2**-8 * np.abs(exact[:rows]) + 2**-16 * magnitudes[:rows]
            assert (np.abs(floats(out) - exact[:rows]) <= limit).all(), (form, group, rows)
        assert all(np.array_equal(out, outs[-1][: len(out)]) for out in outs)
