"""attention=flash: what each version's function is given, by stand-ins with its signature;
tests/gpu has the real ones."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm import LLM
from minivllm.attention import flash
from minivllm.attention.flash import PACKAGES, FlashBackend, check_kernel
from minivllm.attention.options import FlashAttentionOptions
from minivllm.cache.kv import KVCache, kv_cache
from minivllm.cache.spec import CacheLayout
from minivllm.config.compose import compose
from minivllm.errors import BadInput
from tests.attention.stand_in import attend
from tests.attention.test_backends import CPU, SPECS, run_in_pieces

LAYOUTS = {2: CacheLayout(256, 6), 3: CacheLayout(4, 40), 4: CacheLayout(16, 20)}


def seen(causal: bool, window_size: tuple[int | None, int | None]) -> tuple[int, int]:
    """The window that both settings make together."""
    left, right = (-1 if side is None else side for side in window_size)
    return left, 0 if causal else right


def version_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """flash-attn 2.8."""
    assert block_table is not None and k.shape[1] % 256 == 0 and softmax_scale is not None
    assert cu_seqlens_k.dtype == torch.int32
    lens = cu_seqlens_k.diff().tolist()
    assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), max(lens))
    window = seen(causal, window_size)
    return attend(q, k, v, cu_seqlens_q, lens, softmax_scale, window, softcap, block_table)


def version_3(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: None = None,
    v: None = None,
    qv: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: None = None,
    num_splits: int = 0,
    pack_gqa: None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """flash-attn 3."""
    assert cache_seqlens is not None and cu_seqlens_q is not None and page_table is not None
    assert softmax_scale is not None and cache_seqlens.dtype == torch.int32
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    lens, window = cache_seqlens.tolist(), seen(causal, window_size)
    return attend(
        q, k_cache, v_cache, cu_seqlens_q, lens, softmax_scale, window, softcap, page_table
    )


def version_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    **others: Any,
) -> tuple[Tensor, None]:
    """flash-attn 4, which takes no starts of the keys beside a table, and returns two things."""
    assert (
        not others and cu_seqlens_k is None and softmax_scale is not None and page_table is not None
    )
    assert cu_seqlens_q is not None and seqused_k is not None and seqused_k.dtype == torch.int32
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == page_table.shape[1] * k.shape[1]
    lens, window = seqused_k.tolist(), seen(causal, window_size)
    return attend(q, k, v, cu_seqlens_q, lens, softmax_scale, window, softcap, page_table), None


FUNCTIONS = {2: version_2, 3: version_3, 4: version_4}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper GPU, as far as the backend asks, and no package installed."""
    monkeypatch.setattr(flash, "check_kernel", lambda *_: (9, 0))
    for name, _, _ in PACKAGES.values():
        monkeypatch.setitem(sys.modules, name, None)


def install(monkeypatch: pytest.MonkeyPatch, *versions: int) -> None:
    """Stand-ins for these versions' modules."""
    for number in versions:
        name, function, _ = PACKAGES[number]
        module = ModuleType(name)
        setattr(module, function, FUNCTIONS[number])
        module.__version__ = f"{number}.1"  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("version", PACKAGES)
@pytest.mark.parametrize("name", SPECS)
def test_the_kernel_gets_each_sequence_whole(
    name: str, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, version)
    for seed in range(2):
        pairs = run_in_pieces(FlashBackend, SPECS[name], LAYOUTS[version], torch.float32, seed)
        for out, expected in pairs:
            torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("capability", "installed", "asked", "chosen"),
    [
        ((8, 0), (2, 3, 4), "auto", 2),
        ((9, 0), (2, 3, 4), "auto", 3),
        ((9, 0), (2, 4), "auto", 4),
        ((9, 0), (2, 3, 4), 2, 2),
        ((10, 0), (2, 3, 4), "auto", 4),
        ((10, 0), (2, 3), "auto", 2),
        ((12, 0), (2, 3, 4), "auto", 2),
    ],
)
def test_the_version_made_for_the_gpu_is_taken(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    installed: tuple[int, ...],
    asked: str | int,
    chosen: int,
) -> None:
    monkeypatch.setattr(flash, "check_kernel", lambda *_: capability)
    install(monkeypatch, *installed)
    spec = SPECS["grouped"]
    backend = FlashBackend(
        [spec],
        KVCache([spec], CacheLayout(256, 4), torch.bfloat16, CPU),
        FlashAttentionOptions(asked),
    )
    assert backend.version == chosen
    assert backend.library == f"{PACKAGES[chosen][2]} {chosen}.1"


def test_a_folder_of_that_name_is_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, 4)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    spec = SPECS["grouped"]
    assert (
        FlashBackend([spec], KVCache([spec], CacheLayout(16, 4), torch.bfloat16, CPU)).version == 4
    )


def test_what_it_cannot_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS["grouped"]
    make = partial(FlashBackend, [spec], KVCache([spec], CacheLayout(16, 4), torch.bfloat16, CPU))
    with pytest.raises(
        BadInput, match=r"none is installed: pip install flash-attn .*or use attention=triton"
    ):
        make()
    with pytest.raises(
        BadInput, match=r"needs flash-attn-4 on a GPU .* pip install --pre flash-attn-4,"
    ):
        make(FlashAttentionOptions(4))
    install(monkeypatch, 2)
    with pytest.raises(
        BadInput, match=r"a multiple of 256 tokens, not 16; use cache.block_size=256"
    ):
        make()
    monkeypatch.setattr(flash, "check_kernel", lambda *_: (8, 6))
    with pytest.raises(
        BadInput, match=r"flash-attn 3 reads no paged cache on a GPU .*8.6; use attention.version=2"
    ):
        make(FlashAttentionOptions(3))
    compressed = kv_cache([spec], CacheLayout(256, 4), torch.bfloat16, CPU, "int8")
    with pytest.raises(
        BadInput, match=r"reads no compressed cache; use attention=triton or cache\.kv_dtype=auto"
    ):
        FlashBackend([spec], compressed)
    with pytest.raises(BadInput, match=r"attention\.version=5 must be auto or 2 or 3 or 4"):
        compose(["attention=flash", "attention.version=5"])


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "check_kernel", check_kernel)
    with pytest.raises(BadInput, match="attention=flash needs an NVIDIA GPU; use attention=auto"):
        LLM("tiny", device="cpu", attention="flash")
