"""attention=torch_varlen: what the kernel is given, by a stand-in for it; tests/gpu has the kernel
itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from minivllm.attention import ragged
from minivllm.cache.kv import KVCache
from minivllm.cache.spec import AttentionSpec, CacheLayout
from minivllm.errors import BadInput
from tests.attention.stand_in import attend
from tests.attention.test_backends import CPU, LAYOUTS, SPECS, run_in_pieces
from tests.later import Later

LIBRARY = "torch.nn.attention.varlen"
NAME = "minivllm.attention.torch_varlen"  # imports torch's compiler
torch_varlen = Later(NAME)


def varlen_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: object = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """As torch 2.11 has it: no grouped queries, no block tables."""
    assert query.shape[1] == key.shape[1]
    return varlen_2_12(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size
    )


def varlen_2_12(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: object = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """As torch 2.12 has it."""
    assert cu_seq_k is not None and cu_seq_k.dtype == torch.int32 and scale is not None
    lens = cu_seq_k.diff().tolist()
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), max(lens))
    assert enable_gqa == (query.shape[1] != key.shape[-2])
    if block_table is not None:
        assert key.shape[1] % 256 == 0 and num_splits == 1
        assert seqused_k is not None and seqused_k.tolist() == lens
    return attend(query, key, value, cu_seq_q, lens, scale, window_size, table=block_table)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Tensor]], None]:
    """Takes a stand-in for torch's function and lets the backend be built on the CPU."""
    monkeypatch.setattr(f"{NAME}.check_kernel", lambda *_: (9, 0))
    return lambda function: monkeypatch.setattr(f"{LIBRARY}.varlen_attn", function)


@pytest.mark.parametrize("function", [varlen_2_11, varlen_2_12])
@pytest.mark.parametrize("layout", [*LAYOUTS.values(), CacheLayout(256, 6), CacheLayout(512, 6)])
@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.soft_cap is None])
def test_the_kernel_gets_each_sequence_whole(
    backend: Callable[..., None], name: str, layout: CacheLayout, function: Callable[..., Tensor]
) -> None:
    backend(function)
    made: list[torch_varlen.TorchVarlenBackend] = []

    def make(specs: list[AttentionSpec], kv: KVCache) -> torch_varlen.TorchVarlenBackend:
        made.append(torch_varlen.TorchVarlenBackend(specs, kv))
        return made[-1]

    for seed in range(2):
        for out, expected in run_in_pieces(make, SPECS[name], layout, torch.float32, seed):
            torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)
    in_place = function is varlen_2_12 and layout.block_size % 256 == 0
    assert all((one.counters["tokens_gathered"] == 0) == in_place for one in made)
    assert all(one.counters["launches"] for one in made)
    assert ("in place" in made[0].library) == in_place


def test_a_compressed_cache_is_gathered(backend: Callable[..., None]) -> None:
    backend(varlen_2_12)
    spec, layout = SPECS["grouped"], CacheLayout(256, 6)
    kind = torch_varlen.TorchVarlenBackend
    pairs = run_in_pieces(kind, spec, layout, torch.float32, 0, kv_dtype="int8")
    assert max(float((out.double() - expected).abs().max()) for out, expected in pairs) < 0.05


def test_the_installed_torch_takes_what_it_is_given() -> None:
    kwargs = Later(LIBRARY).varlen_attn.__kwdefaults__
    assert {"scale", "window_size"} <= kwargs.keys()
    if "block_table" in kwargs:
        assert {"enable_gqa", "seqused_k", "num_splits"} <= kwargs.keys()


def test_what_it_cannot_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS["grouped"]
    kv = KVCache([spec], CacheLayout(4, 4), torch.float32, CPU)
    with pytest.raises(BadInput, match="needs an NVIDIA GPU; use attention=auto or attention=sdpa"):
        torch_varlen.TorchVarlenBackend([spec], kv)
    monkeypatch.setattr(f"{NAME}.check_kernel", lambda *_: (9, 0))
    with pytest.raises(
        BadInput, match="cannot apply this model's soft cap on scores; use attention=triton"
    ):
        torch_varlen.TorchVarlenBackend([SPECS["soft cap"]], kv)


class OnGPU:
    """Stands for the tensors of a cache on a GPU."""

    device = torch.device("cuda")


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "complaint"),
    [
        ((7, 5), torch.bfloat16, 16, "compute capability 8.0 or later; use attention=sdpa"),
        ((8, 0), torch.float32, 16, "computes in 16 bits only; use quant=bf16, or attention=sdpa"),
        ((8, 0), torch.float16, 20, "multiple of 8 up to 256; use attention=triton or"),
        ((8, 0), torch.float16, 264, "multiple of 8 up to 256; use attention=triton or"),
        ((8, 0), torch.float16, 256, None),
    ],
)
def test_what_all_these_kernels_need(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    complaint: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    spec = AttentionSpec(2, 1, head_dim, 1.0)
    kv = KVCache([spec], CacheLayout(4, 4), dtype, CPU)
    kv.parts = [(OnGPU(),)]  # type: ignore[list-item]
    if complaint is None:
        assert ragged.check_kernel("flash", [spec], kv) == capability
        return
    with pytest.raises(BadInput, match=f"attention=flash .*{complaint}"):
        ragged.check_kernel("flash", [spec], kv)
