"""Keys and values in 8 bits: how far off they are, and that they are the same however they came to
be."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from minivllm import LLM
from minivllm.cache.compression import compress, expand
from minivllm.cache.kv import bytes_per_token, kv_cache
from minivllm.cache.spec import AttentionSpec, CacheLayout, Transfers
from minivllm.cache.tiers.transfer import BlockTransfers
from minivllm.config.compose import compose
from minivllm.engines.minivllm.engine import MinivllmEngine
from tests.reference import make_checkpoint

CPU = torch.device("cpu")
SHARED = [7, 3, 99, 12, 55, 31, 8, 64, 90, 11, 2, 45, 70]
PROMPTS = [[5, 17, 3, 99, 42, 8], [*SHARED, 4], [9, 4, 30] * 9, [*SHARED, 66, 13, 21], [1]]

each_kv_dtype = pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder)
    return folder


def serving(folder: Path, *overrides: str, **groups: str) -> LLM:
    common = ["model.max_model_len=64", "decoding.max_tokens=9", "decoding.ignore_eos=true"]
    return LLM(
        str(folder), quant="fp32", overrides=[*common, "runtime.device=cpu", *overrides], **groups
    )


def tokens(llm: LLM) -> list[list[list[int]]]:
    return [[output.token_ids for output in result.outputs] for result in llm.generate(PROMPTS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_stay_within_their_bounds(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 3, 64, generator=generator) * torch.logspace(-6, 4, 500)[:, None, None]
    x[7] = 0
    x[8, :, 1:] *= 1e-7  # one element outshines all
    x = x.to(dtype)
    largest = x.float().abs().amax(-1, keepdim=True)
    slack = 1 + 1e-5
    for kv_dtype in ("int8", "fp8"):
        bits, scale = compress(x, kv_dtype)
        assert (bits.dtype, bits.shape, scale.shape) == (torch.int8, x.shape, x.shape[:-1])
        error = (expand(bits, scale, kv_dtype, torch.float32) - x.float()).abs()
        bound = (
            largest / 254
            if kv_dtype == "int8"
            else (x.float().abs() / 16).maximum(largest / 448 / 1024)
        )
        assert (error <= bound * slack).all()
        assert error.max() > 0
        assert expand(bits, scale, kv_dtype, dtype).dtype == dtype


@each_kv_dtype
def test_scales_move_with_their_blocks(kv_dtype: str) -> None:
    spec, layout = AttentionSpec(2, 2, 8, 1.0), CacheLayout(4, 5, host_slots=2)
    kv = kv_cache([spec], layout, torch.float32, CPU, kv_dtype)
    k, v = torch.randn(2, 4, 2, 8) * 10
    kv.write(0, torch.arange(4, 8), k, v)
    before = kv.gather(0, torch.tensor([1]), 1, 4)
    transfers = BlockTransfers(kv)
    transfers.run(Transfers(saves=((1, 0),), copies=((1, 2),)))
    kv.write(0, torch.arange(4, 8), v, k)
    transfers.run(Transfers(loads=((0, 3),)))
    for block in (2, 3):
        for moved, was in zip(kv.gather(0, torch.tensor([block]), 1, 4), before, strict=True):
            assert torch.equal(moved, was)
    assert not torch.equal(kv.gather(0, torch.tensor([1]), 1, 4)[0], before[0])
    assert (before[0][0] - k).abs().max() < 3


def test_the_pool_shrinks_by_what_is_saved(checkpoint: Path) -> None:
    sizes = {}
    for kv_dtype in ("auto", "int8", "fp8"):
        with serving(checkpoint, f"cache.kv_dtype={kv_dtype}", "cache.num_blocks=10") as llm:
            kv = llm.engine.kv
            assert kv.num_bytes == 11 * 16 * kv.bytes_per_token
            sizes[kv_dtype] = kv.bytes_per_token
    elements, heads = 3 * 2 * 2 * 16, 3 * 2 * 2  # layers, keys and values, heads, width
    assert sizes == {
        "auto": 4 * elements,
        "int8": elements + 4 * heads,
        "fp8": elements + 4 * heads,
    }
    spec = AttentionSpec(8, 8, 128, 1.0)
    assert (
        bytes_per_token([spec], torch.bfloat16, "int8") / bytes_per_token([spec], torch.bfloat16)
        < 0.52
    )


def test_the_same_memory_holds_more_blocks(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minivllm.assembly.free_memory", lambda device: 2_000_000)
    for kv_dtype in ("auto", "int8", "fp8"):
        with serving(
            checkpoint, f"cache.kv_dtype={kv_dtype}", "batching.max_num_seqs=100000"
        ) as llm:
            block = 16 * llm.engine.kv.bytes_per_token
            assert llm.engine.cache.pool.num_usable == 1_000_000 // block


def test_records_count_what_is_stored(checkpoint: Path) -> None:
    config = compose([f"model.path={checkpoint}", "model=hf", "quant=bf16", "cache.kv_dtype=int8"])
    engine = MinivllmEngine(config)
    assert engine.info.model["kv_bytes_per_token"] == 3 * 2 * 2 * (16 + 4)
    assert engine.info.memory["kv_pool"] == engine.engine.kv.num_bytes
    counters = engine.liveness()["cache"]
    assert (counters["kv_dtype"], counters["kv_bytes_per_token"]) == ("int8", 240)
    engine.close()


SERVINGS = {
    "one token at a time": ["batching.max_num_batched_tokens=1", "attention=eager"],
    "pieces": ["batching.max_num_batched_tokens=7"],
    "whole": ["batching.chunked_prefill=false", "attention=sdpa"],
    "static": ["batching=static", "batching.max_num_seqs=3"],
    "prefixes": ["cache.prefix_caching=true", "cache.block_size=4"],
    "preempted": ["cache.block_size=4", "cache.num_blocks=12"],
    "swapped": ["cache.block_size=4", "cache.num_blocks=12", "batching.preemption=swap"],
    "shared": ["decoding=sample", "decoding.seed=3", "decoding.n=3", "cache.block_size=4"],
}


@pytest.fixture(scope="module")
def one_by_one(checkpoint: Path) -> Callable[..., list[list[list[int]]]]:
    """Tokens of requests that are served one after another, by overrides."""

    @cache
    def served(*overrides: str) -> list[list[list[int]]]:
        common = "batching=sequential", "attention=eager"
        with serving(checkpoint, *common, *overrides) as llm:
            return tokens(llm)

    return served


@each_kv_dtype
@pytest.mark.parametrize("served", SERVINGS.values(), ids=SERVINGS)
def test_tokens_do_not_depend_on_how_they_are_served(
    kv_dtype: str,
    served: list[str],
    checkpoint: Path,
    one_by_one: Callable[..., list[list[list[int]]]],
) -> None:
    decoding = [item for item in served if item.startswith("decoding")]
    expected = one_by_one(*decoding, f"cache.kv_dtype={kv_dtype}")
    with serving(checkpoint, *served, f"cache.kv_dtype={kv_dtype}") as llm:
        assert tokens(llm) == expected
        assert tokens(llm) == expected  # a second time, with a warm cache
        assert llm.engine.cache.pool.num_used == 0
        assert llm.engine.cache.swap.num_free == llm.engine.cache.layout.host_slots


@each_kv_dtype
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_logits_are_close_to_those_without(kv_dtype: str, attention: str, checkpoint: Path) -> None:
    prompt = [(7 * i) % 120 + 2 for i in range(60)]
    with serving(checkpoint, attention=attention) as llm:
        exact = llm.logits(prompt)
    found = []
    for budget in (64, 7, 1):
        overrides = [f"cache.kv_dtype={kv_dtype}", f"batching.max_num_batched_tokens={budget}"]
        with serving(checkpoint, *overrides, attention=attention) as llm:
            found.append(llm.logits(prompt))
    off = (found[0] - exact).abs().max()
    assert 0 < off < (0.3 if kv_dtype == "int8" else 1.0)
    for other in found[1:]:  # through the cache in any case: not the fresh keys of a whole prompt
        assert (other - found[0]).abs().max() < off / 10


@each_kv_dtype
def test_greedy_tokens_differ_only_at_near_ties(kv_dtype: str, checkpoint: Path) -> None:
    with serving(checkpoint) as llm:
        expected = [out[0] for out in tokens(llm)]
        logits = [llm.logits(p + out) for p, out in zip(PROMPTS, expected, strict=True)]
    with serving(checkpoint, f"cache.kv_dtype={kv_dtype}") as llm:
        found = [out[0] for out in tokens(llm)]
        compressed = [llm.logits(p + out) for p, out in zip(PROMPTS, expected, strict=True)]
    for prompt, mine, theirs, exact, near in zip(
        PROMPTS, found, expected, logits, compressed, strict=True
    ):
        first = next(
            (i for i, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), None
        )
        if first is not None:
            at = len(prompt) + first - 1
            gap = exact[at, theirs[first]] - exact[at, mine[first]]
            assert 0 <= gap <= 2 * (near[at] - exact[at]).abs().max()
