"""The knobs of `pruning`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minivllm.platform.options import Options, knob, option

NOT_PRUNING = "minivllm.passes.pruning.methods.NoPruning"
PASS = "prune"  # name of the report
# Values of `calibration` that are no file's path.
STDLIB, WORKLOAD = "stdlib", "workload"


@option(NOT_PRUNING)
@dataclass(frozen=True)
class NoPruningOptions(Options):
    """pruning=none."""

    group = "pruning"


@dataclass(frozen=True)
class CalibrationOptions(Options):
    """What every method has that looks at activations."""

    group = "pruning"
    calibration: str = STDLIB
    """stdlib: Python sources of the standard library; workload: the prompts that are measured; or
    the path of a UTF-8 text file, never the text that quality is measured on."""
    calibration_tokens: int = knob(8192, at_least=64, at_most=1 << 20)
    """Tokens of that text, in windows of up to 512."""


@option("minivllm.passes.pruning.methods.LayerPruning")
@dataclass(frozen=True)
class LayerPruningOptions(CalibrationOptions):
    """pruning=layers."""

    layers: tuple[int, ...] | None = None
    """The layers to leave out, from 0, as [3,5]; null: num_layers, chosen by importance."""
    num_layers: int = knob(1, at_least=1)
    """Number of layers to leave out."""
    importance: Literal["block_influence", "angular_distance"] = "block_influence"
    """block_influence (ShortGPT, Men et al. 2024): those that turn the hidden state least;
    angular_distance (Gromov et al. 2024): the run in a row that turns it least as a whole."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None and (
            not self.layers or len({*self.layers}) < len(self.layers) or min(self.layers) < 0
        ):
            raise self.bad("layers", "must be different layers from 0, or null")
        for name in ("num_layers", "importance") if self.layers is not None else ():
            if getattr(self, name) != getattr(LayerPruningOptions, name):
                raise self.bad(name, "chooses layers, and pruning.layers names them: leave one out")

    @property
    def count(self) -> int:
        """How many layers are left out."""
        return self.num_layers if self.layers is None else len(self.layers)


@option("minivllm.passes.pruning.methods.WidthPruning")
@dataclass(frozen=True)
class WidthPruningOptions(CalibrationOptions):
    """pruning=width: the MLP channels and heads of each layer whose activations have the smallest
    norms are left out (as Minitron does, Muralidharan et al. 2024)."""

    mlp: float = knob(0.25, at_least=0, at_most=0.9)
    """Share of the MLP channels to leave out; what stays is a multiple of 32."""
    heads: float = knob(0.0, at_least=0, at_most=0.9)
    """Share of the key-value heads to leave out, each with the query heads that read it; at least
    one stays."""


@option("minivllm.passes.pruning.methods.Magnitude")
@dataclass(frozen=True)
class MagnitudeOptions(Options):
    """pruning=magnitude: the smallest weights of each matrix become 0. Memory and speed stay, since
    a dense kernel reads zeros, too."""

    group = "pruning"
    sparsity: float = knob(0.5, above=0, at_most=0.95)
    """Share of the weights."""


@option("minivllm.passes.pruning.methods.Wanda")
@dataclass(frozen=True)
class WandaOptions(CalibrationOptions):
    """pruning=wanda (Sun et al. 2024): of each output's weights those become 0 whose product with
    the norm of their input is smallest."""

    sparsity: float = knob(0.5, above=0, at_most=0.95)
    """Share of each output's weights."""
