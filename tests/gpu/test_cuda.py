"""The ladder on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.errors import BadInput
from minivllm.kernels.device import BuildContext
from minivllm.models.load.loading import load_model
from minivllm.models.options import ModelOptions
from minivllm.passes.grouped import group_experts
from minivllm.quant.int4 import Int4
from minivllm.quant.plain import Plain
from tests.reference import FAMILIES, SMALL, VARIANTS, make_checkpoint

pytestmark = pytest.mark.gpu
PROMPTS = [list(range(3, 40)), [9, 8, 7], [5], list(range(60, 120, 2))]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved small model of each family."""
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(path, request.param)
    return path


@pytest.mark.parametrize("cache", ["paged", "contiguous"])
@pytest.mark.parametrize("attention", ["eager", "sdpa", "triton"])
def test_logits_equal_those_of_the_cpu(folder: Path, attention: str, cache: str) -> None:
    with LLM(str(folder), device="cpu", quant="fp32") as llm:
        expected = llm.logits(PROMPTS[0])
    with LLM(str(folder), device="cuda", quant="fp32", attention=attention, cache=cache) as llm:
        torch.testing.assert_close(llm.logits(PROMPTS[0]).cpu(), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("block_size", [16, 256])
def test_flash_attn_stays_near_triton(folder: Path, block_size: int) -> None:
    logits = []
    knobs = [f"cache.block_size={block_size}", "batching.max_num_batched_tokens=16"]
    for name in ("triton", "flash"):
        try:
            with LLM(
                str(folder), device="cuda", quant="bf16", attention=name, overrides=knobs
            ) as llm:
                logits.append(torch.softmax(llm.logits(PROMPTS[0]), -1))
        except BadInput as refused:
            pytest.skip(str(refused))
    assert float((logits[1] - logits[0]).abs().sum(-1).mean()) / 2 < 0.05


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_is_that_of_the_cpu(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    make_checkpoint(tmp_path, family, **overrides)
    results = []
    for device in ("cpu", "cuda"):
        with LLM(str(tmp_path), device=device, quant="fp32") as llm:
            generated = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
            results.append((llm.logits(PROMPTS[0]).cpu(), generated))
    torch.testing.assert_close(results[1][0], results[0][0], atol=1e-3, rtol=0)
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize(
    "knob", ["kv_dtype=int8", "kv_dtype=fp8", "eviction=streaming", "eviction=h2o"]
)
def test_a_smaller_cache_is_that_of_the_cpu(folder: Path, knob: str) -> None:
    knobs = [
        f"cache.{knob}",
        "cache.block_size=4",
        "cache.eviction_budget=24",
        "cache.num_blocks=26",
    ]
    results = []
    for device in ("cpu", "cuda"):
        for preemption in ("recompute", "swap"):
            overrides = [*knobs, f"batching.preemption={preemption}", "model.max_model_len=100"]
            with LLM(str(folder), device=device, quant="fp32", overrides=overrides) as llm:
                results.append(
                    [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
                )
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("batching", ["continuous", "sequential"])
def test_greedy_and_sampled_tokens_equal_those_of_the_cpu(folder: Path, batching: str) -> None:
    sampled = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True)
    results = []
    for device in ("cpu", "cuda"):
        with LLM(str(folder), device=device, quant="fp32", batching=batching) as llm:
            results.append(
                [
                    o.outputs[0].token_ids
                    for p in (GREEDY, sampled)
                    for o in llm.generate(PROMPTS, p)
                ]
            )
    assert results[0] == results[1]


@pytest.mark.parametrize("quant", ["bf16", "fp16", "int8", "int8_mixed", "fp8", "nf4", "int4"])
def test_every_precision_stays_near_float32(folder: Path, quant: str) -> None:
    with LLM(str(folder), device="cuda", quant="fp32") as llm:
        expected = torch.softmax(llm.logits(PROMPTS[0]), -1)
    with LLM(str(folder), device="cuda", quant=quant) as llm:
        got = torch.softmax(llm.logits(PROMPTS[0]), -1)
    distance = float((got - expected).abs().sum(-1).mean()) / 2
    assert distance < {"bf16": 0.05, "fp16": 0.02, "int8": 0.1, "int8_mixed": 0.15, "fp8": 0.2}.get(
        quant, 0.4
    )


@pytest.mark.parametrize("columns", [96, 192, 256])
def test_the_packed_int4_weight_is_that_of_the_cpu(columns: int) -> None:
    """In the kernel, and converted back from the order in which the tensor cores want it."""
    weight, bias = torch.randn(128, columns).bfloat16(), torch.randn(128).bfloat16()
    here, there = (Int4(group_size=32).pack(weight.to(d), bias.to(d)) for d in ("cpu", "cuda"))
    assert torch.equal(there.transposed(0, 128).cpu(), here.transposed(0, 128))
    for rows in (1, 17, 300):
        x = torch.randn(rows, columns).bfloat16()
        expected = x.double() @ here.transposed(0, 128).double() + bias
        error = (there(x.cuda()).cpu().double() - expected).norm() / expected.norm()
        assert error < 0.01


def test_blocks_come_back_from_host_and_disk_as_they_left(folder: Path) -> None:
    common = ["cache.block_size=4", "cache.prefix_caching=true", "model.max_model_len=64"]
    tiers = ["cache.num_blocks=18", "cache.offload_gb=1e-4", "cache.offload_disk_gb=1e-3"]
    results = []
    for overrides in (["cache.num_blocks=200"], tiers):
        with LLM(str(folder), device="cuda", quant="fp32", overrides=[*common, *overrides]) as llm:
            results.append(
                [o.outputs[0].token_ids for _ in range(3) for o in llm.generate(PROMPTS, GREEDY)]
            )
            assert (llm.engine.cache.counters.blocks_restored > 0) == (overrides is tiers)
    assert results[0] == results[1]


@torch.inference_mode()
def test_a_graph_holds_grouped_experts() -> None:
    """One capture serves every routing: nothing that depends on the tokens is asked for on the
    host."""
    architecture = (
        SMALL
        | FAMILIES["qwen3_moe"]
        | {"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64}
    )
    device = torch.device("cuda")
    loaded = [
        load_model(
            ModelOptions("", weights="random", architecture=architecture),
            quant=Plain("bfloat16"),
            context=BuildContext(device),
        )
        for _ in range(2)
    ]
    if not group_experts(loaded[1].model, "auto", device):
        pytest.skip("torch asks the host on this GPU")
    loop, grouped = (model.model.mixtures[0] for model in loaded)
    x, fresh = (torch.randn(7, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        grouped(x)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped(x)
    x.copy_(fresh)
    graph.replay()
    expected = loop(fresh)
    torch.testing.assert_close(out, expected, atol=0.02 * expected.abs().max().item(), rtol=0)
    assert int(grouped.experts_run) == loop.experts_run
