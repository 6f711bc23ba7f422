"""Where the classes of each architecture are. Imports no torch until a class is requested."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from minivllm.errors import BadInput

if TYPE_CHECKING:
    from minivllm.models.families.llama import LlamaForCausalLM


class Vision(NamedTuple):
    """How a family sees: its classes, as module.Class below models/vision, and what checkpoints
    call its language model."""

    processor: str
    tower: str
    text: str = "language_model"


_SMOLVLM = Vision("smolvlm_processor.SmolVLMProcessor", "smolvlm.SmolVLMTower", "text_model")
# By architecture, for those whose models take images.
VISION = {
    "Idefics3ForConditionalGeneration": _SMOLVLM,
    "SmolVLMForConditionalGeneration": _SMOLVLM,
    "Qwen2_5_VLForConditionalGeneration": Vision(
        "qwen_processor.Qwen2_5_VLProcessor", "qwen2_5_vl.Qwen2_5_VLTower"
    ),
    "Qwen3VLForConditionalGeneration": Vision(
        "qwen_processor.Qwen3VLProcessor", "qwen3_vl.Qwen3VLTower"
    ),
}
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


def sees(architecture: str) -> bool:
    """Whether models of the architecture take images here."""
    return architecture in VISION


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
