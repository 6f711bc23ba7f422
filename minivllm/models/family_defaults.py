"""The defaults of each family's configuration file, and its own keys. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Keys of config.json that only some families have. Other families ignore them.
FLAGS = ("attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob")
SCALES = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
OWN_KEYS = frozenset(
    (
        *FLAGS,
        *SCALES,
        *(
            "hidden_activation",
            "max_window_layers",
            "sliding_window_pattern",
            "_sliding_window_pattern",
        ),
        *("rope_local_base_freq", "num_local_experts", "num_experts", "num_experts_per_tok"),
        *("moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers"),
    )
)


@dataclass(frozen=True)
class Family:
    """How one architecture's config.json is read.

    Attributes:
        keys: the keys of OWN_KEYS that the family has.
        defaults: values of keys that a published file may omit, as transformers has them.
        sections: of a family with M-RoPE, see RopeConfig; where a file omits them.
        interleaved: whether the sections alternate.
    """

    keys: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    sections: tuple[int, ...] = ()
    interleaved: bool = False


_BIAS = {"attention_bias"}
_EXPERTS = {"num_local_experts", "num_experts", "num_experts_per_tok"}
_QWEN_KEYS = {"use_sliding_window", "max_window_layers"}
_QWEN = {
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_MISTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
_GEMMA_KEYS = _BIAS | {"hidden_activation"}
_GEMMA = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_GEMMA2_KEYS = _GEMMA_KEYS | {*SCALES}
_GEMMA2 = _GEMMA | {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA3 = Family(
    frozenset(
        _GEMMA2_KEYS | {"rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"}
    ),
    _GEMMA2
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
)
_SMOLVLM = Family(frozenset(_BIAS | {"mlp_bias"}))
FAMILIES = {
    "LlamaForCausalLM": Family(frozenset(_BIAS | {"mlp_bias"})),
    "Idefics3ForConditionalGeneration": _SMOLVLM,
    "SmolVLMForConditionalGeneration": _SMOLVLM,
    "Qwen2ForCausalLM": Family(frozenset(_QWEN_KEYS), _QWEN),
    "Qwen3ForCausalLM": Family(frozenset(_QWEN_KEYS | _BIAS), _QWEN | {"head_dim": 128}),
    "Qwen3MoeForCausalLM": Family(
        frozenset(
            _QWEN_KEYS
            | _BIAS
            | _EXPERTS
            | {"moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"}
        ),
        _QWEN
        | {
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
    "MistralForCausalLM": Family(frozenset(), _MISTRAL | {"sliding_window": 4096}),
    "MixtralForCausalLM": Family(
        frozenset(_EXPERTS),
        _MISTRAL
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
    ),
    "GemmaForCausalLM": Family(frozenset(_GEMMA_KEYS), _GEMMA),
    "Gemma2ForCausalLM": Family(
        frozenset(_GEMMA2_KEYS),
        _GEMMA2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Qwen2_5_VLForConditionalGeneration": Family(
        frozenset(_QWEN_KEYS),
        _QWEN | {"max_window_layers": 80, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        (16, 24, 24),
    ),
    "Qwen3VLForConditionalGeneration": Family(
        frozenset(_BIAS),
        {"head_dim": 128, "max_position_embeddings": 128000, "rope_theta": 5e5},
        (24, 20, 20),
        interleaved=True,
    ),
    "Phi3ForCausalLM": Family(
        frozenset(),
        {
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
    ),
}
# Of a file that names no architecture, or the base model that AutoModel saves.
BY_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "phi3": "Phi3ForCausalLM",
    "idefics3": "Idefics3ForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
}
