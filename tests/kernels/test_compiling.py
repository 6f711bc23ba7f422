"""Every kernel compiles for the GPUs that it is meant for. The interpreter is Python and accepts
more than Triton does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.machine_code import overwritten

ROOT = Path(__file__).resolve().parents[2]


ATTENTION = {"_attend", "_combine", "_write"}
OTHERS = {"whole", "four_bits", "add", "_best_of_block", "_best_of_row", "_norm", "_gated"}
OTHERS |= {"round_rows", "multiply"}
KERNELS = {
    "80": ATTENTION | OTHERS,
    "89": ATTENTION,
    "90": ATTENTION | OTHERS,
    "100": (ATTENTION | OTHERS) - {"four_bits"},
}
# in float16
HALVES = {
    "80": {"_attend", "_write", "whole", "four_bits"},
    "89": set(),
    "90": {"_attend"},
    "100": {"_attend"},
}


@pytest.mark.real  # ptxas
@pytest.mark.slow
@pytest.mark.timeout(900)  # minutes of a compiler, and a machine may have something else to do
@pytest.mark.parametrize("capabilities", [["80"], ["89", "90"], ["100"]], ids="-".join)
def test_every_kernel_compiles(
    capabilities: list[str], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """What Triton has compiled before, from the same source by the same compiler, it finds in
    pytest's own cache."""
    cache = getattr(pytestconfig, "cache", None)
    made_before = cache.mkdir("triton") if cache else tmp_path
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/kernels/compiling.py"), *capabilities],
        env={**environment, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(made_before)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made = [line.split()[:3] for line in done.stdout.splitlines()]
    for capability in capabilities:
        own = [(name, dtype) for of, name, dtype in made if of == capability]
        assert {name for name, _ in own} == KERNELS[capability]
        assert {name for name, dtype in own if dtype == "*fp16"} == HALVES[capability]


PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4].tnspB, R24, gsb0"
SHARED = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"
WAIT, ONE_LATER = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ([PRODUCT, WAIT, "MOV R4, R9", "EXIT"], None),
        ([PRODUCT, "MOV R8, R4", "STS.128 [R5], R4", WAIT, "EXIT"], None),  # beside it, or read
        ([PRODUCT, "MOV R7, R9", WAIT, "EXIT"], "MOV R7, R9"),
        ([PRODUCT, "@P0 LDS.128 R4, [R9]", WAIT, "EXIT"], "LDS.128 R4, [R9]"),
        ([PRODUCT, "LDG.E.128 R0, desc[UR4][R2.64]", "LDS.64 R2, [R9]", WAIT, "EXIT"], None),
        ([PRODUCT, "ISETP.GE.AND P0, PT, R4, R9, PT", "SHFL.BFLY PT, R6, R9, 0x1, 0x1f"], "SHFL"),
        ([SHARED, "MOV R4, R9", WAIT, "EXIT"], None),  # nothing to overwrite
        ([PRODUCT, SHARED, ONE_LATER, "MOV R4, R9", WAIT, "EXIT"], None),
        ([PRODUCT, ONE_LATER, "MOV R4, R9", WAIT, "EXIT"], "MOV R4, R9"),
        # around a loop, and past a branch that is not taken
        ([".L_x_1:", "MOV R4, R9", PRODUCT, "@P0 BRA `(.L_x_1)", WAIT, "EXIT"], "MOV R4, R9"),
        ([".L_x_1:", "MOV R4, R9", PRODUCT, WAIT, "@P0 BRA `(.L_x_1)", "EXIT"], None),
        ([PRODUCT, "BRA `(.L_x_2)", "MOV R4, R9", ".L_x_2:", WAIT, "EXIT"], None),
    ],
)
def test_registers_that_a_product_reads_are_watched(lines: list[str], wrong: str | None) -> None:
    """`overwritten` on code that is made up; on that of every kernel it is checked above."""
    code = "\n".join(
        line if line.endswith(":") else f"        /*{16 * i:04x}*/       {line} ;"
        for i, line in enumerate(lines)
    )
    found = overwritten(code)
    assert bool(found) == (wrong is not None) and all(str(wrong) in one for one in found)
