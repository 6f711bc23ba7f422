"""runtime.native_layers: a decoder layer as one call of C++ gives the bits of the operations called
one by one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.config.compose import compose
from minivllm.engines.minivllm.engine import MinivllmEngine
from minivllm.kernels.cpu import library
from minivllm.passes.native import NativeForward, NativeLayer
from tests.reference import VARIANTS, make_checkpoint

PROMPTS = [[5, 17, 3, 99, 42, 8], [9, 4, 30] * 9, [1], [7, 3, 99, 12, 55, 31, 8, 64, 90, 11, 2]]
KNOBS = ["runtime.threads=1", "model.max_model_len=64", "cache.num_blocks=40", "cache.block_size=8"]


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    try:
        if not library.load().has_linear:
            pytest.skip("this processor has no AVX2")
    except (RuntimeError, OSError) as error:
        pytest.skip(f"the C++ kernels cannot be had here: {str(error).splitlines()[0]}")


def open_llm(folder: Path, *overrides: str, quant: str = "bf16") -> LLM:
    return LLM(str(folder), device="cpu", quant=quant, overrides=[*KNOBS, *overrides])


def make_variant(folder: Path, variant: str) -> None:
    """As wide as four bits and the rotation of sixteen pairs at a time ask for."""
    family, overrides = VARIANTS[variant]
    make_checkpoint(
        folder,
        family,
        **{**overrides, "hidden_size": 128, "head_dim": 32, "intermediate_size": 128},
    )


def native(llm: LLM) -> int:
    return sum(isinstance(layer, NativeLayer) for layer in llm.engine.loaded.model.model.layers)


@pytest.mark.parametrize(
    ("variant", "quant", "layers"),
    [
        *(
            (name, "bf16", 3)
            for name in ("llama", "llama biases", "qwen2", "qwen3", "mistral", "phi3")
        ),
        *((name, "bf16", 3) for name in ("llama dynamic rope", "qwen3 one kv head", "qwen3 tied")),
        *(("qwen3", quant, 3) for quant in ("int8", "int4", "nf4")),
        *((name, "bf16", 0) for name in ("gemma", "gemma2", "gemma3_text", "mixtral", "qwen3_moe")),
        ("qwen3", "fp32", 0),
    ],
)
@pytest.mark.parametrize(
    "tokens", [2048, 7]
)  # a step; so few that some steps of the last layer are trimmed to one row
def test_logprobs_are_the_same_to_the_bit(
    variant: str, quant: str, layers: int, tokens: int, tmp_path: Path
) -> None:
    make_variant(tmp_path, variant)
    params = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    found = []
    for knob, expected in (("false", 0), ("true", layers)):
        config = [f"runtime.native_layers={knob}", f"batching.max_num_batched_tokens={tokens}"]
        with open_llm(tmp_path, *config, quant=quant) as llm:
            assert native(llm) == expected
            whole = llm.generate(PROMPTS, params)
            trimmed = llm.generate(
                PROMPTS, SamplingParams(max_tokens=5, ignore_eos=True, logprobs=2)
            )
            assert llm.engine.runner.rows_trimmed > 0
        found.append(
            [
                (request.prompt_logprobs, request.outputs[0].token_ids, request.outputs[0].logprobs)
                for request in (*whole, *trimmed)
            ]
        )
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "knob", ["attention=sdpa", "runtime.cpu_kernels=off", "runtime.determinism=batch"]
)
def test_other_layers_stay_what_they_are(knob: str, tmp_path: Path) -> None:
    make_variant(tmp_path, "qwen3")
    with open_llm(tmp_path, knob) as llm:
        assert native(llm) == 0
        assert len(llm.generate(PROMPTS, SamplingParams(max_tokens=2))) == len(PROMPTS)


def test_a_profile_sees_the_operators_by_name(tmp_path: Path) -> None:
    make_variant(tmp_path, "qwen3")
    counts = []
    for knob in ("false", "true"):
        with open_llm(tmp_path, f"runtime.native_layers={knob}") as llm:
            llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2))
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU]
            ) as profile:
                llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2, ignore_eos=True))
        names = (event.name for event in profile.events())
        counts.append(Counter(name for name in names if name.startswith("minivllm_cpu::")))
    assert counts[0] == counts[1]
    assert counts[0]["minivllm_cpu::linear"] >= 2 * (3 * 4 + 1)


def test_the_record_says_how_many(tmp_path: Path) -> None:
    make_variant(tmp_path, "qwen3")
    knobs = ["model=hf", f"model.path={tmp_path}", "quant=bf16", "runtime.device=cpu"]
    for knob, layers in (("false", 0), ("true", 3)):
        engine = MinivllmEngine(compose([*knobs, f"runtime.native_layers={knob}"]))
        assert engine.liveness()["runtime"]["native_layers"] == layers
        engine.close()


@pytest.mark.parametrize(
    ("variant", "quant", "whole"),
    [("qwen3", "bf16", True), ("qwen3 tied", "int8", True), ("llama dynamic rope", "bf16", False)],
)
def test_one_object_is_the_forward_pass_where_all_parts_are_native(
    variant: str, quant: str, whole: bool, tmp_path: Path
) -> None:
    make_variant(tmp_path, variant)
    with open_llm(tmp_path, quant=quant) as llm:
        engine = llm.engine
        assert isinstance(engine.runner.model, NativeForward) == whole
        ours = llm.logits(PROMPTS[0])
        engine.runner.model = engine.loaded.model
        assert torch.equal(llm.logits(PROMPTS[0]), ours)
