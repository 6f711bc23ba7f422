"""Logits by Triton's kernels beside those by torch's and bitsandbytes', at Qwen3-0.6B's shapes in
two layers: before any of them is timed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from minivllm import LLM
from tests.reference import make_checkpoint

pytestmark = pytest.mark.gpu
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 512,
}
# A decoding tile; products of 16, 32 and 64 rows; and more rows than these kernels take.
LENGTHS = (5, 16, 30, 60, 200)
PLAIN = ("attention=sdpa", "runtime.fused_kernels=off", "runtime.linear_kernel=torch")
ROUNDING = 4  # times the difference between bf16 and fp32 that two ways in bf16 may differ by


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint(path, "qwen3", dtype=torch.bfloat16, **SHAPE)
    return path


def logits(folder: Path, quant: str, *overrides: str) -> list[Tensor]:
    """Of a prompt of each length."""
    knobs = ["runtime.cuda_graphs=false", "cache.num_blocks=64", *overrides]
    with LLM(str(folder), device="cuda", quant=quant, overrides=knobs) as llm:
        return [llm.logits([7 * i % 500 for i in range(n)]).float().cpu() for n in LENGTHS]


def difference(ones: list[Tensor], others: list[Tensor]) -> float:
    """The largest relative one in the Euclidean norm."""
    pairs = zip(ones, others, strict=True)
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


@pytest.fixture(scope="module")
def rounding(folder: Path) -> float:
    """The difference that rounding to bf16 makes."""
    return difference(logits(folder, "bf16", *PLAIN), logits(folder, "fp32", *PLAIN))


@pytest.mark.parametrize(
    ("quant", "ours", "theirs"),
    [
        ("bf16", ["attention=triton"], []),
        ("bf16", ["runtime.fused_kernels=triton"], []),
        ("bf16", ["attention=triton", "runtime.fused_kernels=triton"], []),
        ("bf16", ["runtime.linear_kernel=triton"], []),
        ("nf4", ["quant.kernel=triton"], ["quant.kernel=bitsandbytes"]),
        ("int8", ["quant.kernel=triton"], ["quant.kernel=torch"]),
        ("int4", ["quant.kernel=triton"], ["quant.kernel=torch"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_kernels_give_the_logits_of_torchs(
    quant: str, ours: list[str], theirs: list[str], folder: Path, rounding: float
) -> None:
    found = logits(folder, quant, *PLAIN, *ours)
    assert all(bool(one.isfinite().all()) for one in found)
    assert difference(found, logits(folder, quant, *PLAIN, *theirs)) <= ROUNDING * rounding
