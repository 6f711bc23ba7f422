"""Logits that are no finite numbers end their own request, by name, whatever computes and chooses;
the others go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm import LLM, SamplingParams
from minivllm.bench.quality import greedy
from minivllm.config.compose import compose
from minivllm.engine import sampler
from minivllm.engine.batch_inputs import SamplingColumns, pack_columns
from minivllm.engine.executor import sampler_ops
from minivllm.engine.request import Request
from minivllm.engine.sampler import SamplerOps
from minivllm.engines.minivllm.engine import MinivllmEngine
from minivllm.errors import BadInput, NonFiniteLogits
from minivllm.extras.beam import best_continuations
from minivllm.platform.given import FLOAT32
from tests.engine.sampling import sample
from tests.engine.traffic import Asked, serve
from tests.extras.test_graphs import keep, run_again
from tests.reference import make_checkpoint

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=1.0, seed=1)
GOOD = [[5, 6, 7], [8, 9, 10, 11, 12, 13]]
BROKEN = 77  # a token whose embedding is NaN
BESIDE = [replace(DRAWN, temperature=2.0), replace(GREEDY, allowed_token_ids=range(90, 99))]
SOUND = [
    *(Asked(GOOD[0], GREEDY), Asked(GOOD[1], GREEDY, comes=2)),
    *(Asked(prompt, one) for prompt in GOOD for one in BESIDE),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("broken")
    make_checkpoint(path, "llama")
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][BROKEN] = torch.nan
    tensors["lm_head.weight"][BROKEN] = -1.0  # hardly ever comes by itself
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


CONFIGURATIONS = {
    "plain": [],
    "torch alone": ["runtime.cpu_kernels=off"],
    "overlap": ["runtime.overlap=true"],
    "prefixes": ["cache.prefix_caching=true", "runtime.overlap=true"],
    "offload": ["cache.prefix_caching=true", "cache.offload_gb=1e-4"],
    "few blocks": ["cache.num_blocks=14", "batching.max_num_batched_tokens=5"],
    "no cache": ["cache=none"],
    "invariant": ["runtime.determinism=batch"],
}


@pytest.fixture(scope="module", params=[*CONFIGURATIONS, "graphs"])
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    chosen = CONFIGURATIONS.get(request.param, ["runtime.overlap=true"])
    groups = [item for item in chosen if "." not in item.partition("=")[0]]
    knobs = [item for item in chosen if item not in groups]
    common = ["cache.block_size=4", "model.max_model_len=48"] if "cache=none" not in groups else []
    attention = ["attention=cpu"] if request.param == "graphs" else []
    overrides = [*groups, *attention, *common, *knobs]
    with LLM(str(folder), quant="fp32", device="cpu", overrides=overrides) as made:
        if request.param == "graphs":
            keep(made.engine, run_again)
        yield made


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[tuple[list[int], str | None]]]:
    """What the sound requests get by themselves."""
    return serve(llm.engine, SOUND)


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        DRAWN,
        replace(DRAWN, top_k=5),
        replace(GREEDY, logit_bias={3: 1.0}),
        replace(DRAWN, min_tokens=4),
        replace(DRAWN, logprobs=2),
        replace(GREEDY, prompt_logprobs=1),
        replace(DRAWN, n=2),
        replace(GREEDY, beam_width=2),
        replace(GREEDY, token_mask=lambda *_: range(3, 20)),
    ],
    ids=lambda params: ", ".join(
        f"{name}"
        for name, value in vars(params).items()
        if value != getattr(SamplingParams(), name)
    ),
)
def test_only_that_request_ends(
    llm: LLM, alone: list[list[tuple[list[int], str | None]]], params: SamplingParams
) -> None:
    asked = [
        Asked([5, 6, BROKEN], params),
        Asked([4, 5, BROKEN, 4, 4, 4, 4, 4, 4], params, comes=1),
    ]
    *others, wrong, other = serve(llm.engine, SOUND + asked)
    assert others == alone
    assert all(sample == ([], "error") for sample in [*wrong, *other])


def test_it_is_named_and_leaves_nothing_for_others(llm: LLM) -> None:
    """Its first token is chosen, the next one is not; whoever takes its blocks then meets no
    NaN."""
    engine = llm.engine
    broken = replace(GREEDY, logit_bias={BROKEN: 1e30})
    with pytest.raises(
        NonFiniteLogits, match=r"request \d+: .* at position 5 are not finite .*quant=fp32"
    ):
        llm.generate([[20, 21, 22, 23]], broken, on_error="raise")
    [alone] = llm.generate(GOOD[0], GREEDY)
    with pytest.warns(UserWarning, match="1 of 2 completions ended with an error"):
        wrong, good = llm.generate([[20, 21, 22, 23], GOOD[0]], [broken, GREEDY])
    assert wrong.outputs[0].finish_reason == "error" and good.outputs == alone.outputs
    pieces = llm.stream([20, 21, 22, 23], broken)
    assert next(pieces).token_id == BROKEN
    with pytest.raises(NonFiniteLogits, match="not finite"):
        next(pieces)
    assert not engine.has_unfinished and not engine.cache.pool.num_used
    if engine.cache.layout.retains_kv:
        assert all(part[1:].isfinite().all() for parts in engine.kv.parts for part in parts)
    if engine.cache.prefix is not None:
        assert not [*engine.cache.prefix.match([20, 21, 22, 23, 24], 1)]


def test_the_logits_of_a_position_are_refused(llm: LLM) -> None:
    with pytest.raises(NonFiniteLogits, match=r"position [123] are not finite"):
        llm.logits([5, 6, BROKEN, 7])
    assert llm.logits([5, 6]).isfinite().all()


def test_a_benchmark_counts_it_as_an_error(folder: Path) -> None:
    config = compose(
        [
            "model=hf",
            f"model.path={folder}",
            "quant=fp32",
            "runtime.device=cpu",
            "runtime.threads=1",
        ]
    )
    engine = MinivllmEngine(config)
    engine.submit("bad", [5, BROKEN], GREEDY)
    engine.submit("good", [5, 6], GREEDY)
    outputs = []
    while engine.engine.has_unfinished:
        outputs += engine.poll()
    bad = [output for output in outputs if output.request_id == "bad"]
    assert [output.finish_reason for output in bad] == ["error"]
    assert (
        bad[0].error is not None and "request bad" in bad[0].error and "not finite" in bad[0].error
    )
    assert sum(len(output.token_ids) for output in outputs) == 8
    with pytest.raises(RuntimeError, match="not finite"):
        greedy(engine, [[5, BROKEN]], 4)
    engine.close()


def request(params: SamplingParams) -> Request:
    return Request("r", [1, 2], params, max_num_tokens=9, seed=3)


@pytest.fixture(params=["torch", "cpu", "triton"])
def kernels(request: pytest.FixtureRequest, folder: Path) -> SamplerOps:
    if request.param == "torch":
        return sampler.TORCH
    if request.param == "triton":
        return sampler_ops(None, triton=True)
    with LLM(str(folder), quant="fp32", device="cpu", overrides=["model.max_model_len=48"]) as llm:
        if llm.engine.loaded.kernels is None:
            pytest.skip("no compiler")
        return sampler_ops(llm.engine.loaded.kernels, triton=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [7, 2500])
def test_rows_without_a_finite_largest_are_flagged(
    kernels: SamplerOps, dtype: torch.dtype, size: int
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, size)
    logits[1, 3], logits[2, 3], logits[3], logits[4, 2:] = (
        torch.nan,
        torch.inf,
        -torch.inf,
        -torch.inf,
    )
    logits[5, size - 1], logits[6, 3] = torch.nan, -torch.inf
    logits = logits.to(dtype)
    flagged = (kernels.argmax(logits) < 0).tolist()
    assert flagged == [False, True, True, True, False, True, False, False]
    for params in (GREEDY, DRAWN, replace(DRAWN, top_k=4), replace(GREEDY, logit_bias={0: 1.0})):
        tokens = sample(logits, [request(params) for _ in flagged], ops=kernels)
        assert [token < 0 for token in tokens] == flagged


def test_beams_of_no_number_have_an_error_and_the_others_none() -> None:
    logits = torch.randn(4, 20)
    logits[1, 3], logits[2, 4], logits[3] = torch.nan, torch.inf, -torch.inf
    beams = [request(replace(GREEDY, beam_width=2, allowed_token_ids=(5, 6))) for _ in range(4)]
    found = best_continuations(logits, beams)
    assert [isinstance(beam.error, NonFiniteLogits) for beam in beams] == [False, True, True, True]
    assert {token for _, token in found[0]} == {5, 6}


@pytest.mark.parametrize(
    "what",
    [
        {"logit_bias": {7: 100.0}},
        {"logit_bias": {7: 1e30}},
        {"logit_bias": {7: FLOAT32}},
        {"logit_bias": {7: FLOAT32}, "repetition_penalty": 1e-30, "temperature": 1e-3},
        {"logit_bias": {i: -FLOAT32 for i in range(7)}},
        {"repetition_penalty": 1e30, "logit_bias": {7: 1e38}},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-3, 1.5])
@pytest.mark.parametrize("top_k", [0, 3])
def test_what_is_huge_acts_as_it_says(
    what: dict[str, object], temperature: float, top_k: int
) -> None:
    """Nothing becomes infinite on the way, whatever the order of magnitude; token 7 is forced."""
    logits = torch.tensor([[9.0, -8.0, 7.0, 1.0, -2.0, 3.0, 0.5, 0.0]])
    params = SamplingParams(**{"temperature": temperature, "top_k": top_k, **what})  # type: ignore[arg-type]
    for kernels in (sampler.TORCH, sampler_ops(None, triton=True)):
        assert sample(logits, [request(params)], ops=kernels) == [7]


def test_a_small_temperature_and_a_large_logit_are_drawn_from_alike() -> None:
    logits = torch.tensor([[3e38, 3e38, -3e38, 0.0]])
    made = [request(replace(DRAWN, temperature=1e-3)) for _ in range(40)]
    for seed, one in enumerate(made):
        one.seed = seed
    columns = SamplingColumns.upload(
        pack_columns(made, range(40), [r.num_tokens for r in made]), torch.device("cpu")
    )
    assert set(sampler.draw(logits.expand(40, -1), columns).tolist()) == {0, 1}


@pytest.mark.parametrize(
    "wrong",
    [
        {"logit_bias": {7: 1e39}},
        {"logit_bias": {7: 10**400}},
        {"logit_bias": {7.5: 1.0}},
        {"repetition_penalty": 1e-45},
        {"repetition_penalty": 1e39},
        {"temperature": 1e39},
        {"temperature": 10**400},
        {"top_p": 1e-50},
        {"min_p": float("nan")},
        {"length_penalty": 1e308},
        {"priority": 10**400},
        {"deadline_ms": 10**400},
        {"n": 10**9},
        {"beam_width": 10**9},
    ],
)
def test_what_float32_cannot_hold_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(BadInput, match=f"decoding.{next(iter(wrong))}="):
        SamplingParams(**wrong)  # type: ignore[arg-type]
