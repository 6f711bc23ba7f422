"""What a model's activations say of its layers, channels and heads, over calibration text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.engine.engine import Engine
from minivllm.extras.scoring import sequence_logits


@dataclass(frozen=True)
class Statistics:
    """Of the tokens of the calibration text.

    Attributes:
        num_tokens: their number.
        cosines: float64 [layers + 1, layers + 1]: mean cosine of the hidden state before layer i
            and before layer j (the last: after the last layer).
        angles: the same, of the angles as a share of a half turn.
        norms: root of the sum of squares of each input of each linear layer, float32 [in], by the
            layer's name in the model.
    """

    num_tokens: int
    cosines: Tensor
    angles: Tensor
    norms: dict[str, Tensor]

    def block_influence(self) -> list[float]:
        """How much each layer turns the hidden state: 1 minus the cosine of before and after."""
        return (1 - self.cosines.diagonal(1)).tolist()

    def quietest_run(self, count: int) -> list[int]:
        """The `count` layers in a row that turn the hidden state least as a whole."""
        distances = self.angles.diagonal(count)
        first = int(distances.argmin())
        return list(range(first, first + count))


def measure(engine: Engine, sequences: Sequence[list[int]]) -> Statistics:
    """Compute sequences with a whole model whose layers are modules of their own (no fused or
    native layers), and sum up its activations.

    Args:
        engine: serves nothing else.
        sequences: token ids of each.
    """
    layers = list(engine.loaded.model.model.layers)
    size = len(layers) + 1
    cosines, angles = (torch.zeros(size, size, dtype=torch.float64) for _ in range(2))
    squares: dict[str, Tensor] = {}
    count = 0
    for token_ids in sequences:
        with _listening(engine.loaded.model, layers, squares) as hidden:
            sequence_logits(engine, token_ids)
        # [layers + 1, tokens, hidden], of unit length
        states = torch.stack([torch.cat(parts) for parts in hidden])
        states = nn.functional.normalize(states.double(), dim=-1)
        near = torch.einsum("ith,jth->ijt", states, states).clamp(-1, 1)
        cosines += near.sum(-1)
        angles += (near.acos() / math.pi).sum(-1)
        count += len(token_ids)
    norms = {name: total.sqrt().float() for name, total in squares.items()}
    return Statistics(count, cosines / count, angles / count, norms)


@contextmanager
def _listening(
    model: nn.Module, layers: list[nn.Module], squares: dict[str, Tensor]
) -> Iterator[list[list[Tensor]]]:
    """The hidden states before each layer and after the last, in the chunks of the steps; and the
    sums of squares of the inputs of the layers' linear layers, added to `squares`."""
    hidden: list[list[Tensor]] = [[] for _ in range(len(layers) + 1)]
    handles = []

    def before(index: int) -> Any:
        return lambda module, inputs: hidden[index].append(inputs[0].detach().cpu())

    def squared(name: str) -> Any:
        def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            total = inputs[0].double().square().flatten(0, -2).sum(0).cpu()
            squares[name] = squares.get(name, 0) + total

        return add

    for index, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(before(index)))
    handles.append(
        layers[-1].register_forward_hook(
            lambda module, inputs, output: hidden[-1].append(output.detach().cpu())
        )
    )
    for name, module in model.named_modules():
        if name.startswith("model.layers.") and name.rpartition(".")[2].endswith("_proj"):
            handles.append(module.register_forward_pre_hook(squared(name)))
    try:
        yield hidden
    finally:
        for handle in handles:
            handle.remove()
