"""attention=flex beyond the tests of all backends: its table of tiles, whole models, what it
refuses."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from minivllm import LLM, SamplingParams
from minivllm.attention.batch import StepBatch
from minivllm.attention.flex import QUERIES, FlexBackend
from minivllm.attention.options import FlexAttentionOptions
from minivllm.bench.targets.minivllm import MinivllmEngine
from minivllm.cache.compression.eight_bits import kv_cache
from minivllm.cache.kv import KVCache
from minivllm.cache.manager import CacheManager
from minivllm.cache.spec import AttentionSpec, CacheLayout
from minivllm.config.compose import compose
from minivllm.engine.batch_inputs import pack
from minivllm.engine.executor import ModelRunner
from minivllm.engine.request import Request
from minivllm.engine.step import ScheduledRequest
from minivllm.errors import BadInput
from tests.attention.test_backends import CPU, SPECS, run_in_pieces
from tests.reference import make_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def batch_of(backend: FlexBackend, query_lens: list[int], seq_lens: list[int]) -> StepBatch:
    """Requests of these lengths in blocks that lie in each other's way."""
    layout = backend.kv.layout
    manager, requests = CacheManager(layout), []
    for index, length in enumerate(seq_lens):
        requests.append(
            Request(str(index), [0] * length, SamplingParams(), max_num_tokens=length + 1, seed=0)
        )
    for size in range(layout.block_size, max(seq_lens) + layout.block_size, layout.block_size):
        for request in requests:
            assert manager.grow(
                request.cache, request.num_computed_tokens, min(size, request.num_tokens)
            )
    parts = [
        ScheduledRequest(request, length - count, count)
        for request, length, count in zip(requests, seq_lens, query_lens, strict=True)
    ]
    packed = pack(parts, layout.block_size)
    return ModelRunner(nn.Identity(), backend, CPU).prepare(packed)


