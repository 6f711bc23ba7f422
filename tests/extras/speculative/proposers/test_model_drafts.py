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
from minivllm.extras.speculative.proposers.model_drafts import ModelDrafts
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
    assert max(sizes) <= 8
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


def test_it_goes_on_after_steps_without_drafts(folder: Path) -> None:
    """Where it has drafted wrongly before them, its keys and values are those of wrong tokens."""
    for gap in (0, 1, 3):
        with load(folder, *proposer("own cache", folder)) as llm:
            found = speculator(llm.engine)
            drafts, steps, held = found.proposer, iter(range(99)), dict[int, int]()
            assert isinstance(drafts, ModelDrafts)
            prepare, sample, fill = drafts.runner.prepare, drafts.runner.sample, drafts.fill

            def prepared(packed: Any, prepare: Any = prepare, held: Any = held) -> Any:
                batch = prepare(packed)
                assert packed.sampling is None or packed.shape.tokens <= 2
                held.update(zip(batch.positions.tolist(), batch.token_ids.tolist(), strict=True))
                return batch

            def wrong(packed: Any, logits: Any, *rest: Any, sample: Any = sample) -> Any:
                return sample(packed, logits.roll(1, -1), *rest)

            def filled(plan: StepPlan, fill: Any = fill, held: Any = held) -> None:
                fill(plan)
                [part] = plan.scheduled
                known = part.request.token_ids[: part.start + 1]
                assert [held[position] for position in range(len(known))] == known

            drafts.runner.prepare, drafts.runner.sample = prepared, wrong  # type: ignore
            drafts.fill = filled  # type: ignore[method-assign]
            found.lengths.allot = (  # type: ignore[method-assign]
                lambda requests, _, steps=steps, gap=gap: [3 * (next(steps) % (gap + 1) == 0)]
            )
            serve(llm.engine, [Asked(list(range(20, 40)), LONG)])
            assert found.counters.num_draft_tokens > 10 and not found.counters.num_accepted_tokens


def test_a_second_model_computes_no_logits_of_prompts(folder: Path) -> None:
    """It catches up for all requests at once, within the budget."""
    asked = [Asked(list(range(20 + i, 80)), GREEDY, comes=i % 3) for i in range(8)]
    with load(folder, "batching.max_num_batched_tokens=64", *proposer("own cache", folder)) as llm:
        drafts = speculator(llm.engine).proposer
        assert isinstance(drafts, ModelDrafts)
        shapes: list[tuple[int, int, int]] = []
        own = drafts.executor.run

        def run(packed: Any) -> Any:
            shape = packed.shape
            shapes.append((shape.tokens, shape.logit_rows, len(shape.seq_lens)))
            return own(packed)

        drafts.executor.run = run  # type: ignore[method-assign]
        serve(llm.engine, asked)
    assert max(tokens for tokens, *_ in shapes) == 64
    assert any(requests > 1 for _, rows, requests in shapes if not rows)
    assert all(tokens == rows <= 2 * requests for tokens, rows, requests in shapes if rows)


def spoil(drafts: ModelDrafts, token: int) -> None:
    """Let a token's embedding be no number to the drafting model."""
    with torch.inference_mode():
        drafts.loaded.model.model.embed_tokens.weight[token] = torch.nan


@pytest.mark.parametrize("attention", ["cpu", "eager", "sdpa"])
def test_a_draft_of_no_number_spoils_no_other_request(folder: Path, attention: str) -> None:
    """Neither those beside it nor those that get its blocks. It is tried twice."""
    knobs = [f"attention={attention}", "cache.num_blocks=24", *proposer("own cache", folder)]
    with load(folder, knobs[0]) as plain, load(folder, *knobs) as llm:
        found = speculator(llm.engine)
        drafts, own, kept = found.proposer, found.counters.note, dict[str, list[int]]()
        assert isinstance(drafts, ModelDrafts)
        spoil(drafts, 99)
        found.counters.note = (  # type: ignore[method-assign]
            lambda name, made, right: (
                (kept.setdefault(name, []).append(made - right)) or own(name, made, right)
            )
        )
        spoilt = Asked([99, *range(20, 37)], replace(LONG, max_tokens=8))
        same(llm.engine, plain.engine, [spoilt, Asked([5, 6, 7], replace(LONG, max_tokens=8))])
        assert len(kept["0"]) == 2 and all(kept["0"])
        assert all(part.isfinite().all() for part in drafts.kv.blocks)
        same(llm.engine, plain.engine, [spoilt, Asked([5, 6, 7], LONG), Asked([8], LONG, comes=9)])
        assert len(kept["0"]) == 4 and all(kept["0"])
        assert all(len(kept[name]) > 3 and not any(kept[name]) for name in "12")


def test_a_request_is_computed_anew_once_its_drafts_were_no_numbers(
    folder: Path, plain: LLM
) -> None:
    """What spoilt them may be gone."""
    with load(folder, *proposer("own cache", folder)) as llm:
        found = speculator(llm.engine)
        drafts, wrong = found.proposer, list[bool]()
        assert isinstance(drafts, ModelDrafts)
        own = found.counters.note

        def note(name: str, made: int, right: int) -> None:
            wrong.append(made > right)
            own(name, made, right)
            if len(wrong) == 2:
                for part in drafts.kv.blocks:
                    part.fill_(torch.nan)

        found.counters.note = note  # type: ignore[method-assign]
        same(llm.engine, plain.engine, [Asked([5, 6, 7], LONG)])
        assert wrong[:4] == [False, False, True, False] and not any(wrong[4:])
