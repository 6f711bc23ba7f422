"""Reading config.json in all its spellings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.errors import BadInput
from minivllm.models.config import ModelConfig
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


@given(theta=st.floats(1000, 1e7), llama3=st.booleans(), legacy_type=st.booleans())
def test_old_and_new_rope_spellings_mean_the_same(theta: float, llama3: bool, legacy_type: bool) -> None:
    scaling = {"type" if legacy_type else "rope_type": "llama3", **LLAMA3} if llama3 else None
    old = BASE | {"rope_theta": theta, "rope_scaling": scaling}
    new_parameters = {"rope_theta": theta, "rope_type": "llama3" if llama3 else "default"} | (
        LLAMA3 if llama3 else {}
    )
    assert ModelConfig.from_dict(old) == ModelConfig.from_dict(BASE | {"rope_parameters": new_parameters})


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_both_spellings_of_dtype(key: str) -> None:
    assert ModelConfig.from_dict(BASE | {key: "bfloat16"}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "axial", "factor": 4.0}}, "'axial'.*yarn"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "yarn lacks factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor=0.2 rotates 3 dimensions"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "no sliding_window"),
        ({"layer_types": ["full_attention"]}, "each of the 2 layers"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"head_dim": 15}, "head_dim=15"),
        ({"architectures": None}, "architectures"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(change: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput, match=told) as caught:
        ModelConfig.from_dict(BASE | change, "folder/config.json")
    assert "folder/config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unsupported_architecture_is_told_the_supported_ones() -> None:
    with pytest.raises(BadInput, match=r"GPT2LMHeadModel.*LlamaForCausalLM, Qwen3ForCausalLM"):
        check_architecture("GPT2LMHeadModel")
    for name in supported_architectures():
        assert model_class(name).__name__ == name


def test_config_registry_and_source_do_not_import_torch() -> None:
    code = "import sys, minivllm.models.source, minivllm.models.registry; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2])
