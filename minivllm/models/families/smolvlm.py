"""The language models of SmolVLM, SmolVLM2 and Idefics3, which are Llamas; their towers are in
models/vision/."""

from __future__ import annotations

from minivllm.models.families.llama import LlamaForCausalLM


class Idefics3ForConditionalGeneration(LlamaForCausalLM):
    """Idefics3 8B (Laurençon et al. 2024), and SmolVLM 256M to 2.2B."""


class SmolVLMForConditionalGeneration(LlamaForCausalLM):
    """SmolVLM2 256M to 2.2B (Marafioti et al. 2025)."""
