"""A loaded model as named tensors and JSON, and back."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from minivllm.kernels.cpu.library import Kernels
from minivllm.kernels.cpu.linear import PanelLinear
from minivllm.models.cpu_layers import share_packed
from minivllm.models.families.llama import LlamaForCausalLM
from minivllm.models.load.packed_cache.file import can_write
from minivllm.quant.base import frozen

_EMBEDDING = "model.embed_tokens.weight"


class CannotKeep(Exception):
    """A model has a part that has no place in a file of packed weights."""


@dataclass(frozen=True)
class Parts:
    """The weights of a model.

    Attributes:
        tensors: by the names that they have in the model; an embedding that is the head is left
            out.
        facts: `PanelLinear.facts` of each linear layer, by the layer's name.
        is_tied: whether the embedding is the head.
    """

    tensors: dict[str, Tensor]
    facts: dict[str, dict[str, Any]]
    is_tied: bool

    @property
    def looked_up(self) -> tuple[str, ...]:
        """Tensors of which a step reads some rows."""
        return () if self.is_tied else (_EMBEDDING,)


def parts_of(model: LlamaForCausalLM, linears: Collection[str]) -> Parts:
    """The weights of a loaded model, which share its memory.

    Args:
        model: loaded.
        linears: names of its linear layers.

    Raises:
        CannotKeep: a linear layer is no PanelLinear, or a tensor has no place in a file.
    """
    head = model.lm_head
    is_tied = isinstance(head, PanelLinear) and model.model.embed_tokens.weight is head.weight
    tensors: dict[str, Tensor] = {}
    facts: dict[str, dict[str, Any]] = {}
    for path, module in model.named_modules():
        if isinstance(module, PanelLinear):
            facts[path] = {name: getattr(module, name) for name in module.facts}
        elif path in linears:
            raise CannotKeep(f"{path} is {type(module).__name__}")
        if is_tied and module is model.model.embed_tokens:
            continue
        for name, tensor in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ):
            tensors[f"{path}.{name}"] = tensor
            if not can_write(tensor):
                raise CannotKeep(f"{path}.{name} is {tensor.dtype}, {tensor.layout}")
    return Parts(tensors, facts, is_tied)


def put_parts(
    model: LlamaForCausalLM, parts: Parts, linears: Collection[str], kernels: Kernels
) -> None:
    """Give a model on the meta device its weights.

    Args:
        model: is changed only if the parts are all of its weights.
        parts: of another model of the same configuration.
        linears: names of its linear layers.
        kernels: that the layers multiply with.

    Raises:
        ValueError: these are not the parts of the model.
    """
    by_module: dict[str, dict[str, Tensor]] = {}
    for name, tensor in parts.tensors.items():
        path, _, own = name.rpartition(".")
        by_module.setdefault(path, {})[own] = tensor
    layers = {
        path: PanelLinear.again(kernels, by_module.pop(path), facts)
        for path, facts in parts.facts.items()
    }
    values = {f"{path}.{own}": t for path, part in by_module.items() for own, t in part.items()}
    wanted = {name: p.shape for name, p in model.named_parameters()}
    if parts.is_tied:
        del wanted[_EMBEDDING]
    if layers.keys() != {*linears} or {name: t.shape for name, t in values.items()} != wanted:
        raise ValueError("the file does not have all tensors of the model")
    for path, layer in layers.items():
        model.set_submodule(path, layer)
    for name, tensor in values.items():
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, frozen(tensor))
    if parts.is_tied:
        share_packed(model.model.embed_tokens, layers["lm_head"], kernels)
