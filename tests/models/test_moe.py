"""Mixtures of experts: Mixtral and Qwen3-MoE against transformers, and what is particular to
experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from minivllm import LLM, SamplingParams
from minivllm.bench.hardware.readings import Roofline
from minivllm.bench.metrics.roofline import usage
from minivllm.config.compose import compose
from minivllm.engines.minivllm.engine import MinivllmEngine
from minivllm.errors import BadInput
from minivllm.kernels.device import BuildContext
from minivllm.models.config import ModelConfig
from minivllm.models.layers import Linear
from minivllm.models.load.loading import load_model
from minivllm.models.moe import MoE
from minivllm.models.options import ModelOptions
from minivllm.quant.int8 import Int8
from minivllm.quant.plain import Plain
from tests.models.test_parity import PROMPTS, expected, load, run
from tests.reference import FAMILIES, SMALL, make_checkpoint

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"sliding_window": None}),
    "mixtral window": ("mixtral", {"sliding_window": 7}),
    "mixtral one expert a token": ("mixtral", {"num_experts_per_tok": 1}),
    "mixtral all experts": ("mixtral", {"num_experts_per_tok": 4}),
    "mixtral wide heads": (
        "mixtral",
        {"num_local_experts": 6, "head_dim": 32, "num_key_value_heads": 1},
    ),
    "mixtral tied": ("mixtral", {"tie_word_embeddings": True}),
    "qwen3 moe": ("qwen3_moe", {}),
    "qwen3 moe not normalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3 moe wide heads": ("qwen3_moe", {"head_dim": 32, "num_experts_per_tok": 3}),
    "qwen3 moe every second layer": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen3 moe some dense layers": ("qwen3_moe", {"mlp_only_layers": [0, 2]}),
    "qwen3 moe attention bias": ("qwen3_moe", {"attention_bias": True}),
    "qwen3 moe window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 7}),
}
each_case = pytest.mark.parametrize("case", CASES)
each_family = pytest.mark.parametrize("case", ["mixtral", "qwen3 moe"])


def save(case: str, folder: Path, **overrides: Any) -> Any:
    family, given = CASES[case]
    return make_checkpoint(folder, family, **(given | overrides))


def mixtures(model: nn.Module) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


@each_case
def test_every_layer_and_the_logits_match_transformers(case: str, tmp_path: Path) -> None:
    reference = save(case, tmp_path)
    states, logits = run(load(tmp_path), PROMPTS)
    expected_states, expected_logits = expected(reference, PROMPTS)
    for state, wanted in zip(states, expected_states, strict=True):
        torch.testing.assert_close(state, wanted, atol=1e-4, rtol=0)
    torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=0)
    assert expected_logits.std() > 0.1  # or the comparison would say nothing


@each_case
def test_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    reference = save(case, tmp_path, eos_token_id=None)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with LLM(str(tmp_path), quant="fp32", attention="eager", device="cpu") as llm:
        ours = [list(out.outputs[0].token_ids) for out in llm.generate(PROMPTS, params)]
    for prompt, tokens in zip(PROMPTS, ours, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0
        )
        assert tokens == expected[0, len(prompt) :].tolist()


@each_family
def test_a_16_bit_mixture_is_as_exact_as_that_of_transformers(case: str, tmp_path: Path) -> None:
    reference = save(case, tmp_path).to(torch.bfloat16)
    x = torch.randn(64, SMALL["hidden_size"], generator=torch.Generator().manual_seed(1)).bfloat16()
    theirs = reference.model.layers[0].mlp(x[None])[0].float()
    expected = reference.float().model.layers[0].mlp(x[None].float())[0]  # the same rounded weights
    ours = mixtures(load(tmp_path, "bfloat16").model)[0](x).float()
    assert (ours - expected).norm() < 1.2 * (theirs - expected).norm()


@each_family
def test_only_experts_that_got_tokens_run_and_each_once(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    loaded = load(tmp_path)
    calls: list[tuple[int, int]] = []  # of the first mixture: expert, rows
    moe = mixtures(loaded.model)[0]
    for i, expert in enumerate(moe.experts):
        expert.register_forward_pre_hook(lambda _, args, i=i: calls.append((i, len(args[0]))))
    run(loaded, [[5]])
    assert [rows for _, rows in calls] == [1, 1] and moe.experts_run == 2
    assert loaded.model.experts_run == 2 * len(mixtures(loaded.model))
    calls.clear()
    run(loaded, PROMPTS)
    assert sum(rows for _, rows in calls) == 2 * sum(map(len, PROMPTS))
    assert len({i for i, _ in calls}) == len(calls) == moe.experts_run


def test_experts_that_no_token_chooses_are_not_touched(tmp_path: Path) -> None:
    save("qwen3 moe", tmp_path)
    moe = mixtures(load(tmp_path).model)[0]
    x = torch.randn(3, SMALL["hidden_size"], generator=torch.Generator().manual_seed(1))
    expected = moe(x)
    chosen = set(moe.gate(x).topk(2).indices.flatten().tolist())
    assert len(chosen) == moe.experts_run < moe.num_experts
    for i in set(range(moe.num_experts)) - chosen:
        moe.experts[i] = Linear(1, {"never": 1})  # raises when it is called
    assert torch.equal(moe(x), expected)


@each_family
def test_a_token_does_not_depend_on_its_neighbours(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    loaded = load(tmp_path)
    together = run(loaded, PROMPTS)[1].split([len(prompt) for prompt in PROMPTS])
    for prompt, logits in zip(PROMPTS, together, strict=True):
        torch.testing.assert_close(run(loaded, [prompt])[1], logits, atol=1e-5, rtol=0)


def test_at_the_level_batch_neighbours_change_no_bit(tmp_path: Path) -> None:
    save("qwen3 moe", tmp_path, dtype=torch.bfloat16)
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2)
    with LLM(str(tmp_path), device="cpu", overrides=["runtime.determinism=batch"]) as llm:
        alone = [llm.generate([prompt], params)[0].outputs[0] for prompt in PROMPTS]
        together = [result.outputs[0] for result in llm.generate(PROMPTS, params)]
    assert [(out.token_ids, out.logprobs) for out in together] == [
        (out.token_ids, out.logprobs) for out in alone
    ]


@each_family
@pytest.mark.parametrize(("quant", "tolerance", "share"), [("int8", 0.02, 0.3), ("nf4", 0.2, 0.2)])
def test_quantised_experts(
    case: str, quant: str, tolerance: float, share: float, tmp_path: Path
) -> None:
    wide = {"hidden_size": 64, "intermediate_size": 128}  # the blocks of nf4 are of 64 weights
    save(case, tmp_path, **wide, **({"moe_intermediate_size": 64} if case != "mixtral" else {}))
    plain = load(tmp_path)
    with LLM(str(tmp_path), quant=quant, device="cpu", overrides=["quant.dtype=float32"]) as llm:
        loaded = llm.engine.loaded
        assert llm.logits(PROMPTS[2]).isfinite().all()
    experts = mixtures(loaded.model)[0].num_experts
    # qkv and o; gate-up and down of each expert
    assert loaded.quantized_layers == 3 * (2 + 2 * experts)
    assert loaded.model.expert_bytes < share * plain.model.expert_bytes
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    for moe, exact in zip(mixtures(loaded.model), mixtures(plain.model), strict=True):
        assert torch.equal(moe.gate(x), exact.gate(x))  # so the choice of experts is the same
        out, expected = moe(x), exact(x)
        assert 0 < (out - expected).norm() / expected.norm() < tolerance


def test_experts_can_be_skipped(tmp_path: Path) -> None:
    save("qwen3 moe some dense layers", tmp_path)
    loaded = load_model(
        ModelOptions(str(tmp_path)),
        quant=Int8("float32", skip=["experts."]),
        context=BuildContext(torch.device("cpu")),
    )
    assert loaded.quantized_layers == 3 * 2 + 2 * 2  # attention everywhere, two dense MLPs


def test_random_weights_need_no_checkpoint() -> None:
    architecture = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4} | SMALL
    loaded = load_model(
        ModelOptions("", weights="random", architecture=architecture),
        quant=Plain("float32"),
        context=BuildContext(torch.device("cpu")),
    )
    logits = run(loaded, PROMPTS)[1]
    assert logits.isfinite().all() and loaded.model.experts_run > 0


@pytest.mark.parametrize("active", [0, 9])
def test_an_impossible_number_of_experts_is_named(active: int) -> None:
    config = (
        SMALL
        | FAMILIES["qwen3_moe"]
        | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts_per_tok": active}
    )
    with pytest.raises(BadInput, match=f"num_experts_per_tok={active} must be between 1 and 8"):
        ModelConfig.from_dict(config)


def test_both_spellings_of_the_number_of_experts(tmp_path: Path) -> None:
    """The hub's Qwen3-MoE says num_experts; transformers 5 saves it as num_local_experts, Mixtral's
    name."""
    save("qwen3 moe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    expected = run(load(tmp_path), PROMPTS)[1]
    for name in ("num_experts", "num_local_experts"):
        rest = {key: value for key, value in config.items() if not key.endswith("_experts")}
        (tmp_path / "config.json").write_text(json.dumps(rest | {name: 8}))
        assert torch.equal(run(load(tmp_path), PROMPTS)[1], expected)


def test_a_step_tells_which_share_of_the_experts_it_read(tmp_path: Path) -> None:
    save("qwen3 moe some dense layers", tmp_path)
    model = {"model.path": str(tmp_path), "model.weights": "auto"}
    config = compose(
        ["model=hf", *(f"{k}={v}" for k, v in model.items()), "quant=fp32", "runtime.device=cpu"]
    )
    engine = MinivllmEngine(config)
    for i, prompt in enumerate(PROMPTS):
        engine.submit(str(i), prompt, SamplingParams(max_tokens=8, ignore_eos=True))
    while engine.engine.has_unfinished:
        engine.poll()
    steps, costs = engine.steps(), engine.info.model
    # gate, up and down, float32; one layer of three has experts, two a token
    expert = 3 * 48 * 32 * 4
    assert costs["expert_weight_bytes"] == expert and costs["experts_per_token"] == 2
    whole = engine.info.memory["weights"] - 128 * 48 * 4  # the embedding is only looked up
    assert costs["streamed_weight_bytes"] == whole - 8 * expert
    assert all(2 <= step["experts_run"] <= min(8, 2 * step["num_tokens"]) for step in steps)
    assert engine.liveness()["model"]["experts_run"] == sum(step["experts_run"] for step in steps)
    decode = [step for step in steps if not step["num_prefill_tokens"]]
    used = usage(costs, decode, Roofline())
    cached = costs["kv_bytes_per_token"] * sum(step["context_tokens"] for step in decode)
    experts = expert * sum(step["experts_run"] for step in decode)
    assert used.decode_bytes == len(decode) * (whole - 8 * expert) + experts + cached
    engine.close()
