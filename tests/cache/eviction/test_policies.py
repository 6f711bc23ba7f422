"""Eviction against dense attention with the mask that it amounts to, worked out independently."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm import LLM, SamplingParams
from minivllm.attention.options import SCORING
from minivllm.cache.eviction.policies import make_eviction
from minivllm.cache.kv import KVCache
from minivllm.cache.options import PagedOptions
from minivllm.cache.spec import AttentionSpec, CacheLayout
from minivllm.config.compose import build, compose
from minivllm.engine.batching import Continuous
from minivllm.engine.input_processor import sample_seed
from minivllm.engines.minivllm.engine import MinivllmEngine
from minivllm.errors import BadInput
from minivllm.kernels.cpu import library
from minivllm.kernels.device import BuildContext
from tests.engine.imaginary import Machine
from tests.reference import make_checkpoint

SIZE, BUDGET, SINKS, WINDOW = 4, 24, 4, 8  # tokens
PROMPTS = [
    [(7 * i + i * i) % 120 + 2 for i in range(61)],
    [5, 17, 3, 99, 42, 8],
    [(11 * i) % 113 + 3 for i in range(40)],
    [9, 4, 30] * 9,
    [(7 * i + i * i) % 120 + 2 for i in range(33)],  # starts as the first does
]
OUTPUT = 12
KNOBS = [
    f"cache.block_size={SIZE}",
    f"cache.eviction_budget={BUDGET}",
    f"cache.eviction_sinks={SINKS}",
    f"cache.eviction_window={WINDOW}",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    return folder, make_checkpoint(folder, num_hidden_layers=2, attn_implementation="eager")


def serving(folder: Path, *overrides: str) -> LLM:
    groups = [item for item in overrides if "." not in item.split("=")[0]]
    knobs = [item for item in overrides if item not in groups]
    common = [
        "model.max_model_len=100",
        f"decoding.max_tokens={OUTPUT}",
        "decoding.ignore_eos=true",
        "runtime.device=cpu",
    ]
    return LLM(str(folder), quant="fp32", overrides=[*groups, *common, *knobs])


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[list[int]]]:
    return [[output.token_ids for output in result.outputs] for result in llm.generate(prompts)]


def dense(model: Any, token_ids: list[int], policy: str) -> tuple[Tensor, Tensor]:
    """Logits [tokens, vocab], and the mask [query, key] of what each token sees, by transformers.

    Whenever as many tokens are held as the budget allows, the blocks between sinks and window go:
    all of them, or the less attended half.
    """
    count = len(token_ids)
    seen = torch.zeros(count, count, dtype=torch.bool)
    held: list[int] = []
    mass, counted = torch.zeros(count), 0  # of each key; queries counted so far

    def run(upto: int) -> Any:
        mask = torch.where(seen[:upto, :upto], 0.0, torch.finfo(torch.float32).min)
        with torch.no_grad():
            return model(
                torch.tensor([token_ids[:upto]]),
                attention_mask=mask[None, None],
                output_attentions=True,
            )

    for query in range(count):
        held.append(query)
        seen[query, held] = True
        if len(held) < BUDGET:
            continue
        middle = held[SINKS : BUDGET - WINDOW]
        blocks = [middle[i : i + SIZE] for i in range(0, len(middle), SIZE)]
        if policy != "streaming":
            attention = torch.stack(run(query + 1).attentions).sum((0, 1, 2))  # [query, key]
            first = query + 1 - WINDOW if policy == "snapkv" else counted
            mass = torch.zeros(count) if policy == "snapkv" else mass
            mass[: query + 1] += attention[first:].sum(0)
            counted = query + 1
            blocks.sort(key=lambda block: float(mass[block].sum()))
            blocks = blocks[: len(blocks) - len(blocks) // 2]
        gone = {token for block in blocks for token in block}
        held = [token for token in held if token not in gone]
    return run(count).logits[0], seen


@pytest.fixture(scope="module")
def masked(model: tuple[Path, Any]) -> Callable[[str], tuple[Tensor, Tensor]]:
    """`dense` of the first prompt, by policy."""
    return cache(lambda policy: dense(model[1], PROMPTS[0], policy))


@pytest.fixture(scope="module")
def reference(model: tuple[Path, Any]) -> Callable[[str], list[list[list[int]]]]:
    """Greedy tokens of the first three prompts by transformers, by policy."""

    def greedy(prompt: list[int], policy: str) -> list[int]:
        known = list(prompt)
        while len(known) < len(prompt) + OUTPUT:
            known.append(int(dense(model[1], known, policy)[0][-1].argmax()))
        return known[len(prompt) :]

    return cache(lambda policy: [[greedy(prompt, policy)] for prompt in PROMPTS[:3]])


def backend(policy: str) -> str:
    return "attention=auto" if policy == "streaming" else "attention=eager"


@pytest.mark.parametrize("budget", [1, 10, 2048])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_streaming_equals_dense_attention_with_its_mask(
    attention: str,
    budget: int,
    model: tuple[Path, Any],
    masked: Callable[[str], tuple[Tensor, Tensor]],
) -> None:
    expected, seen = masked("streaming")
    assert seen.sum(1).max() == BUDGET and seen[SINKS:, :SINKS].all()
    cut = f"batching.max_num_batched_tokens={budget}"
    knobs = [*KNOBS, "cache.eviction=streaming", cut, f"attention={attention}"]
    with serving(model[0], *knobs) as llm:
        torch.testing.assert_close(llm.logits(PROMPTS[0]), expected, atol=1e-4, rtol=0)
        assert llm.engine.cache.pool.num_used == 0


@pytest.mark.parametrize("budget", [1, 10, 2048])
@pytest.mark.parametrize("policy", ["h2o", "snapkv"])
def test_heavy_hitters_equal_dense_attention_with_their_mask(
    policy: str,
    budget: int,
    model: tuple[Path, Any],
    masked: Callable[[str], tuple[Tensor, Tensor]],
) -> None:
    expected, seen = masked(policy)
    streaming = masked("streaming")[1]
    assert (seen != streaming).any() and seen.sum(1).max() == BUDGET
    cut = f"batching.max_num_batched_tokens={budget}"
    knobs = [*KNOBS, f"cache.eviction={policy}", cut, "attention=eager"]
    with serving(model[0], *knobs) as llm:
        torch.testing.assert_close(llm.logits(PROMPTS[0]), expected, atol=1e-4, rtol=0)


SERVINGS = {
    "continuous": [],
    "sequential": ["batching=sequential"],
    "static": ["batching=static", "batching.max_num_seqs=3"],
    "small steps": ["batching.max_num_batched_tokens=5"],
    "preempted": ["cache.num_blocks=8"],
    "swapped": ["cache.num_blocks=8", "batching.preemption=swap"],
    "reserved": ["cache.num_blocks=8", "batching.preemption=reserve"],
}


@pytest.mark.parametrize("policy", ["streaming", "h2o", "snapkv"])
@pytest.mark.parametrize("served", SERVINGS.values(), ids=SERVINGS)
def test_tokens_equal_the_reference_however_they_are_served(
    policy: str,
    served: list[str],
    model: tuple[Path, Any],
    reference: Callable[[str], list[list[list[int]]]],
) -> None:
    with serving(model[0], *KNOBS, f"cache.eviction={policy}", backend(policy), *served) as llm:
        assert tokens(llm, PROMPTS[:3]) == reference(policy)
        counters, scheduler = llm.engine.cache.counters, llm.engine.scheduler
        assert counters.tokens_evicted == SIZE * counters.blocks_evicted > 0
        assert (counters.queries_observed > 0) == (policy != "streaming")
        if "cache.num_blocks=8" in served:
            assert scheduler.num_preemptions > 0 or "batching.preemption=reserve" in served
            # a prompt that exceeds the cache
            assert llm.engine.cache.capacity_tokens < len(PROMPTS[0])
        assert llm.engine.cache.pool.num_used == 0
        llm.engine.cache.pool.check_integrity([])


@pytest.mark.parametrize("policy", ["streaming", "h2o", "snapkv"])
def test_within_the_budget_nothing_changes(policy: str, model: tuple[Path, Any]) -> None:
    longest = max(map(len, PROMPTS)) + OUTPUT - 1
    budget = -(-longest // SIZE) * SIZE
    with serving(model[0], f"cache.block_size={SIZE}", "attention=eager") as llm:
        expected = tokens(llm)
    knobs = [
        f"cache.block_size={SIZE}",
        f"cache.eviction={policy}",
        f"cache.eviction_budget={budget}",
    ]
    with serving(model[0], *knobs, "attention=eager", "batching.chunked_prefill=false") as llm:
        assert tokens(llm) == expected
        assert llm.engine.cache.counters.tokens_evicted == 0


def test_cached_prefixes_give_the_same_tokens_cold_and_warm(model: tuple[Path, Any]) -> None:
    with serving(model[0], *KNOBS, "cache.eviction=streaming") as llm:
        expected = tokens(llm)
    with serving(model[0], *KNOBS, "cache.eviction=streaming", "cache.prefix_caching=true") as llm:
        counters = llm.engine.cache.counters
        assert tokens(llm) == expected
        cold = counters.prefix_tokens_reused
        assert tokens(llm) == expected
        # Of a longer prompt only what comes before the first eviction, and never a full budget.
        reused = [min((len(p) - 1) // SIZE * SIZE, BUDGET - SIZE) for p in PROMPTS]
        assert counters.prefix_tokens_reused - cold == sum(reused)


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_samples_of_an_evicted_prompt_share_what_stayed(
    policy: str, model: tuple[Path, Any]
) -> None:
    decoding = ["decoding=sample", "decoding.seed=3"]
    alone = []
    with serving(model[0], *KNOBS, f"cache.eviction={policy}", backend(policy), *decoding) as llm:
        for seed in (sample_seed(3, index) for index in range(3)):
            params = SamplingParams(max_tokens=OUTPUT, temperature=1.0, seed=seed, ignore_eos=True)
            alone.append(llm.generate([PROMPTS[0]], params)[0].outputs[0].token_ids)
    with serving(model[0], *KNOBS, f"cache.eviction={policy}", backend(policy)) as llm:
        params = SamplingParams(max_tokens=OUTPUT, temperature=1.0, seed=3, n=3, ignore_eos=True)
        assert [out.token_ids for out in llm.generate([PROMPTS[0]], params)[0].outputs] == alone
        assert llm.engine.cache.counters.blocks_shared > 0


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_compressed_blocks_are_evicted_all_the_same(kv_dtype: str, model: tuple[Path, Any]) -> None:
    found = []
    for cut in (3, 2048):
        knobs = [*KNOBS, f"cache.kv_dtype={kv_dtype}", "cache.eviction=streaming"]
        with serving(model[0], *knobs, f"batching.max_num_batched_tokens={cut}") as llm:
            found.append(tokens(llm))
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "gemma2"])
def test_sliding_windows_within_the_kept_window_stay_right(family: str, tmp_path: Path) -> None:
    dense_model = make_checkpoint(tmp_path, family, attn_implementation="eager")
    config = dense_model.config
    window = config.sliding_window
    assert window < WINDOW
    seen = torch.zeros(len(PROMPTS[0]), len(PROMPTS[0]), dtype=torch.bool)
    held: list[int] = []
    for query in range(len(PROMPTS[0])):
        held.append(query)
        seen[query, held] = True
        if len(held) == BUDGET:
            held = held[:SINKS] + held[-WINDOW:]
    near = seen & (torch.arange(len(seen))[None, :] > torch.arange(len(seen))[:, None] - window)
    masks = {
        kind: torch.where(mask, 0.0, torch.finfo(torch.float32).min)[None, None]
        for kind, mask in {"full_attention": seen, "sliding_attention": near}.items()
    }
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    mask = (
        masks["sliding_attention"] if family == "mistral" else {kind: masks[kind] for kind in kinds}
    )
    with torch.no_grad():
        expected = dense_model(torch.tensor([PROMPTS[0]]), attention_mask=mask).logits[0]
    with serving(tmp_path, *KNOBS, "cache.eviction=streaming") as llm:
        torch.testing.assert_close(llm.logits(PROMPTS[0]), expected, atol=1e-4, rtol=0)
    with pytest.raises(
        BadInput, match=f"sliding window of {window}: set cache.eviction_window={window}"
    ):
        serving(tmp_path, *KNOBS, "cache.eviction=streaming", "cache.eviction_window=4").close()


# ---- without a model


def make(
    policy: str = "streaming", blocks: int = 40, prefix_caching: bool = False, **knobs: Any
) -> Machine:
    eviction = make_eviction(
        PagedOptions(
            block_size=SIZE,
            prefix_caching=prefix_caching,
            eviction=policy,
            eviction_budget=BUDGET,
            eviction_sinks=SINKS,
            eviction_window=WINDOW,
        )
    )
    layout = CacheLayout(SIZE, blocks + 1, prefix_caching, eviction=eviction)
    return Machine(Continuous(8, knobs.pop("max_num_batched_tokens", 64), **knobs), layout)


@pytest.mark.parametrize("policy", ["streaming", "h2o", "snapkv"])
@pytest.mark.parametrize("step", [1, 5, 64])
def test_no_request_ever_holds_more_than_its_budget(policy: str, step: int) -> None:
    machine = make(policy, blocks=14, max_num_batched_tokens=step)
    for length in (90, 3, 70, 24, 25):
        machine.add([i % 5 for i in range(length)], 20)
    evicted = False
    while machine.scheduler.has_unfinished:
        plan = machine.scheduler.plan()
        for request in machine.requests:
            assert len(request.cache.block_table.blocks) <= BUDGET // SIZE
        machine.carry_out(plan)
        machine.check()
        for request in machine.scheduler.running:
            evicted |= request.cache.num_evicted > 0
            assert request.num_cached_tokens < BUDGET
    assert evicted
    assert machine.scheduler.cache.counters.tokens_evicted > 0
    assert all(request.finish_reason == "length" for request in machine.requests)


def test_an_evicted_table_has_a_new_version_and_frees_its_blocks() -> None:
    machine = make(blocks=6)
    request = machine.add([0] * 90, 3)
    machine.step()
    assert request.cache.block_table.version == 1
    assert (request.num_computed_tokens, request.cache.num_evicted) == (24, 12)
    assert machine.scheduler.cache.pool.num_used == 3
    machine.run()
    counters = machine.scheduler.cache.counters
    assert (counters.blocks_evicted, counters.tokens_evicted) == (18, 72)


def test_blocks_after_an_eviction_are_not_taken_for_prefixes() -> None:
    machine = make(prefix_caching=True)
    prompt = [i % 5 for i in range(90)]
    for _ in range(2):
        machine.add(prompt, 3)
        machine.run()
    assert machine.scheduler.cache.prefix is not None
    assert len(machine.scheduler.cache.prefix.by_block) == BUDGET // SIZE
    assert machine.scheduler.cache.counters.prefix_tokens_reused == BUDGET - SIZE


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (
            ["cache.eviction=streaming", "cache.eviction_budget=32"],
            "32 is 2 blocks of 16 tokens.*nothing is left",
        ),
        (["cache.eviction=h2o", "cache.prefix_caching=true"], "use cache.prefix_caching=false"),
        (["cache.eviction=snapkv", "attention=sdpa"], "use attention=eager"),
        (["cache.eviction=h2o", "runtime.determinism=batch"], "attention=invariant cannot return"),
        (["cache.eviction=oldest"], "must be none or streaming"),
        (["cache.eviction_window=0"], "must be at least 1"),
    ],
)
def test_refusals(overrides: list[str], complaint: str, model: tuple[Path, Any]) -> None:
    with pytest.raises(BadInput, match=complaint):
        serving(model[0], *overrides).close()


@pytest.mark.parametrize("name", ["eager", "sdpa", "cpu", "triton", "invariant"])
def test_a_backend_returns_attention_or_refuses_as_the_configuration_is_told(name: str) -> None:
    """That of flash needs a GPU."""
    node = compose([f"attention={name}"])["attention"]
    spec = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=16, scale=0.25)
    device = torch.device("cuda" if name == "triton" and torch.cuda.is_available() else "cpu")
    for policy in ("streaming", "h2o"):
        eviction = make_eviction(
            PagedOptions(eviction=policy, eviction_budget=128, eviction_sinks=0)
        )
        kv = KVCache([spec], CacheLayout(16, 8, eviction=eviction), torch.float32, device)
        offered = {"context": BuildContext(device, library.choose("auto", device)[0])}
        if policy == "streaming" or node["_target_"] in SCORING:
            assert build(node, offered, specs=[spec], kv=kv).name == name
        else:
            with pytest.raises(BadInput, match=f"attention={name} cannot return the attention"):
                build(node, offered, specs=[spec], kv=kv)


def test_auto_takes_the_backend_that_returns_attention(model: tuple[Path, Any]) -> None:
    with serving(model[0], *KNOBS, "cache.eviction=h2o") as llm:
        assert llm.engine.runner.attention.name == "eager"
    with serving(model[0], *KNOBS, "cache.eviction=streaming") as llm:
        assert llm.engine.runner.attention.name in ("cpu", "sdpa")


@pytest.mark.parametrize(
    ("policy", "queries"), [("streaming", 0), ("h2o", 24 + 8 + 8), ("snapkv", 3 * 8)]
)
def test_the_queries_that_choose_are_counted_however_the_prompt_is_cut(
    policy: str, queries: int
) -> None:
    for step in (1, 5, 64):
        machine = make(policy, max_num_batched_tokens=step)
        machine.add([0] * 40, 1)  # full at 24; two blocks go each time, so again at 32 and 40
        machine.run()
        assert machine.scheduler.cache.counters.queries_observed == queries


def test_a_prompt_beyond_the_budget_needs_chunks() -> None:
    machine = make(chunked_prefill=False)
    with pytest.raises(BadInput, match="chunked_prefill=true"):
        machine.add([0] * BUDGET, 2)
    machine.add([0] * BUDGET, 1)
    machine.run()


def test_records_count_what_was_evicted(model: tuple[Path, Any]) -> None:
    engine = MinivllmEngine(
        compose([f"model.path={model[0]}", "model=hf", *KNOBS, "cache.eviction=streaming"])
    )
    engine.submit("a", PROMPTS[0], SamplingParams(max_tokens=4, ignore_eos=True))
    while engine.engine.has_unfinished:
        engine.poll()
    assert engine.liveness()["cache"]["tokens_evicted"] == 48
    assert max(step["context_tokens"] for step in engine.steps()) == BUDGET
    engine.close()
