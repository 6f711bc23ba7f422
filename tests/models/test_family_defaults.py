"""Every family through the whole engine, against transformers: cache, chunks, windows, both
attention backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM, BadInput, SamplingParams
from tests.reference import FAMILIES, SMALL, VARIANTS, make_checkpoint
from tests.test_llm import assert_equal_but_for_near_ties, reference_tokens, tokens

# beyond every window and original context
LONG = [(7 * i + i * i // 5) % 120 + 3 for i in range(44)]
PROMPTS = [LONG, [9, 8, 7], LONG[:14][::-1], [5]]
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
CASES = [
    *("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3"),
    *(
        "llama linear rope",
        "llama dynamic rope",
        "llama llama3 rope",
        "llama yarn rope",
        "qwen2 window",
    ),
    *(
        "gemma2 one kv head",
        "gemma3 one kv head, untied",
        "phi3 window",
        "phi3 partial rotary, tied",
    ),
    *("phi3 longrope",),
]
CHUNKED = ["cache.num_blocks=100", "cache.block_size=4", "batching.max_num_batched_tokens=12"]


@pytest.fixture(scope="module", params=CASES)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """A checkpoint folder and its transformers model."""
    family, overrides = VARIANTS[request.param]
    folder = tmp_path_factory.mktemp("family")
    return folder, make_checkpoint(folder, family, **overrides)


@pytest.mark.parametrize("attention", ["auto", "eager", "sdpa"])
def test_logits_and_greedy_tokens_equal_transformers(
    saved: tuple[Path, Any], attention: str
) -> None:
    folder, model = saved
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    if attention == "sdpa" and capped:
        with pytest.raises(BadInput, match="use attention=eager"):
            LLM(str(folder), device="cpu", quant="fp32", attention="sdpa", overrides=CHUNKED)
        attention = "auto"
    with torch.no_grad():
        expected = model(torch.tensor([LONG])).logits[0]
    with LLM(
        str(folder), device="cpu", quant="fp32", attention=attention, overrides=CHUNKED
    ) as llm:
        torch.testing.assert_close(llm.logits(LONG), expected, atol=1e-4, rtol=0)
        assert tokens(llm, PROMPTS, GREEDY) == [
            reference_tokens(model, prompt, 16) for prompt in PROMPTS
        ]
        assert attention in ("auto", llm.engine.runner.attention.name)


def test_dynamic_rope_follows_a_sequence_out_of_its_context(tmp_path: Path) -> None:
    """From a prompt within the original context of 32 to twice its length, whatever was computed
    before."""
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
    """As Gemma 3 4B and larger are published: other names, other tensors beside them, sizes left to
    defaults."""
    from transformers import AutoConfig, Gemma3ForConditionalGeneration, SiglipVisionConfig

    text = SMALL | FAMILIES["gemma3_text"]
    sees = SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
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


# at different steps, from the start, never
LEAVING = [LONG[:25], LONG[:31], LONG[:32], LONG[:40], [5]]


@pytest.mark.parametrize(
    "overrides",
    [
        CHUNKED,
        ["cache.num_blocks=100", "batching=static"],
        ["cache.num_blocks=100", "batching.chunked_prefill=false"],
        ["cache.num_blocks=30", "cache.block_size=4", "batching.max_num_batched_tokens=12"],
        [
            *(
                "cache.num_blocks=30",
                "cache.block_size=4",
                "batching.preemption=swap",
                "cache.swap_space_gb=0.01",
            ),
            "batching.max_num_batched_tokens=12",
        ],
        ["cache.num_blocks=60", "cache.block_size=4", "batching.preemption=reserve"],
        [*CHUNKED, "runtime.overlap=true"],
        ["cache=none"],
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_a_longrope_sequence_that_leaves_its_context_is_computed_anew(
    overrides: list[str], tmp_path: Path
) -> None:
    family, changes = VARIANTS["phi3 longrope"]  # the original context has 32 tokens
    model = make_checkpoint(tmp_path, family, **changes)
    expected = [reference_tokens(model, prompt, 16) for prompt in LEAVING]
    with LLM(str(tmp_path), device="cpu", quant="fp32", overrides=overrides) as llm:
        assert tokens(llm, LEAVING, GREEDY) == expected
        assert llm.engine.scheduler.num_preemptions >= 3
        assert tokens(llm, [LONG[:17]], GREEDY)[0] == reference_tokens(
            model, LONG[:17], 16
        )  # 33rd: never read


def test_samples_and_beams_leave_the_context_as_each_alone_would(tmp_path: Path) -> None:
    family, changes = VARIANTS["phi3 longrope"]
    model = make_checkpoint(tmp_path, family, **changes)
    with LLM(str(tmp_path), device="cpu", quant="fp32", overrides=CHUNKED) as llm:
        both = llm.generate([LONG[:25]], SamplingParams(max_tokens=16, n=3, ignore_eos=True))[
            0
        ].outputs
        assert {tuple(one.token_ids) for one in both} == {
            tuple(reference_tokens(model, LONG[:25], 16))
        }
        params = SamplingParams(max_tokens=12, beam_width=3, ignore_eos=True)
        ours = llm.generate([LONG[:25]], params)[0].outputs[0].token_ids
    theirs = model.generate(
        torch.tensor([LONG[:25]]),
        max_new_tokens=12,
        num_beams=3,
        do_sample=False,
        eos_token_id=None,
        use_cache=False,
    )
    assert ours == theirs[0, 25:].tolist()


@pytest.mark.parametrize("case", ["gemma2", "gemma3_text", "mistral", "phi3 partial rotary, tied"])
def test_bf16_tokens_differ_from_transformers_only_at_near_ties(case: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[case]
    saved = make_checkpoint(tmp_path, family, **overrides)
    half = type(saved).from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    with LLM(str(tmp_path), device="cpu", quant="bf16", overrides=CHUNKED) as llm:
        for prompt, ours in zip(PROMPTS, tokens(llm, PROMPTS, GREEDY), strict=True):
            assert_equal_but_for_near_ties(half, prompt, ours)
