"""The linear layers of a model, with or without a wrapper of a pass."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from minivllm.models.load.loading import LoadedModel


class Wrapper(nn.Module):
    """A module that a pass has put around another."""

    inner: nn.Module


def linear_layers(loaded: LoadedModel) -> Iterator[nn.Module]:
    """The module that multiplies in place of each linear layer of the loaded model; grouped experts
    are left out."""
    for name, module in _unwrapped(loaded.model):
        if name in loaded.linear_inputs:
            yield module


def _unwrapped(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """A module and all modules below it, under the names that they have without wrappers."""
    while isinstance(module, Wrapper):
        module = module.inner
    yield name, module
    for part, child in module.named_children():
        yield from _unwrapped(child, f"{name}.{part}" if name else part)
