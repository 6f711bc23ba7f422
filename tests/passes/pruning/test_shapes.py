"""The architecture of a pruned model."""

from __future__ import annotations

from typing import Any

import pytest

from minivllm.errors import BadInput
from minivllm.models.config import FULL, SLIDING, ModelConfig
from minivllm.passes.pruning.options import (
    LayerPruningOptions,
    MagnitudeOptions,
    WandaOptions,
    WidthPruningOptions,
)
from minivllm.passes.pruning.shapes import pruned_config, without_layers

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
MIXTURE = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def test_layers() -> None:
    assert pruned_config(LayerPruningOptions(num_layers=3), LLAMA)["num_hidden_layers"] == 1
    assert "layer_types" not in without_layers(LLAMA, [1, 3])


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 8},
        {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 8, "sliding_window_pattern": 3},
        {
            "architectures": ["Qwen2ForCausalLM"],
            **{"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        },
        {
            "architectures": ["LlamaForCausalLM"],
            **{"layer_types": [SLIDING, FULL, FULL, SLIDING], "sliding_window": 8},
        },
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {"layer_types": [FULL, SLIDING, FULL, SLIDING], "sliding_window": 8},
        },
        {"text_config": {"layer_types": [FULL] * 4}},
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            **{"decoder_sparse_step": 2, "mlp_only_layers": [3]},
        },
    ],
)
def test_layers_that_stay_keep_their_kind(config: dict[str, Any]) -> None:
    """Their windows and experts, which a family's rule gives by the place of a layer."""
    whole = ModelConfig.from_dict({**LLAMA, **config})
    kept = [1, 3]
    pruned = ModelConfig.from_dict(without_layers({**LLAMA, **config}, kept))
    assert pruned.windows == tuple(whole.windows[layer] for layer in kept)
    assert pruned.layer_types == tuple(whole.layer_types[layer] for layer in kept)
    dense = [layer in whole.dense_layers for layer in kept]
    assert [at in pruned.dense_layers for at in range(2)] == dense


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (LayerPruningOptions(layers=(4,)), "layers 0 to 3"),
        (LayerPruningOptions(num_layers=4), "leave none"),
        (WidthPruningOptions(mlp=0.01), "leave nothing out"),
    ],
)
def test_what_does_not_fit_is_said(options: object, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        pruned_config(options, LLAMA)


def test_widths_are_multiples_of_32_and_whole_groups() -> None:
    pruned = pruned_config(WidthPruningOptions(mlp=0.3, heads=0.6), LLAMA)
    sizes = ("intermediate_size", "num_key_value_heads", "num_attention_heads", "head_dim")
    assert [pruned[name] for name in sizes] == [128, 2, 4, 8]


@pytest.mark.parametrize("options", [WidthPruningOptions(), WandaOptions()])
def test_experts_are_neither_narrowed_nor_weighed(options: object) -> None:
    with pytest.raises(BadInput, match="has experts"):
        pruned_config(options, MIXTURE)


def test_masks_change_no_size() -> None:
    assert pruned_config(MagnitudeOptions(), MIXTURE) == MIXTURE
    assert pruned_config(object(), LLAMA) == LLAMA  # a class of the user's own
