"""The protocol of a pass, how passes are applied, and the linear layers that they may wrap."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from minivllm.engine.engine import Engine
from minivllm.errors import BadInput
from minivllm.kernels.device import BuildContext
from minivllm.models.load.loading import LoadedModel, PassReport

__all__ = ["ModelPass", "PassContext", "PassReport", "apply_passes"]


@dataclass(frozen=True)
class PassContext:
    """What a pass may need beside the model."""

    build: BuildContext
    runtime: Mapping[str, Any]  # the knobs of `runtime`
    engine: Engine | None = None  # for passes that run after it is built

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.build.device


@runtime_checkable
class ModelPass(Protocol):
    """Changes a loaded model before it serves requests."""

    name: str  # in the report

    def apply(self, loaded: LoadedModel, context: PassContext) -> PassReport:
        """Change the model in place, and report the changes."""


def apply_passes(passes: Sequence[ModelPass], loaded: LoadedModel, context: PassContext) -> None:
    """Apply passes in order. The model keeps their reports, and their notes as warnings.

    Raises:
        BadInput: a pass cannot be applied to this model, or returns no report.
    """
    for one in passes:
        begin = time.perf_counter()
        report = one.apply(loaded, context)
        if not isinstance(report, PassReport):
            raise BadInput(
                f"pass {one.name}: apply() returned {type(report).__name__}; return a PassReport "
                "(minivllm.passes.base)"
            )
        loaded.passes.append(replace(report, seconds=report.seconds or time.perf_counter() - begin))
        loaded.warnings += report.notes


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
