"""Two ranks over gloo compute what one process does. One pair of processes serves all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.assembly import build_engine
from minivllm.parallel.team import Team
from tests.engine.traffic import KINDS
from tests.forked import fork_known
from tests.reference import FAMILIES, SHARING_PROMPTS, VARIANTS, make_checkpoint

CLOSE = 1e-5
PLAIN = ["quant=fp32", "runtime.threads=1", "model.max_model_len=128"]
BLOCKS = "cache.num_blocks=64"
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
SEQUENCE = [5, 17, 3, 99, 42, 8, 77, 5, 60, 11, 12, 13, 14, 15, 16, 100, 1, 0, 127]
# Whole groups of 32 and blocks of 64 inputs on each of two ranks.
WIDE = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "intermediate_size": 128}
FEW_BLOCKS = ["cache.block_size=4", "cache.num_blocks=24", "model.max_model_len=64"]

OnTwo = Callable[..., Any]


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with pytest.MonkeyPatch.context() as patch:
        fork_known(patch)
        team = Team(2)
    yield team
    team.close()


@pytest.fixture
def on_two(team: Team, monkeypatch: pytest.MonkeyPatch) -> OnTwo:
    """An LLM on both ranks, as a context manager; takes a checkpoint and overrides."""

    @contextmanager
    def opened(folder: Path, *overrides: str) -> Iterator[LLM]:
        with monkeypatch.context() as patch:
            patch.setattr("minivllm.llm.build_engine", partial(build_engine, team=team))
            with on_one(folder, *overrides, "parallel.tensor=2") as llm:
                yield llm

    return opened


def on_one(folder: Path, *overrides: str) -> LLM:
    own = any(one.startswith(("cache.num_blocks", "cache=")) for one in overrides)
    return LLM(str(folder), overrides=[*PLAIN, *([] if own else [BLOCKS]), *overrides])


def answers(llm: LLM, params: Any = GREEDY) -> list[Any]:
    """The tokens of each sample of each prompt, and its finish reason."""
    return [
        [(sample.token_ids, sample.finish_reason) for sample in output.outputs]
        for output in llm.generate(SHARING_PROMPTS, params)
    ]


def assert_alike(on_two: OnTwo, folder: Path, *overrides: str, params: Any = GREEDY) -> None:
    with on_one(folder, *overrides) as one:
        expected, logits = answers(one, params), one.logits(SEQUENCE)
    with on_two(folder, *overrides) as two:
        assert answers(two, params) == expected
        atol = CLOSE * max(1.0, float(logits.abs().max()))
        torch.testing.assert_close(two.logits(SEQUENCE), logits, atol=atol, rtol=0)
    assert logits.std() > 0.1  # or the comparison would say nothing


CASES = {name: VARIANTS[name] for name in FAMILIES}
CASES |= {
    "biases": VARIANTS["llama biases"],
    "tied": VARIANTS["llama tied"],
    "one kv head": VARIANTS["qwen3 one kv head"],
    "gemma3 one kv head": VARIANTS["gemma3 one kv head, untied"],
    "odd vocabulary": ("qwen3", {"vocab_size": 129}),
    "odd vocabulary, tied": ("gemma2", {"vocab_size": 129}),
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one(case: str, on_two: OnTwo, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    make_checkpoint(tmp_path, family, **overrides)
    assert_alike(on_two, tmp_path)


QUANTISED = {
    "int8": ["quant=int8"],
    "int8 head": ["quant=int8", "quant.lm_head=true"],
    "int4": ["quant=int4", "quant.group_size=32"],
    "nf4": ["quant=nf4", "quant.double_quant=false"],
    "fp8": ["quant=fp8"],
    "pruned": ["pruning=magnitude"],
    "pruned layers, int8": ["pruning=layers", "pruning.layers=[1]", "quant=int8"],
}


@pytest.mark.parametrize(
    ("case", "family"),
    [
        *((case, "llama") for case in QUANTISED),
        *((case, "qwen3_moe") for case in ("int8", "int4", "nf4", "pruned")),
        *((case, "phi3") for case in ("int8", "int4", "nf4")),
    ],
)
def test_a_quantised_model_has_the_same_numbers_on_two_ranks(
    case: str, family: str, on_two: OnTwo, tmp_path: Path
) -> None:
    wide = {**WIDE, "moe_intermediate_size": 128} if family == "qwen3_moe" else WIDE
    if family == "phi3":
        wide = {**WIDE, "hidden_size": 128}
    make_checkpoint(tmp_path, family, **wide)
    knobs = [*QUANTISED[case], "quant.dtype=float32"]
    assert_alike(on_two, tmp_path, *knobs)


SERVED = {
    "chunks": ["batching.max_num_batched_tokens=7"],
    "prefixes": ["cache.prefix_caching=true", "cache.block_size=4"],
    "recompute": FEW_BLOCKS,
    "swap": [*FEW_BLOCKS, "batching.preemption=swap"],
    "offload": [*FEW_BLOCKS, "cache.prefix_caching=true", "cache.offload_gb=1e-4"],
    "overlap": ["runtime.overlap=true"],
    "static": ["batching=static", "batching.max_num_seqs=3"],
    "8-bit cache": ["cache.kv_dtype=int8"],
    "no cache": ["cache=none"],
    "determinism": ["runtime.determinism=batch"],
    "eviction": [
        *("attention=eager", "cache.eviction=h2o", "cache.eviction_budget=12"),
        *("cache.block_size=4", "cache.eviction_sinks=4", "cache.eviction_window=4"),
    ],
}


@pytest.mark.parametrize("case", SERVED)
def test_requests_of_every_kind_are_served_alike(case: str, on_two: OnTwo, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    params = [KINDS[index % len(KINDS)] for index in range(len(SHARING_PROMPTS))]
    assert_alike(on_two, tmp_path, *SERVED[case], params=params)


DRAFTED = {
    "ngram": ["speculative=ngram", "cache.prefix_caching=true"],
    "the same weights": ["speculative=draft", "quant@speculative.quant=int8"],
    "early exit": ["speculative=early_exit", "speculative.exit_layer=2"],
    "rejection": [
        *("speculative=early_exit", "speculative.exit_layer=1", "speculative.verify=rejection"),
        "runtime.overlap=false",
    ],
}


@pytest.mark.parametrize("case", [*DRAFTED, "a second model"])
def test_drafts_are_made_and_verified_alike(case: str, on_two: OnTwo, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "target", "qwen3")
    knobs = DRAFTED.get(case, [])
    if not knobs:
        make_checkpoint(tmp_path / "draft", "llama", num_hidden_layers=1)
        knobs = ["speculative=draft", "model@speculative.model=hf"]
        knobs += [f"speculative.model.path={tmp_path / 'draft'}", "speculative.quant=null"]
    sampled = [kind for kind in KINDS if kind.beam_width == 1 and kind.prompt_logprobs is None]
    params = [sampled[index % len(sampled)] for index in range(len(SHARING_PROMPTS))]
    assert_alike(
        *(on_two, tmp_path / "target", "speculative.adaptive=false", *knobs), params=params
    )


def test_all_of_them_together(on_two: OnTwo, tmp_path: Path) -> None:
    """Quantisation, drafts, a prefix cache and preemption in one engine, each at work."""
    make_checkpoint(tmp_path, "qwen3", **WIDE)
    knobs = [*QUANTISED["int8"], "quant.dtype=float32", *FEW_BLOCKS, *DRAFTED["ngram"]]
    knobs += ["speculative.adaptive=false", "cache.num_blocks=20"]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with on_one(tmp_path, *knobs) as one:
        expected = answers(one, params)
    with on_two(tmp_path, *knobs) as two:
        assert answers(two, params) == expected
        engine = two.engine
        assert engine.scheduler.num_preemptions and engine.cache.counters.prefix_tokens_reused
        assert engine.loaded.quantized_layers
        assert engine.launcher.speculation.counters.num_accepted_tokens