@pytest.mark.parametrize("block_size", [16, 48, 512])
@pytest.mark.parametrize("window", [None, 1, 40])
def test_a_tile_of_queries_looks_at_what_one_of_them_sees(
    block_size: int, window: int | None
) -> None:
    """The table that the compiled kernel goes by, against the mask tried on every pair."""
    spec = AttentionSpec(4, 2, 16, 0.25, window=window)
    kv = KVCache([spec], CacheLayout(block_size, 2 + 1500 // block_size + 6), torch.float32, CPU)
    backend = FlexBackend([spec], kv, FlexAttentionOptions(True))
    query_lens, seq_lens = [1, 300, 1, 20, 1], [200, 300, 1, 420, 33]
    mask = batch_of(backend, query_lens, seq_lens).attention.masks[window]
    slots = kv.layout.block_size * kv.layout.num_blocks
    assert mask.shape == (1, 1, sum(query_lens), slots)
    zero = torch.zeros((), dtype=torch.int64)
    queries, keys = torch.arange(sum(query_lens))[:, None], torch.arange(slots)[None]
    seen = mask.mask_mod(zero, zero, queries, keys)
    past = [torch.arange(s - q, s) + 1 for q, s in zip(query_lens, seq_lens, strict=True)]
    assert seen.sum(1).tolist() == torch.cat(past).clamp(max=window or max(seq_lens)).tolist()
    tiles = nn.functional.pad(seen, (0, 0, 0, -len(seen) % QUERIES))
    tiles = tiles.unflatten(0, (-1, QUERIES)).unflatten(2, (-1, mask.BLOCK_SIZE[1])).any(3).any(1)
    assert block_size % mask.BLOCK_SIZE[1] == 0
    assert torch.equal(mask.to_dense()[0, 0].bool(), tiles)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.usefixtures("inductor")
@torch.inference_mode()
def test_compiled_it_reads_the_cache_in_place() -> None:
    """What a tile reads beyond the keys must be finite, so the poison is. The first step is of one
    token, a kernel of its own; had it several, torch would first compile one for their number."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    make = partial(FlexBackend, options=FlexAttentionOptions(True))
    for seed, cut_seed in ((0, 843), (1, 1)):
        pairs = run_in_pieces(
            *(make, SPECS["soft cap and window"], CacheLayout(16, 20), torch.float32, seed),
            cut_seed=cut_seed,
            device=device,
            poison=1e3,
        )
        for out, expected in pairs:
            torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_tokens_are_those_of_eager(family: str, tmp_path: Path) -> None:
    """Chunks, joined batches and a warm prefix cache; gemma2 has soft caps and windows."""
    make_checkpoint(tmp_path, family)
    prompts = [list(range(3, 30)), [9, 8, 7], list(range(3, 25))]
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    overrides = [
        "batching.max_num_batched_tokens=16",
        "cache.block_size=8",
        "cache.prefix_caching=true",
    ]
    overrides += ["model.max_model_len=64", "cache.num_blocks=30"]
    tokens, logits = [], []
    for attention in ("eager", "flex"):
        with LLM(
            str(tmp_path), device="cpu", quant="fp32", attention=attention, overrides=overrides
        ) as llm:
            assert llm.engine.runner.attention.name == attention
            tokens.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
            logits.append(llm.logits(prompts[0]))
    assert tokens[0] == tokens[1]
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=0)


def test_evicted_blocks_are_not_seen(tmp_path: Path) -> None:
    """A request's tokens lie further to the front of its blocks than of its text once some are
    dropped."""
    make_checkpoint(tmp_path, "llama")
    knobs = [
        "cache.eviction=streaming",
        "cache.block_size=4",
        "cache.eviction_budget=16",
        "cache.num_blocks=20",
    ]
    tokens = []
    for attention in ("eager", "flex"):
        with LLM(
            str(tmp_path), device="cpu", quant="fp32", attention=attention, overrides=knobs
        ) as llm:
            params = SamplingParams(max_tokens=12, ignore_eos=True)
            tokens.append(
                [o.outputs[0].token_ids for o in llm.generate([list(range(3, 30)), [5]], params)]
            )
    assert tokens[0] == tokens[1]


def test_it_is_compiled_on_a_gpu_or_where_asked_for() -> None:
    kv = KVCache([SPECS["grouped"]], CacheLayout(16, 4), torch.float32, CPU)
    assert [
        FlexBackend([SPECS["grouped"]], kv, FlexAttentionOptions(given)).compiled
        for given in ("auto", False, True)
    ] == [
        False,
        False,
        True,
    ]
    assert compose(["attention=flex", "attention.compile=true"])["attention"]["compile"] is True
    with pytest.raises(BadInput, match=r"attention\.compile='yes' must be true or false or auto"):
        compose(["attention=flex", "attention.compile='yes'"])


def test_the_record_says_which_library_ran() -> None:
    engine = MinivllmEngine(compose(["attention=flex", "cache.num_blocks=8"]))
    engine.submit("a", [3, 4, 5], SamplingParams(max_tokens=2, ignore_eos=True))
    while engine.poll():
        pass
    layers = len(engine.engine.kv.parts)
    assert engine.liveness()["attention"] == {
        "kernel": "flex",
        "library": f"torch {torch.__version__}, not compiled",
        "launches": 2 * layers,
    }


def test_what_it_cannot_read_is_refused() -> None:
    spec = SPECS["grouped"]
    with pytest.raises(BadInput, match=r"multiple of 16 tokens, not 24; use cache.block_size=16"):
        FlexBackend(
            [spec],
            KVCache([spec], CacheLayout(24, 4), torch.float32, CPU),
            FlexAttentionOptions(True),
        )
    with pytest.raises(
        BadInput, match=r"no compressed cache; use attention=sdpa or cache\.kv_dtype=auto"
    ):
        FlexBackend([spec], kv_cache([spec], CacheLayout(16, 4), torch.float32, CPU, "int8"))
