"""Helpers that tests share: small random checkpoints by transformers, and the plainest attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.attention.base import AttentionSpec
from minivllm.engine.step import StepBatch

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
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def make_checkpoint(
    folder: Path,
    family: str = "qwen3",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Any:
    """Save a small random model of the family ("qwen3" or "llama") with save_pretrained.

    Every weight is random, norms and biases too, so that a tensor in the wrong place shows.

    Returns:
        The transformers model, in eval mode.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    classes: dict[str, Any] = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }
    config_class, model_class = classes[family]
    config = config_class(**(SMALL | overrides))
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(seed)
    model = model_class(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name else 0.0
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
        prompt_lens_host=lens,
    )


class CausalAttention:
    """Causal attention within each sequence of the batch, in float32, without a cache."""

    name = "reference"

    def __init__(self, specs: list[AttentionSpec]) -> None:
        self.specs = specs

    def prepare(self, batch: StepBatch) -> None:
        """Nothing is shared between layers."""

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: StepBatch) -> Tensor:
        """See AttentionBackend."""
        spec, outputs = self.specs[layer], []
        parts = (x.split(batch.query_lens_host) for x in (q, k, v))
        for one_q, one_k, one_v in zip(*parts, strict=True):
            group = spec.num_heads // spec.num_kv_heads
            queries = one_q.float().transpose(0, 1)
            keys, values = (x.float().transpose(0, 1).repeat_interleave(group, 0) for x in (one_k, one_v))
            scores = queries @ keys.transpose(1, 2) * spec.scale
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            outputs.append((weights @ values).transpose(0, 1).to(q.dtype))
        return torch.cat(outputs)
