"""Reading config.json in all its spellings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.errors import BadInput
from minivllm.models.config import ModelConfig
from minivllm.models.family_defaults import FAMILIES
from minivllm.models.registry import check_architecture, model_class, supported_architectures
from minivllm.models.rope_config import RopeConfig

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_what_is_absent_takes_the_format_s_defaults() -> None:
    config = ModelConfig.from_dict(BASE)
    assert (config.head_dim, config.num_kv_heads) == (16, 4)
    assert config.rope == RopeConfig(10000.0)
    assert config.eos_token_ids == ()
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(("given_eos", "ids"), [(7, (7,)), ([7, 8], (7, 8)), (None, ()), (0, (0,))])
def test_end_of_sequence_is_one_id_or_several(given_eos: Any, ids: tuple[int, ...]) -> None:
    assert ModelConfig.from_dict(BASE | {"eos_token_id": given_eos}).eos_token_ids == ids


def small(architecture: str) -> dict[str, Any]:
    """BASE for any family; the sections of M-RoPE fit its heads."""
    base = BASE | {"architectures": [architecture], "num_key_value_heads": 2}
    if not FAMILIES[architecture].sections:
        return base
    pairs = FAMILIES[architecture].defaults.get("head_dim", 16) // 2
    rope = {"rope_type": "default", "mrope_section": [pairs - 6, 3, 3]}
    return base | {"rope_parameters": rope}


ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 16,
        "truncate": False,
    },
    "llama3": LLAMA3,
    "longrope": {
        "short_factor": [1.0] * 8,
        "long_factor": [2] * 8,
        "original_max_position_embeddings": 512,
    },
}


@given(theta=st.floats(1000, 1e7), kind=st.sampled_from(sorted(ROPES)), legacy_type=st.booleans())
def test_old_and_new_rope_spellings_mean_the_same(
    theta: float, kind: str, legacy_type: bool
) -> None:
    scaling = {"type" if legacy_type else "rope_type": kind, **ROPES[kind]}
    old = BASE | {"rope_theta": theta, "rope_scaling": None if kind == "default" else scaling}
    new = BASE | {"rope_parameters": {"rope_theta": theta, "rope_type": kind, **ROPES[kind]}}
    assert ModelConfig.from_dict(old) == ModelConfig.from_dict(new)
    assert ModelConfig.from_dict(new).rope.kind == kind


def test_gemma_3_has_two_ropes_in_both_spellings() -> None:
    gemma = BASE | {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7, "head_dim": 16}
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = gemma | {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": scaling}
    new = gemma | {
        "rope_parameters": {
            "full_attention": {"rope_theta": 5e5, **scaling},
            "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"},
        }
    }
    config = ModelConfig.from_dict(old)
    assert config == ModelConfig.from_dict(new)
    assert config.rope == RopeConfig(5e5, "linear", {"factor": 8.0})
    assert config.local_rope == RopeConfig(2e4)
    assert config.max_position_embeddings == 131072  # which is the limit after scaling
    assert [window is None for window in config.windows] == [False] * 5 + [True, False]


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 4096),
        ({"rope_type": "dynamic", "factor": 2.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 1024),
        ({"rope_type": "llama3", **LLAMA3}, 1024),
    ],
)
def test_scaling_lengthens_the_context(rope: dict[str, Any], limit: int) -> None:
    config = BASE | {"max_position_embeddings": 1024, "rope_scaling": rope}
    assert ModelConfig.from_dict(config).max_position_embeddings == limit


W = 100
QWEN = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": W, "max_window_layers": 2}


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": W}, [W, W, W, W]),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, [None] * 4),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 131072}, [None] * 4),
        ({"architectures": ["Phi3ForCausalLM"], "sliding_window": W}, [W, W, W, W]),
        (QWEN, [None] * 4),
        (QWEN | {"use_sliding_window": True}, [None, None, W, W]),
        (
            QWEN
            | {
                "use_sliding_window": True,
                "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            },
            [None, W, W, None],
        ),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": W}, [W, None, W, None]),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "sliding_window": W,
                "sliding_window_pattern": 3,
            },
            [W, W, None, W],
        ),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": W}, [None] * 4),
    ],
)
def test_which_layers_have_a_window(config: dict[str, Any], windows: list[int | None]) -> None:
    read = ModelConfig.from_dict(BASE | {"num_hidden_layers": 4, "num_key_value_heads": 2} | config)
    assert list(read.windows) == windows


@pytest.mark.parametrize("architecture", supported_architectures())
def test_what_a_family_leaves_out_is_what_transformers_takes(architecture: str) -> None:
    import transformers

    published = small(architecture)
    filled = getattr(transformers, architecture).config_class.from_dict(
        {"text_config": published} if "Conditional" in architecture else published
    )
    whole = filled.to_dict() | {"architectures": [architecture]}
    ours, theirs = (
        replace(ModelConfig.from_dict(c), eos_token_ids=(), dtype=None) for c in (published, whole)
    )
    assert ours == theirs


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_both_spellings_of_dtype(key: str) -> None:
    assert ModelConfig.from_dict(BASE | {key: "bfloat16"}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "axial", "factor": 4.0}}, "'axial'.*yarn"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": "4"}},
            r"rope_scaling\.factor='4' must be a number",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "linear lacks factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor=0.2 rotates 3 dimensions"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "no sliding_window"),
        ({"layer_types": ["full_attention"]}, "each of the 2 layers"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"head_dim": 15}, "head_dim=15"),
        (
            {"rope_scaling": {**ROPES["longrope"], "type": "longrope", "long_factor": [2.0]}},
            "8 numbers",
        ),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "short_factor, long_factor"),
        ({"architectures": None}, "architectures"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        ModelConfig.from_dict(BASE | change, "folder/config.json")
    assert "folder/config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unsupported_architecture_is_told_the_supported_ones() -> None:
    with pytest.raises(BadInput, match=r"GPT2LMHeadModel.*LlamaForCausalLM.*Qwen3ForCausalLM"):
        check_architecture("GPT2LMHeadModel")
    for name in supported_architectures():
        assert model_class(name).__name__ == name
