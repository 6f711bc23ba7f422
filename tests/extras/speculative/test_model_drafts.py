"""A model that drafts, against itself: where it is the target in all but name, every draft is
right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm import LLM
from minivllm.engine.request import Request
from minivllm.engine.step import StepPlan
from minivllm.extras.speculative.model_drafts import ModelDrafts
from tests.engine.traffic import DRAWN, GREEDY, Asked, serve
from tests.extras.speculative.drafting import LONGEST, load, same, speculator
from tests.reference import make_checkpoint

LONG = replace(GREEDY, max_tokens=24)
ASKED = [
    Asked([5, 6, 7], LONG),
    Asked(list(range(30, 60)), replace(LONG, temperature=0.9), comes=1),
    Asked([9], replace(LONG, temperature=1.0, top_k=5, repetition_penalty=1.3), comes=1),
    Asked([5, 6, 7, 8], replace(LONG, token_mask=lambda _, out: range(len(out), 120)), comes=3),
    Asked(list(range(30, 55)), replace(LONG, temperature=2.0, frequency_penalty=0.5), comes=5),
    Asked([70, 71], replace(DRAWN, n=2, min_tokens=20, max_tokens=24, top_p=0.9), comes=2),
]
SCARCE = ["cache.num_blocks=40", "batching.max_num_batched_tokens=11"]
OPTIONS = {
    "plain": [],
    "chunks": ["batching.max_num_batched_tokens=7"],
    "prefixes": ["cache.prefix_caching=true"],
    "scarce": SCARCE,
    "scarce, swap": [*SCARCE, "batching.preemption=swap"],
    "alone": ["runtime.determinism=batch", "attention=invariant"],
    "contiguous": ["cache=contiguous"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose last layer adds nothing, so that it could end before it."""
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "llama")
    tensors = load_file(path / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.2.{name}.weight"].zero_()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with load(folder) as llm:
        yield llm


def proposer(kind: str, folder: Path, verify: str = "same_noise") -> list[str]:
    """Overrides for a proposer that is the target in all but name."""
    chosen = {
        "early_exit": ["speculative=early_exit", "speculative.exit_layer=2"],
        "own cache": [
            *("speculative=draft", "model@speculative.model=hf"),
            *(f"speculative.model.path={folder}", f"speculative.model.max_model_len={LONGEST}"),
            "quant@speculative.quant=fp32",
        ],
        "same weights": ["speculative=draft", "quant@speculative.quant=fp32"],
    }
    return [*chosen[kind], "speculative.adaptive=false", f"speculative.verify={verify}"]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["early_exit", "own cache"])
def test_every_draft_is_right(folder: Path, plain: LLM, kind: str, options: str) -> None:
    """It sees the same tokens, keys and values, noise, penalties and masks as the target, whatever
    was preempted, cut, shared or taken from a cache meanwhile."""
    with load(folder, *OPTIONS[options], *proposer(kind, folder)) as llm:
        for _ in range(2):
            same(llm.engine, plain.engine, ASKED)
        counters = speculator(llm.engine).counters
        preempted = llm.engine.scheduler.num_preemptions
        reused = llm.engine.cache.counters.prefix_tokens_reused
    assert counters.num_draft_tokens > 30
    assert counters.num_accepted_tokens == counters.num_draft_tokens
    assert (preempted > 0) == ("scarce" in options) and (reused > 0) == (options == "prefixes")


@pytest.mark.parametrize("kind", ["early_exit", "own cache", "same weights"])
def test_rejection_sampling_accepts_them_all(folder: Path, kind: str) -> None:
    """Two equal distributions: a verdict is never against a draft, whose noise is another one."""
    with load(folder, *proposer(kind, folder, "rejection")) as llm:
        serve(llm.engine, ASKED)
        found = speculator(llm.engine)
    assert isinstance(found.proposer, ModelDrafts) and found.proposer.keeps_logits
    assert found.counters.num_draft_tokens > 50
    assert found.counters.num_accepted_tokens >= 0.99 * found.counters.num_draft_tokens


def test_nothing_but_its_own_logits_are_kept(folder: Path) -> None:
    """One for each draft token, until the next step, and none without rejection sampling."""
    for verify in ("rejection", "same_noise"):
        with load(folder, *proposer("early_exit", folder, verify)) as llm:
            drafts = speculator(llm.engine).proposer
            own, seen = drafts.fill, list[tuple[int, int]]()

            def fill(
                plan: StepPlan, own: Any = own, drafts: Any = drafts, seen: Any = seen
            ) -> None:
                own(plan)
                for part in plan.scheduled:
                    logits = drafts.draft_logits(part.request)
                    seen.append((part.num_drafts, len(logits)))
                    assert all(one.shape == (128,) and one.isfinite().all() for one in logits)

            drafts.fill = fill  # type: ignore[method-assign]
            serve(llm.engine, ASKED)
            assert seen and any(count for count, _ in seen)
            assert all(kept == count * (verify == "rejection") for count, kept in seen)
            assert not drafts.draft_logits(Request("r", [1], LONG, max_num_tokens=9, seed=0))


def test_a_second_model_computes_a_token_once(folder: Path) -> None:
    """Prompts in pieces of the budget, then what was accepted since: not all anew in each step."""
    with load(folder, "batching.max_num_batched_tokens=8", *proposer("own cache", folder)) as llm:
        drafts = speculator(llm.engine).proposer
        assert isinstance(drafts, ModelDrafts)
        sizes: list[int] = []
        own = drafts.executor.run

        def run(packed: Any) -> Any:
            sizes.append(packed.shape.tokens)
            return own(packed)

        drafts.executor.run = run  # type: ignore[method-assign]
        serve(llm.engine, [Asked(list(range(20, 50)), LONG)])
        drafted = speculator(llm.engine).counters.num_draft_tokens
    assert max(sizes) <= 9  # a piece, or less than a piece with the first draft
    # the prompt, each draft token's place, and the last accepted one of each step
    assert sum(sizes) <= 30 + drafted + 24


def test_a_draft_of_no_number_is_token_0(folder: Path, plain: LLM) -> None:
    with load(folder, *proposer("own cache", folder)) as llm:
        drafts = speculator(llm.engine).proposer
        assert isinstance(drafts, ModelDrafts)
        with torch.inference_mode():
            drafts.executor.model.model.norm.weight.fill_(torch.nan)  # type: ignore[attr-defined]
        same(llm.engine, plain.engine, ASKED[:3])
        assert speculator(llm.engine).counters.num_draft_tokens > 0
