"""The class of each architecture. Imports no torch until a class is requested."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from minivllm.errors import BadInput

if TYPE_CHECKING:
    from minivllm.models.families.llama import LlamaForCausalLM

_ARCHITECTURES = {
    "Qwen2_5_VLForConditionalGeneration": "minivllm.models.families.qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "minivllm.models.families.qwen3_vl",
    "Gemma2ForCausalLM": "minivllm.models.families.gemma2",
    "Gemma3ForCausalLM": "minivllm.models.families.gemma3",
    "Gemma3ForConditionalGeneration": "minivllm.models.families.gemma3",
    "GemmaForCausalLM": "minivllm.models.families.gemma",
    "Idefics3ForConditionalGeneration": "minivllm.models.families.smolvlm",
    "LlamaForCausalLM": "minivllm.models.families.llama",
    "MistralForCausalLM": "minivllm.models.families.mistral",
    "MixtralForCausalLM": "minivllm.models.families.mixtral",
    "Phi3ForCausalLM": "minivllm.models.families.phi3",
    "Qwen2ForCausalLM": "minivllm.models.families.qwen2",
    "Qwen3ForCausalLM": "minivllm.models.families.qwen3",
    "Qwen3MoeForCausalLM": "minivllm.models.families.qwen3_moe",
    "SmolVLMForConditionalGeneration": "minivllm.models.families.smolvlm",
}


def supported_architectures() -> tuple[str, ...]:
    """Names that a config.json may give as its architecture."""
    return tuple(sorted(_ARCHITECTURES))


def check_architecture(architecture: str, where: str = "config.json") -> None:
    """Raises BadInput, naming the supported ones, if no class builds the architecture."""
    if architecture not in _ARCHITECTURES:
        raise BadInput(
            f"{where}: architecture {architecture} is not supported; supported: "
            f"{', '.join(supported_architectures())}"
        )


def model_class(architecture: str) -> type[LlamaForCausalLM]:
    """The class that builds the architecture; imports it (and torch) on the first call."""
    check_architecture(architecture)
    family: type[LlamaForCausalLM] = getattr(
        import_module(_ARCHITECTURES[architecture]), architecture
    )
    return family
