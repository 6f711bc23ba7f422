"""The C++ kernels compile for every kind of processor that they have a way for; only one of them is
at hand."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from minivllm.kernels.cpu import library

FOLDER = Path(library.__file__).parent
KINDS = {
    "x86-64": "no AVX2: vectors alone",
    "haswell": "AVX2",
    "skylake-avx512": "AVX-512 that multiplies no bfloat16",
    "cooperlake": "AVX512-BF16",
    "sapphirerapids": "the matrix unit",
}
COMPILER = shutil.which("c++")


@pytest.mark.skipif(
    COMPILER is None or platform.machine() != "x86_64", reason="needs a C++ compiler for x86-64"
)
@pytest.mark.parametrize("processor", KINDS)
@pytest.mark.parametrize("source", ["attention", "fused", "linear"])
def test_the_kernels_compile(source: str, processor: str) -> None:
    flags = [flag for flag in library._FLAGS if not flag.startswith(("-march", "-O"))]
    command = [str(COMPILER), *flags, f"-march={processor}", "-std=c++17", "-fsyntax-only"]
    done = subprocess.run(
        [*command, str(FOLDER / f"{source}.cpp")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
