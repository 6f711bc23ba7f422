"""Helpers that tests share: small random checkpoints by transformers, and the plainest
attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.attention.base import StepBatch
from minivllm.cache.spec import AttentionSpec

SMALL = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
PROMPTS = [
    list(range(3, 40)),
    [9, 8, 7],
    [5],
    list(range(60, 120, 2)),
    [11, 12, 13, 14, 15, 16, 17],
]
# Half of these prompts begin with the same tokens.
_SHARED = [7, 3, 99, 12, 55, 31, 8, 64, 90, 11, 2, 45, 70, 29, 83, 5, 18]
SHARING_PROMPTS = [
    [5, 17, 3, 99, 42, 8],
    [*_SHARED, 4],
    [9, 4, 30] * 9,
    [*_SHARED, 66, 13, 21],
    [1],
    [*_SHARED, 4, 40],
]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
# Each family, and what sets it apart, at a size where it matters: windows shorter than the prompts,
# caps that bite.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 7},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {
        "sliding_window": 7,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "sliding_window": 7,
        "query_pre_attn_scalar": 24,
        "rope_parameters": TWO_ROPES,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "mixtral": {"num_local_experts": 4, "sliding_window": 7},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "phi3": {"hidden_size": 64},  # its heads are always hidden_size / heads wide
}
# What a published configuration of a family may say, beside the family itself. name -> (family,
# overrides)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama linear rope": (
        "llama",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
    "llama dynamic rope": (
        "llama",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
    "llama llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 1e-5}),
    "llama yarn rope": ("llama", {"rope_parameters": YARN_ROPE}),
    "llama yarn mscale": (
        "llama",
        {"rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False}},
    ),
    "qwen2 one kv head": ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2 window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen2 yarn rope": ("qwen2", {"rope_parameters": YARN_ROPE, "max_position_embeddings": 32}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 one kv head": ("qwen3", {"num_key_value_heads": 1}),
    "qwen3 wide heads": ("qwen3", {"head_dim": 32}),
    "qwen3 attention bias": ("qwen3", {"attention_bias": True}),
    "qwen3 window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "mistral no window": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "mistral window beyond the context": ("mistral", {"sliding_window": 4096}),
    "gemma one kv head": ("gemma", {"num_key_value_heads": 1, "head_dim": 32}),
    "gemma untied, biases": ("gemma", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma2 no caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2 one kv head": ("gemma2", {"num_key_value_heads": 1, "head_dim": 32}),
    "gemma3 one kv head, untied": (
        "gemma3_text",
        {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": False},
    ),
    "gemma3 capped logits": ("gemma3_text", {"final_logit_softcapping": 2.0}),
    "phi3 window": ("phi3", {"sliding_window": 7}),
    "phi3 partial rotary, tied": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
            },
            "tie_word_embeddings": True,
        },
    ),
    "phi3 longrope": (
        "phi3",
        {
            "rope_parameters": LONG_ROPE | {"partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 32,
        },
    ),
}


def make_checkpoint(
    folder: Path,
    family: str = "qwen3",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Any:
    """Save a small random model of a family (one of FAMILIES) with save_pretrained.

    Every weight is random, norms and biases too, so that a tensor in the wrong place shows.

    Returns:
        The transformers model, in eval mode, with its plain attention.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **(SMALL | FAMILIES[family] | overrides))
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    ones = not family.startswith("gemma")  # whose norms scale by 1 + weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name and ones else 0.0
            parameter.copy_(torch.empty(parameter.shape).normal_(mean, 0.15, generator=generator))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def make_batch(sequences: list[list[int]]) -> StepBatch:
    """A prefill of whole sequences, for backends without a cache."""
    lens = tuple(len(sequence) for sequence in sequences)
    starts = torch.tensor([0, *lens]).cumsum(0)
    return StepBatch(
        token_ids=torch.tensor([token for sequence in sequences for token in sequence]),
        positions=torch.cat([torch.arange(n) for n in lens]),
        slot_mapping=torch.arange(sum(lens)),
        query_start_loc=starts.int(),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        block_table=torch.zeros(len(lens), 1, dtype=torch.int32),
        logit_rows=starts[1:] - 1,
        query_lens_host=lens,
        seq_lens_host=lens,
        rotated_lens_host=lens,
    )


class CausalAttention:
    """Causal attention within each sequence of the batch, with window and soft cap, in float32,
    without a cache."""

    name = "reference"

    def __init__(self, specs: list[AttentionSpec]) -> None:
        self.specs = specs

    def prepare(self, batch: StepBatch) -> None:
        """Nothing is shared between layers."""

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: StepBatch) -> Tensor:
        spec, outputs = self.specs[layer], []
        parts = (x.split(batch.query_lens_host) for x in (q, k, v))
        for one_q, one_k, one_v in zip(*parts, strict=True):
            group = spec.num_heads // spec.num_kv_heads
            queries = one_q.float().transpose(0, 1)
            keys, values = (
                x.float().transpose(0, 1).repeat_interleave(group, 0) for x in (one_k, one_v)
            )
            scores = queries @ keys.transpose(1, 2) * spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            if spec.window is not None:
                mask = mask.triu(1 - spec.window)
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            outputs.append((weights @ values).transpose(0, 1).to(q.dtype))
        return torch.cat(outputs)
