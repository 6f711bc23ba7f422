"""Every family through the whole engine, against transformers: cache, chunks, windows, both attention backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM, BadInput, SamplingParams
from tests.reference import FAMILIES, SMALL, VARIANTS, make_checkpoint
from tests.test_llm import assert_equal_but_for_near_ties, reference_tokens, tokens

LONG = [(7 * i + i * i // 5) % 120 + 3 for i in range(44)]  # beyond every window and original context
PROMPTS = [LONG, [9, 8, 7], LONG[:14][::-1], [5]]
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
CASES = [
    *("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3"),
    *("llama linear rope", "llama dynamic rope", "llama llama3 rope", "llama yarn rope", "qwen2 window"),
    *("gemma2 one kv head", "gemma3 one kv head, untied", "phi3 window", "phi3 partial rotary, tied"),
    *("phi3 longrope",),
]
CHUNKED = ["cache.num_blocks=100", "cache.block_size=4", "batching.max_num_batched_tokens=12"]


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint folder and its transformers model."""
    family, overrides = VARIANTS[request.param]
    folder = tmp_path_factory.mktemp("family")
    return folder, make_checkpoint(folder, family, **overrides)


@pytest.mark.parametrize("attention", ["auto", "eager", "sdpa"])
def test_logits_and_greedy_tokens_equal_transformers(saved: tuple[Path, Any], attention: str) -> None:
    folder, model = saved
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    if attention == "sdpa" and capped:
        with pytest.raises(BadInput, match="use attention=eager"):
            LLM(str(folder), device="cpu", quant="fp32", attention="sdpa", overrides=CHUNKED)
        attention = "auto"
    with torch.no_grad():
        expected = model(torch.tensor([LONG])).logits[0]
    with LLM(str(folder), device="cpu", quant="fp32", attention=attention, overrides=CHUNKED) as llm:
        torch.testing.assert_close(llm.logits(LONG), expected, atol=1e-4, rtol=0)
        assert tokens(llm, PROMPTS, GREEDY) == [reference_tokens(model, prompt, 16) for prompt in PROMPTS]
        assert attention in ("auto", llm.engine.runner.attention.name)


def test_dynamic_rope_follows_a_sequence_out_of_its_context(tmp_path: Path) -> None:
    """From a prompt within the original context of 32 to twice its length, whatever was computed before."""
    family, overrides = VARIANTS["llama dynamic rope"]
    model = make_checkpoint(tmp_path, family, **overrides)
    prompts = [LONG[:20], LONG[:40], LONG[:31]]
    with LLM(str(tmp_path), device="cpu", quant="fp32", overrides=CHUNKED) as llm:
        assert llm.engine.max_model_len == 128  # 32, and a factor of 4
        params = SamplingParams(max_tokens=44, ignore_eos=True)
        got = tokens(llm, prompts, params)
        again = tokens(llm, prompts[::-1], params)
    assert got == again[::-1]
    for prompt, ours in zip(prompts, got, strict=True):
        model(
            torch.tensor([[5]])
        )  # a short sequence takes transformers' frequencies back to the original ones
        assert ours == reference_tokens(model, prompt, 44)


def test_the_text_part_of_a_model_that_sees_images(tmp_path: Path) -> None:
    """As Gemma 3 4B and larger are published: other names, other tensors beside them, sizes left to defaults."""
    from transformers import AutoConfig, Gemma3ForConditionalGeneration, SiglipVisionConfig

    text = SMALL | FAMILIES["gemma3_text"]
    sees = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28
    )
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=sees.to_dict(), eos_token_id=[3, 4]
    )
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.15)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor([LONG])).logits[0]
    with LLM(str(tmp_path), device="cpu", quant="fp32", overrides=CHUNKED) as llm:
        torch.testing.assert_close(llm.logits(LONG), expected, atol=1e-4, rtol=0)
        assert llm.engine.loaded.config.eos_token_ids == (3, 4)


def test_a_longrope_sequence_keeps_the_factors_of_its_prompt(tmp_path: Path) -> None:
    """transformers computes the whole sequence anew, with the long factors, when it leaves the context of 32."""
    family, overrides = VARIANTS["phi3 longrope"]
    model = make_checkpoint(tmp_path, family, **overrides)
    prompt = LONG[:25]
    expected = reference_tokens(model, prompt, 16)
    with LLM(str(tmp_path), device="cpu", quant="fp32", overrides=CHUNKED) as llm:
        got = tokens(llm, [prompt], GREEDY)[0]
        assert got[:8] == expected[:8]  # the last of them is chosen after 32 tokens
        # Two places: the frequencies' own, and generate's, which forgets its cache where the context is left.
        model.config.original_max_position_embeddings = 64
        model.model.rotary_emb.config.rope_parameters["original_max_position_embeddings"] = 64
        assert got == reference_tokens(model, prompt, 16)


@pytest.mark.parametrize("case", ["gemma2", "gemma3_text", "mistral", "phi3 partial rotary, tied"])
def test_bf16_tokens_differ_from_transformers_only_at_near_ties(case: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[case]
    saved = make_checkpoint(tmp_path, family, **overrides)
    half = type(saved).from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    with LLM(str(tmp_path), device="cpu", quant="bf16", overrides=CHUNKED) as llm:
        for prompt, ours in zip(PROMPTS, tokens(llm, PROMPTS, GREEDY), strict=True):
            assert_equal_but_for_near_ties(half, prompt, ours)
