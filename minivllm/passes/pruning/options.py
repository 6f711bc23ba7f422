"""The knobs of `pruning`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minivllm.platform.options import Options, knob, option

NOT_PRUNING = "minivllm.passes.pruning.methods.NoPruning"
# Values of `calibration` that are no file's path.
STDLIB, WORKLOAD = "stdlib", "workload"
TWO_OF_FOUR = "2:4"
SEMI_STRUCTURED = "semi_structured"


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
        sparsity: share of the weights, for pattern "unstructured".
        pattern: "unstructured", or "2:4": two of every four inputs in a row.
        kernels: "dense", or "semi_structured" (experimental): torch's for pattern "2:4", on a GPU
            of NVIDIA's from compute capability 8.0, with weights in 16 bits.
    """

    group = "pruning"
    sparsity: float = knob(0.5, above=0, at_most=0.95)
    pattern: Literal["unstructured", "2:4"] = "unstructured"
    kernels: Literal["dense", "semi_structured"] = knob("dense", unasked=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_pattern(self)


@option("minivllm.passes.pruning.methods.Wanda")
@dataclass(frozen=True)
class WandaOptions(CalibrationOptions):
    """pruning=wanda (Sun et al. 2024): of each output's weights those become 0 whose product with
    the norm of their input is smallest.

    Args:
        sparsity, pattern, kernels: see pruning=magnitude.
    """

    sparsity: float = knob(0.5, above=0, at_most=0.95)
    pattern: Literal["unstructured", "2:4"] = "unstructured"
    kernels: Literal["dense", "semi_structured"] = knob("dense", unasked=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_pattern(self)


def _require_pattern(options: MagnitudeOptions | WandaOptions) -> None:
    """Raise BadInput for a share of the weights where the pattern sets another, and for kernels
    that another pattern needs."""
    if options.pattern != "unstructured" and options.sparsity != 0.5:
        raise options.bad("sparsity", f"is not that of pruning.pattern={options.pattern}: use 0.5")
    if options.kernels == SEMI_STRUCTURED and options.pattern != TWO_OF_FOUR:
        raise options.bad("kernels", 'needs pruning.pattern="2:4"')
