"""The Qwen families that take images, through the whole engine and beside transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.quant.plain import PlainLinear
from tests.qwen_vl import FAMILIES, make_checkpoint, model_inputs, picture, prompt

REUSED = ["runtime.threads=1", "cache.prefix_caching=true"]
ROOM = [*REUSED, "cache.num_blocks=128", "cache.block_size=8"]
TIGHT = [*REUSED, "cache.num_blocks=52", "cache.block_size=2"]  # some are preempted
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
WIDE, TALL, TINY = picture(90, 20), picture(37, 61), picture(9, 9)
LARGE = picture(300, 210)  # more pixels than the processor leaves it
PROMPTS: list[tuple[list[int], list[Any]]] = [
    (prompt([5, 9], [17, 33]), [TALL]),
    (prompt([5, 9], [17, 33], [40]), [TALL, WIDE]),
    ([4, 6, 9, 33, 12, 5, 8], []),
    (prompt([], [7], []), [TINY, LARGE]),
    (prompt([3] * 11, [], [8, 8]), [WIDE, WIDE]),
]


def asked(index: int) -> dict[str, Any]:
    """A prompt as LLM takes it."""
    token_ids, images = PROMPTS[index]
    return {"prompt_token_ids": token_ids, "multi_modal_data": {"image": images}}


class Saved(NamedTuple):
    """A checkpoint, its transformers model, and that one's greedy tokens for each prompt."""

    folder: Path
    reference: Any
    token_ids: list[list[int]]

    def llm(self, *overrides: str, quant: str = "fp32", **groups: Any) -> LLM:
        """The same model here."""
        return LLM(str(self.folder), quant=quant, device="cpu", overrides=[*overrides], **groups)


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Each family."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    reference = make_checkpoint(folder, request.param)
    outputs = []
    with LLM(str(folder), quant="fp32", device="cpu", overrides=ROOM) as llm:
        for token_ids, images in PROMPTS:
            whole, _ = llm.pictures.insert(token_ids, images)
            with torch.no_grad():
                reference.model.rope_deltas = None  # of the prompt before
                done = reference.generate(
                    **model_inputs(whole, images),
                    max_new_tokens=8,
                    do_sample=False,
                    eos_token_id=None,
                )
            outputs.append(done[0, len(whole) :].tolist())
    return Saved(folder, reference, outputs)


@pytest.fixture(scope="module")
def llm(saved: Saved) -> Any:
    """One that chunks its prompts."""
    with saved.llm(*ROOM, "batching.max_num_batched_tokens=24") as one:
        yield one


@pytest.mark.parametrize("index", range(len(PROMPTS)))
@torch.no_grad()
def test_logits_match_transformers(index: int, saved: Saved, llm: LLM) -> None:
    token_ids, images = PROMPTS[index]
    whole, _ = llm.pictures.insert(token_ids, images)
    saved.reference.model.rope_deltas = None
    wanted = saved.reference(**model_inputs(whole, images)).logits[0]
    assert wanted.std() > 0.3
    torch.testing.assert_close(llm.logits(asked(index)), wanted, atol=1e-4, rtol=0)
    if images:
        assert (llm.logits(whole) - wanted).abs().max() > 0.1  # the tokens without their images


@pytest.mark.parametrize(
    "overrides",
    [
        ROOM,
        [*ROOM, "batching.max_num_batched_tokens=7"],
        [*ROOM, "batching.max_num_batched_tokens=24", "cache.prefix_caching=false"],
        [*REUSED, "cache.num_blocks=300", "cache.block_size=2"],
        TIGHT,
        [*TIGHT, "batching.preemption=swap"],
        [*ROOM, "vision.encoder_cache_tokens=0", "batching.max_num_batched_tokens=12"],
        [*ROOM, "runtime.overlap=true"],
        [*ROOM, "speculative=ngram"],
        [*ROOM, "attention=eager"],
        [*ROOM, "runtime.trim_last_layer=true", "runtime.native_layers=true"],
        [REUSED[0], "cache=none", "model.max_model_len=256", "batching.max_num_seqs=2"],
    ],
    ids=" ".join,
)
def test_greedy_tokens_are_those_of_transformers_however_they_are_scheduled(
    overrides: list[str], saved: Saved
) -> None:
    with saved.llm(*overrides) as llm:
        for _ in range(2):  # cold, then with what is cached
            outputs = llm.generate([asked(index) for index in range(len(PROMPTS))], GREEDY)
            assert [one.outputs[0].token_ids for one in outputs] == saved.token_ids


def test_preemption_and_prefix_hits_take_place(saved: Saved) -> None:
    """Those that the tests above are about."""
    batch = [asked(index) for index in range(len(PROMPTS))]
    with saved.llm(*TIGHT) as llm:
        llm.generate(batch, GREEDY)
        assert llm.engine.scheduler.num_preemptions > 0
    reused: list[int] = []
    with saved.llm(*ROOM) as llm:
        for _ in range(2):
            llm.generate(batch[1], GREEDY)
            reused.append(llm.engine.cache.counters.prefix_tokens_reused)
        assert reused[0] == 0 < reused[1]


def test_batches_do_not_change_a_bit(saved: Saved) -> None:
    """With `runtime.determinism=batch`."""
    batch = [asked(index) for index in range(len(PROMPTS))]
    sampled = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, logprobs=1)
    params = [replace(sampled, seed=seed) for seed in range(len(batch))]
    with saved.llm(*ROOM, "runtime.determinism=batch", "cache.prefix_caching=false") as llm:
        together = llm.generate(batch, params)
        encoder: Any = llm.engine.launcher.extensions
        encoder.encoder.clear()
        for one, own, whole in zip(batch, params, together, strict=True):
            alone = llm.generate(one, own)[0].outputs[0]
            assert alone.token_ids == whole.outputs[0].token_ids
            assert alone.logprobs == whole.outputs[0].logprobs


def test_a_quantised_language_model_keeps_its_tower(saved: Saved) -> None:
    with saved.llm(*ROOM) as plain, saved.llm(*ROOM, quant="int8") as quantised:
        exact, rounded = (one.logits(asked(1)) for one in (plain, quantised))
        towers = [one.engine.loaded.vision.tower for one in (plain, quantised)]
        same = zip(*(tower.parameters() for tower in towers), strict=True)
        assert all(torch.equal(*pair) or pair[0].dtype != pair[1].dtype for pair in same)
        assert quantised.engine.loaded.quantized_layers > 0
        layer = quantised.engine.loaded.model.model.layers[0].mlp.down_proj
        assert not isinstance(layer, PlainLinear)
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.05


def test_names_of_tensors_as_transformers_saves_them(saved: Saved, tmp_path: Path) -> None:
    family = json.loads((saved.folder / "config.json").read_text())["model_type"]
    make_checkpoint(tmp_path, family, original=False)
    with saved.llm(*ROOM) as one, LLM(str(tmp_path), quant="fp32", device="cpu") as other:
        assert torch.equal(one.logits(asked(1)), other.logits(asked(1)))
