"""The names of tensors in checkpoints of different makers, mapped to those of the models here. Free
of torch.

A model's own names are `model.embed_tokens`, `model.layers.N...`, `model.norm` and `lm_head`, an
expert's `mlp.experts.N.gate_proj`. Checkpoints differ in the prefix (none in a base model, the part
of a model with images, the wrapper of a training loop), in Mixtral's names, and in whether the
experts of a layer are one tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.errors import BadInput

if TYPE_CHECKING:
    from minivllm.models.layers import Linear

_BEFORE = r"((?:(?:module|model|language_model|text_model)\.)*)"
# Tower and connector of a model with images, whose own names begin with "vision.".
_VISION = re.compile(
    r"(?:module\.)?(?:model\.)?"
    r"((?:vision_model|connector|visual|vision_tower|multi_modal_projector)\..+)"
)
_EMBEDDING = re.compile(rf"{_BEFORE}embed_tokens\.weight")
_HEAD = re.compile(rf"{_BEFORE}lm_head\.(.+)")
_COMPILED = "_orig_mod."  # prefix of torch.compile
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_EXPERT = re.compile(r"(.+\.mlp\.experts\.\d+\.)(w[123])(\..+)")
# Tensors [experts, rows, columns] of all experts of a layer, and the matrices that their rows hold.
_FUSED = {
    ".mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    ".mlp.experts.down_proj": ("down_proj",),
}
_MOST_EXPERTS = 1 << 18  # most matrices of experts in one checkpoint


def with_model_names(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors by the model's names.

    Parts of a model with images that are neither its language model nor its vision are left out.
    The experts of a fused tensor are parts of its bytes.

    Raises:
        BadInput: two tensors have the same place.
    """
    plain = [(name.replace(_COMPILED, ""), tensor) for name, tensor in tensors.items()]
    prefixes = [match[1] for name, _ in plain if (match := _EMBEDDING.fullmatch(name))]
    prefix = "model." if not prefixes or "model." in prefixes else prefixes[0]
    named: dict[str, StoredTensor] = {}
    for name, tensor in plain:
        if head := _HEAD.fullmatch(name):
            name = f"lm_head.{head[2]}"
        elif vision := _VISION.fullmatch(name):
            name = f"vision.{vision[1]}"
        elif name.startswith(prefix):
            name = _of_expert(f"model.{name.removeprefix(prefix)}")
        elif "language_model." in prefix or "text_model." in prefix:
            continue
        for own, part in _parts(name, tensor):
            if own in named:
                raise BadInput(
                    f"{tensor.file.parent}: tensors {named[own].name} and {tensor.name} are both "
                    f"{own}: remove the one that is not the model's"
                )
            named[own] = part
            if len(named) > len(tensors) + _MOST_EXPERTS:
                raise BadInput(
                    f"{tensor.file}: tensor {tensor.name} has more experts than any model"
                )
    return named


def own_name(name: str) -> str:
    """The model's name for a parameter of transformers' model, which is not compiled."""
    if vision := _VISION.fullmatch(name):
        return f"vision.{vision[1]}"
    for part in ("model.text_model.", "model.language_model."):
        if name.startswith(part):
            return f"model.{name.removeprefix(part)}"
    return name


def published_name(name: str, architecture: str) -> str:
    """What checkpoints of an architecture call the tensor of a text model that has this name."""
    if architecture != "MixtralForCausalLM" or ".mlp." not in name:
        return name
    inner = {own: published for published, own in _MIXTRAL.items()}
    parts = name.replace(".mlp.", ".block_sparse_moe.").split(".")
    return ".".join(inner.get(part, part) for part in parts)


def _of_expert(name: str) -> str:
    """The other families' names for Mixtral's mixtures and their matrices."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    match = _EXPERT.fullmatch(name)
    return f"{match[1]}{_MIXTRAL[match[2]]}{match[3]}" if match else name


def _parts(name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """A tensor under its name, or the matrices of each expert if it holds all experts of a
    layer."""
    suffix = next((suffix for suffix in _FUSED if name.endswith(suffix)), None)
    size, pieces = tensor.end - tensor.begin, _FUSED[suffix] if suffix else ()
    # The bytes bound the number of parts, even if an unknown format has a wrong shape.
    if (
        not pieces
        or len(tensor.shape) != 3
        or not size
        or not _divides(tensor.shape, len(pieces), size)
    ):
        yield name, tensor
        return
    experts, rows, columns = tensor.shape
    each = size // (experts * len(pieces))
    start = tensor.begin
    for expert in range(experts):
        for piece in pieces:
            own = f"{name.rpartition('.')[0]}.{expert}.{piece}.weight"
            yield (
                own,
                replace(
                    tensor, shape=(rows // len(pieces), columns), begin=start, end=start + each
                ),
            )
            start += each


def _divides(shape: tuple[int, ...], pieces: int, size: int) -> bool:
    """Whether rows and bytes of a tensor [experts, rows, columns] split evenly into every expert's
    matrices."""
    return shape[0] > 0 and shape[1] % pieces == 0 and size % (shape[0] * pieces) == 0


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor: bytes [begin, end) of the file."""

    file: Path
    name: str  # in the file
    dtype: str  # the format's name, e.g. "BF16"
    shape: tuple[int, ...]
    begin: int
    end: int


def part_names(path: str, module: Linear) -> list[str]:
    """The checkpoint's names of the parts of a fused layer."""
    beside = path.rpartition(".")[0]
    return [f"{beside}.{part}" if beside else part for part in module.parts]
