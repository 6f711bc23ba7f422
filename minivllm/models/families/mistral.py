"""Mistral (Jiang et al. 2023): Llama with a sliding window in every layer, which later versions
dropped."""

from __future__ import annotations

from minivllm.models.families.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral 7B and its successors in the same format; the window is in ModelConfig."""
