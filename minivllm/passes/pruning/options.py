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
    """What every method has that looks at activations.

    Args:
        calibration: "stdlib": Python sources of the standard library; "workload": the prompts of
            the workload that is measured; or the path of a UTF-8 text file. A text that quality is
            measured on is an error.
        calibration_tokens: of that text, in windows of up to 512 tokens.
    """

    group = "pruning"
    calibration: str = STDLIB
    calibration_tokens: int = knob(8192, at_least=64, at_most=1 << 20)


@option("minivllm.passes.pruning.methods.LayerPruning")
@dataclass(frozen=True)
class LayerPruningOptions(CalibrationOptions):
    """pruning=layers.

    Args:
        layers: the layers to leave out, from 0; None: `num_layers`, chosen by `importance`.
        num_layers: how many to leave out.
        importance: "block_influence" (ShortGPT, Men et al. 2024): those that turn the hidden state
            least; "angular_distance" (Gromov et al. 2024): the run of layers in a row that turns it
            least as a whole.
    """

    layers: tuple[int, ...] | None = None
    num_layers: int = knob(1, at_least=1)
    importance: Literal["block_influence", "angular_distance"] = "block_influence"

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
    norms are left out (as Minitron does, Muralidharan et al. 2024).

    Args:
        mlp: share of the MLP channels to leave out; what stays is a multiple of 32.
        heads: share of the key-value heads to leave out, each with the query heads that read it;
            rounded down, so that at least one stays.
    """

    mlp: float = knob(0.25, at_least=0, at_most=0.9)
    heads: float = knob(0.0, at_least=0, at_most=0.9)


@option("minivllm.passes.pruning.methods.Magnitude")
@dataclass(frozen=True)
class MagnitudeOptions(Options):
    """pruning=magnitude: the smallest weights of each matrix become 0. Memory and speed stay, since
    a dense kernel reads zeros, too.

    Args:
        sparsity: share of the weights.
    """

    group = "pruning"
    sparsity: float = knob(0.5, above=0, at_most=0.95)


@option("minivllm.passes.pruning.methods.Wanda")
@dataclass(frozen=True)
class WandaOptions(CalibrationOptions):
    """pruning=wanda (Sun et al. 2024): of each output's weights those become 0 whose product with
    the norm of their input is smallest.

    Args:
        sparsity: share of each output's weights.
    """

    sparsity: float = knob(0.5, above=0, at_most=0.95)
