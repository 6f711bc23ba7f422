"""Towers run once for each distinct image, within a step's budget."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, SamplingParams
from minivllm.extras.vision.encoder import Encoder
from tests.seeing import IMAGE_TOKEN, make_smolvlm, picture

PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("smolvlm")
    make_smolvlm(place)
    return place


def engine(folder: Path, *overrides: str) -> LLM:
    standard = ["runtime.threads=1", "cache.num_blocks=96", "cache.block_size=16"]
    return LLM(str(folder), quant="fp32", device="cpu", overrides=[*standard, *overrides])


def encoder_of(llm: LLM) -> Encoder:
    encoder = llm.engine.launcher.extensions.encoder  # type: ignore[attr-defined]
    assert isinstance(encoder, Encoder)
    return encoder


def prompt(*pictures: Any, start: int = 5) -> dict[str, Any]:
    """Text, and after each picture more of it."""
    ids = [start, 6]
    for i in range(len(pictures)):
        ids += [IMAGE_TOKEN, 7 + i, 9, 11]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": list(pictures)}}


SMALL, LARGE = picture(30, 30), picture(90, 60)  # 160 tokens each, or one of 16 if it were a tile
PROMPTS = [
    prompt(SMALL),
    prompt(SMALL, LARGE),
    prompt(LARGE, start=3),
    {"prompt_token_ids": [4] * 9},
]


@pytest.fixture(scope="module")
def expected(folder: Path) -> Iterator[list[list[int]]]:
    """Each prompt by itself, nothing kept, whole."""
    with engine(folder, "cache.prefix_caching=false", "vision.encoder_cache_tokens=0") as llm:
        yield [llm.generate(one, PARAMS)[0].outputs[0].token_ids for one in PROMPTS]


@pytest.mark.parametrize(
    "overrides",
    [
        ["batching.max_num_batched_tokens=7"],
        ["batching.max_num_batched_tokens=50"],
        ["cache.block_size=4", "cache.num_blocks=400"],
        ["cache.block_size=64"],
        ["cache.prefix_caching=false"],
        ["cache.num_blocks=34"],  # of three prompts that fit one by one, some are preempted
        ["cache.num_blocks=34", "batching.preemption=swap"],
        ["vision.max_encoder_tokens=1"],
        ["vision.encoder_cache_tokens=0", "batching.max_num_batched_tokens=20"],
        ["runtime.overlap=true"],
        ["batching=static"],
        ["cache=none", "~cache.num_blocks", "~cache.block_size"],
        ["speculative=ngram"],
    ],
    ids=lambda value: " ".join(value),
)
def test_tokens_are_the_same_however_they_are_scheduled(
    overrides: list[str], folder: Path, expected: list[list[int]]
) -> None:
    if overrides[0] == "cache=none":
        llm = LLM(
            str(folder),
            quant="fp32",
            device="cpu",
            cache="none",
            overrides=["runtime.threads=1", "model.max_model_len=512", "batching.max_num_seqs=4"],
        )
    else:
        llm = engine(folder, *overrides)
    with llm:
        for _ in range(2):  # cold, then with what is cached
            outputs = llm.generate(PROMPTS, PARAMS)
            assert [one.outputs[0].token_ids for one in outputs] == expected
        assert encoder_of(llm).counters["images_encoded"] >= 2


def test_a_tower_runs_once_for_each_distinct_image(folder: Path) -> None:
    with engine(folder, "batching.max_num_batched_tokens=60") as llm:
        llm.generate(PROMPTS, PARAMS)
        counters = encoder_of(llm).counters
        assert counters["images_encoded"] == 2
        assert counters["encoder_cache_hits"] >= 1 and counters["encoder_ms"] > 0
        llm.generate(prompt(LARGE, start=77), PARAMS)  # no block is shared, the embeddings are
        assert counters["images_encoded"] == 2


class MadeUpEvent:
    """An event of a GPU that is done, or is done once somebody has waited."""

    def __init__(self, done: bool) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True

    def elapsed_time(self, end: MadeUpEvent) -> float:
        assert end.done
        return 2.0


def test_events_of_towers_that_have_ended_are_freed(folder: Path) -> None:
    """In a server nobody reads the counters."""
    with engine(folder) as llm:
        encoder = encoder_of(llm)
        before = encoder.counts()["encoder_ms"]
        pairs = [(MadeUpEvent(True), MadeUpEvent(done)) for done in (True, True, False, True)]
        encoder._events.extend(pairs)  # type: ignore[arg-type]
        encoder._read_events()
        assert [end for _, end in encoder._events] == [end for _, end in pairs[2:]]
        assert encoder.counters["encoder_ms"] == before + 4
        assert encoder.counts()["encoder_ms"] == before + 8 and not encoder._events


def test_without_a_cache_embeddings_last_as_long_as_the_prompt(folder: Path) -> None:
    overrides = ["vision.encoder_cache_tokens=0", "batching.max_num_batched_tokens=20"]
    with engine(folder, *overrides) as llm:
        for count in (1, 2):
            llm.generate(prompt(LARGE, start=count), PARAMS)
            encoder = encoder_of(llm)
            assert encoder.counters["images_encoded"] == count and encoder.rows == 0
