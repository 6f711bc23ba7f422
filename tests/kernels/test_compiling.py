"""Every kernel compiles for the GPUs that it is meant for. The interpreter is Python and accepts
more than Triton does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real  # ptxas

ROOT = Path(__file__).resolve().parents[2]


ATTENTION = {"_attend", "_combine", "_write"}
OTHERS = {"whole", "four_bits", "add", "_best_of_block", "_best_of_row", "_norm", "_gated"}
OTHERS |= {"round_rows", "multiply"}
KERNELS = {"80": ATTENTION | OTHERS, "89": ATTENTION, "90": ATTENTION | OTHERS}
# in float16
HALVES = {"80": {"_attend", "_write", "whole", "four_bits"}, "89": set(), "90": {"_attend"}}


@pytest.mark.slow
@pytest.mark.timeout(900)  # minutes of a compiler, and a machine may have something else to do
@pytest.mark.parametrize("capabilities", [["80"], ["89", "90"]], ids="-".join)
def test_every_kernel_compiles(
    capabilities: list[str], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """What Triton has compiled before, from the same source by the same compiler, it finds in
    pytest's own cache. Two processes take as long as each other."""
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
