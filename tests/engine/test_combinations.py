"""Whatever serves a request, its tokens are the same: every policy, cache and way of decoding, in
pairs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from minivllm import LLM
from minivllm.llm import RequestOutput
from tests.reference import SHARING_PROMPTS as PROMPTS
from tests.reference import make_checkpoint

FEW_BLOCKS = ["model.max_model_len=64", "cache.block_size=4", "cache.num_blocks=14"]
OFFLOAD = [*FEW_BLOCKS, "cache.prefix_caching=true", "cache.offload_gb=1e-4"]  # 32 blocks
AXES: dict[str, dict[str, list[str]]] = {
    "batching": {
        "sequential": ["batching=sequential"],
        "static": ["batching=static", "batching.max_num_seqs=3"],
        "grouped": ["batching=static", "batching.max_num_seqs=2", "batching.group_by_length=true"],
        "dynamic": ["batching=dynamic", "batching.max_num_seqs=4", "batching.max_wait_ms=1"],
        "continuous": ["batching=continuous"],
        "prefill first": ["batching=continuous", "batching.prefill_first=true"],
        "fair": ["batching=continuous", "batching.fair_prefill=true"],
    },
    "chunks": {
        "whole": ["batching.chunked_prefill=false"],
        "small": ["batching.max_num_batched_tokens=7"],
        "large": [],
    },
    "preemption": {
        "recompute": [],
        "swap": ["batching.preemption=swap"],
        "reserve": ["batching.preemption=reserve"],
    },
    "cache": {
        "paged": [],
        "few blocks": FEW_BLOCKS,
        "prefix": ["cache.prefix_caching=true", "cache.block_size=4"],
        "prefix, few blocks": [*FEW_BLOCKS, "cache.prefix_caching=true"],
        "offload": OFFLOAD,
        "offload to disk": [*OFFLOAD, "cache.offload_gb=3e-5", "cache.offload_disk_gb=1e-3"],
        "contiguous": ["cache=contiguous"],
        "none": ["cache=none"],
    },
    "attention": {"sdpa": ["attention=sdpa"], "eager": ["attention=eager"]},
    "decoding": {
        "greedy": [],
        "sample": ["decoding=sample", "decoding.seed=3"],
        "samples": ["decoding=sample", "decoding.seed=3", "decoding.n=3"],
        "beam": ["decoding=beam", "decoding.beam_width=2", "decoding.n=2"],
        "penalties": ["decoding=top_p", "decoding.seed=5", "decoding.repetition_penalty=1.3"],
    },
}
Combination = dict[str, str]


def possible(one: Combination) -> bool:
    """Combinations that are refused, with a message, or that have no such knob."""
    if one["batching"] == "sequential" and one["preemption"] != "recompute":
        return False
    if one["preemption"] == "swap" and one["cache"] in ("contiguous", "none"):
        return False
    if one["chunks"] == "small" and one["cache"] == "none":
        return False
    if (
        one["decoding"] == "beam"
        and one["batching"] == "sequential"
        and one["cache"] == "contiguous"
    ):
        return False  # room for one sequence
    scarce = "few blocks" in one["cache"] or "offload" in one["cache"]
    if one["decoding"] in ("beam", "samples") and one["preemption"] == "reserve" and scarce:
        return False  # several whole outputs do not fit
    # three samples, two sequences
    return not (one["decoding"] == "samples" and one["batching"] == "grouped")


def pairs(one: Combination) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    return set(itertools.combinations(sorted(one.items()), 2))


def pairwise() -> Iterator[Combination]:
    """A short list of combinations in which each possible pair of choices occurs."""
    every = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    known = [(one, pairs(one)) for one in every if possible(one)]
    missing = set().union(*(found for _, found in known))
    while missing:
        best, found = max(known, key=lambda pair: len(pair[1] & missing))
        missing -= found
        yield best


COMBINATIONS = list(pairwise())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, num_hidden_layers=2)
    return folder


def tokens(results: list[RequestOutput]) -> list[list[list[int]]]:
    return [[output.token_ids for output in result.outputs] for result in results]


def serve(folder: Path, overrides: list[str]) -> list[list[list[int]]]:
    common = ["decoding.max_tokens=9", "decoding.ignore_eos=true", "runtime.device=cpu"]
    if not any(item.startswith("model.max_model_len") for item in overrides):
        common.append("model.max_model_len=96")
    groups = [item for item in overrides if "." not in item.split("=")[0]]
    knobs = [item for item in overrides if item not in groups]
    with LLM(str(folder), quant="fp32", overrides=[*groups, *common, *knobs]) as llm:
        first = tokens(llm.generate(PROMPTS))
        assert tokens(llm.generate(PROMPTS)) == first, (
            "a second time, with a warm cache, it says something else"
        )
        manager = llm.engine.cache
        assert manager.pool.num_used == 0
        assert manager.swap.num_free == manager.layout.host_slots
        manager.pool.check_integrity([])
        return first


@pytest.fixture(scope="module")
def references(checkpoint: Path) -> dict[str, list[list[list[int]]]]:
    """One request at a time, with a cache for all, by the plainest attention."""
    return {
        name: serve(checkpoint, ["batching=sequential", "attention=eager", *overrides])
        for name, overrides in AXES["decoding"].items()
    }


@pytest.mark.parametrize(
    "combination",
    COMBINATIONS,
    ids=lambda one: "-".join(value.replace(" ", "_") for value in one.values()),
)
def test_tokens_are_the_same_whatever_serves_them(
    combination: Combination, checkpoint: Path, references: dict[str, list[list[list[int]]]]
) -> None:
    overrides = [item for axis, value in combination.items() for item in AXES[axis][value]]
    assert serve(checkpoint, overrides) == references[combination["decoding"]]


@pytest.mark.parametrize("preemption", ["recompute", "swap", "reserve"])
@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_six_blocks_serve_many_requests(batching: str, preemption: str, checkpoint: Path) -> None:
    prompts = [[(3 * i + j) % 120 + 2 for j in range(1 + i % 9)] for i in range(24)]

    def run(blocks: int) -> tuple[list[list[list[int]]], int, dict[str, int]]:
        overrides = [
            f"cache.num_blocks={blocks}",
            "cache.block_size=4",
            "model.max_model_len=24",
            f"batching.preemption={preemption}",
            "decoding.max_tokens=12",
            "decoding.ignore_eos=true",
            "runtime.device=cpu",
        ]
        with LLM(str(checkpoint), quant="fp32", batching=batching, overrides=overrides) as llm:
            out = tokens(llm.generate(prompts))
            counters = vars(llm.engine.cache.counters)
            return out, llm.engine.scheduler.num_preemptions, dict(counters)

    ample, none, _ = run(600)
    assert none == 0
    scarce, preempted, counters = run(6)
    assert scarce == ample
    assert (preempted > 0) == (preemption != "reserve")
    assert (counters["blocks_swapped_in"] > 0) == (preemption == "swap")


def test_the_combinations_cover_every_choice() -> None:
    assert len(COMBINATIONS) < 80
    for axis, choices in AXES.items():
        assert {one[axis] for one in COMBINATIONS} == set(choices)
