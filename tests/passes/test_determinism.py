"""runtime.determinism=batch: log-probabilities equal to the bit, whatever is served beside, before
or how."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakSet

import pytest
import torch
from torch.nn import functional as F

from minivllm import LLM, SamplingParams
from minivllm.errors import BadInput
from minivllm.passes import determinism
from minivllm.passes.determinism import by_rows
from tests.reference import SHARING_PROMPTS as PROMPTS
from tests.reference import make_checkpoint

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2)
DRAWN = SamplingParams(
    max_tokens=12, ignore_eos=True, logprobs=2, temperature=1.0, top_p=0.9, seed=11
)
FILTERED = SamplingParams(
    max_tokens=12, ignore_eos=True, logprobs=2, temperature=1.0, top_k=5, seed=12
)
PARAMS = [GREEDY, DRAWN, FILTERED, GREEDY, DRAWN, FILTERED]
Said = list[tuple[list[int], object]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(
        folder,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=2,
        dtype=torch.bfloat16,
    )
    return folder


def make(
    checkpoint: Path, overrides: Sequence[str] = (), level: str = "batch", **groups: str
) -> LLM:
    common = ["model.max_model_len=64", f"runtime.determinism={level}"]
    return LLM(str(checkpoint), device="cpu", overrides=[*common, *overrides], **groups)


def ask(llm: LLM, order: Sequence[int] = range(len(PROMPTS))) -> Said:
    results = llm.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order])
    said = {
        i: (r.outputs[0].token_ids, r.outputs[0].logprobs)
        for i, r in zip(order, results, strict=True)
    }
    return [said[i] for i in sorted(said)]


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Said:
    with make(checkpoint) as llm:
        return [ask(llm, [i])[0] for i in range(len(PROMPTS))]


@pytest.mark.parametrize("order", [range(6), range(5, -1, -1), [2, 0, 5, 1, 4, 3]])
def test_neighbours_and_order_change_nothing(
    checkpoint: Path, alone: Said, order: Sequence[int]
) -> None:
    with make(checkpoint) as llm:
        assert ask(llm, order) == alone


@pytest.mark.parametrize(
    "overrides",
    [
        ["batching.max_num_batched_tokens=7"],
        ["batching.chunked_prefill=false"],
        ["batching.prefill_first=true", "batching.max_num_batched_tokens=11"],
        ["batching=static", "batching.max_num_seqs=4"],
        ["cache.block_size=3"],
        ["cache=contiguous"],
        ["cache.num_blocks=14", "cache.block_size=4"],
        ["cache.num_blocks=14", "cache.block_size=4", "batching.preemption=swap"],
        ["cache=none", "batching.chunked_prefill=false"],
        ["runtime.trim_last_layer=false"],
    ],
    ids=" ".join,
)
def test_how_it_is_served_changes_nothing(
    checkpoint: Path, alone: Said, overrides: list[str]
) -> None:
    with make(checkpoint, overrides) as llm:
        assert ask(llm) == alone
        if "cache.num_blocks=14" in overrides:
            assert llm.engine.scheduler.num_preemptions > 0


def test_a_warm_prefix_cache_changes_nothing(checkpoint: Path, alone: Said) -> None:
    with make(checkpoint, ["cache.prefix_caching=true", "cache.block_size=4"]) as llm:
        assert ask(llm) == alone
        reused = llm.engine.cache.counters.prefix_tokens_reused
        assert ask(llm, [5, 3, 1, 0, 2, 4]) == alone
        assert llm.engine.cache.counters.prefix_tokens_reused > reused + 40


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_compression_and_eviction_change_nothing_that_depends_on_others(
    checkpoint: Path, kv_dtype: str
) -> None:
    streaming = ["cache.eviction=streaming", "cache.eviction_budget=20", "cache.eviction_window=4"]
    knobs = [f"cache.kv_dtype={kv_dtype}", "cache.block_size=4", *streaming]
    with make(checkpoint, knobs) as llm:
        single = [ask(llm, [i])[0] for i in range(len(PROMPTS))]
        assert llm.engine.cache.counters.tokens_evicted > 0
    for overrides in (
        ["batching.max_num_batched_tokens=7"],
        ["batching=static", "batching.max_num_seqs=4"],
        ["cache.num_blocks=8"],
        ["cache.num_blocks=8", "batching.preemption=swap"],
        ["cache.prefix_caching=true"],
    ):
        with make(checkpoint, [*knobs, *overrides]) as llm:
            assert ask(llm) == single
            assert ask(llm, [2, 0, 5, 1, 4, 3]) == single
            assert llm.engine.scheduler.num_preemptions > 0 or "cache.num_blocks=8" not in overrides


@pytest.mark.parametrize("quant", ["fp32", "int8"])
def test_other_precisions_hold_it_too(checkpoint: Path, quant: str) -> None:
    with make(checkpoint, quant=quant) as llm:
        single = [ask(llm, [i])[0] for i in range(len(PROMPTS))]
        assert ask(llm, [2, 0, 5, 1, 4, 3]) == single


def test_without_it_neighbours_change_the_bits(checkpoint: Path) -> None:
    """Or the tests above would prove nothing: a batch of 6 and a single request differ in
    bfloat16."""
    with make(checkpoint, ['runtime.cpu_kernels="off"'], level="off") as llm:
        assert ask(llm) != [ask(llm, [i])[0] for i in range(len(PROMPTS))]


def test_methods_that_look_at_all_rows_are_refused(checkpoint: Path) -> None:
    pytest.importorskip("bitsandbytes")
    with pytest.raises(BadInput, match=r"determinism=batch.*depends on"):
        make(checkpoint, quant="int8_mixed")


def test_other_kernels_are_refused(checkpoint: Path) -> None:
    with pytest.raises(BadInput, match="attention=invariant"):
        make(checkpoint, attention="sdpa")


def test_the_level_run_asks_torch_for_deterministic_kernels(checkpoint: Path) -> None:
    try:
        with make(checkpoint, level="run"):
            assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_activations_do_not_depend_on_how_numbers_are_split_over_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for width in (688, 1000):  # of which plain silu has one row or two otherwise
            x = torch.randn(301, width, generator=torch.Generator().manual_seed(0))
            pieces = [by_rows(F.silu)(piece) for piece in x.split(16)]
            assert torch.equal(by_rows(F.silu)(x), torch.cat(pieces))
    finally:
        torch.set_num_threads(before)


def test_a_closed_engine_is_not_searched_for(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(determinism, "_DETERMINISTIC", WeakSet())
    with make(checkpoint, level="run") as llm:
        model = llm.engine.loaded.model
        assert [*determinism._DETERMINISTIC] == [model]
    monkeypatch.setattr(gc, "collect", pytest.fail)
    with make(checkpoint, level="off"):
        assert not torch.are_deterministic_algorithms_enabled()


def test_an_engine_beside_another_does_not_take_its_kernels(checkpoint: Path) -> None:
    with make(checkpoint, level="run"), make(checkpoint, level="off"):
        assert torch.are_deterministic_algorithms_enabled()
    with make(checkpoint, level="off"):
        assert not torch.are_deterministic_algorithms_enabled()
