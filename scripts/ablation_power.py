"""How often the verdicts of ablations and the headlines of sweeps are wrong, and how often they are
right, as users get them, by simulation.

    python scripts/ablation_power.py --output reports/examples/cpu/ablation_power.json

An ablation has seven knobs, left out one at a time, the baseline and its copy (A/A), in as many
blocks as `+ablation=leave_one_out` asks for. Of eleven kinds of noise, the arms of a block are
drawn alike, and one knob has an effect, or none has. A sweep has ten equal cells. Verdicts are
those of `minivllm.analysis`: Holm's correction, then the A/A arm's difference, then the least
effect; for comparison, with the far end of the A/A arm's interval in place of its difference, and
without any. Seeds are fixed: the same code gives the same record.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from program import finish_table, new_parser

from minivllm.analysis import statistics
from minivllm.analysis.statistics import ALPHA, SMALLEST, Array

KNOBS = 7
EFFECT = 1.05
SCATTER = 0.02  # standard deviation of the logarithm of one arm's figure, of normal noise
CELLS, BLOCKS = 10, (2, 3, 6, 12)  # of sweeps
RULE = "A/A difference"  # that of `minivllm.analysis.ablation`

Generator = np.random.Generator
Shape = tuple[int, int, int]  # ablations, arms, blocks
Draw = Callable[[Generator, Shape], Array]


def _in_order(rng: Generator, shape: Shape, along: Array) -> Array:
    """Values along the order of measuring, float64 [ablations, measurements], dealt to the arms of
    each block in shuffled order."""
    rows, arms, blocks = shape
    turns = rng.random((rows, blocks, arms)).argsort(axis=-1)
    dealt = np.take_along_axis(along.reshape(rows, blocks, arms), turns, axis=-1)
    return dealt.transpose(0, 2, 1)


def states(rng: Generator, shape: Shape) -> Array:
    """A machine with two states, a tenth apart, in which it stays for ten measurements."""
    rows, arms, blocks = shape
    changes = rng.random((rows, arms * blocks)) < 0.1
    changes[:, 0] = rng.random(rows) < 0.5
    state = np.cumsum(changes, axis=1) % 2
    return _in_order(rng, shape, 0.1 * state) + SCATTER * rng.normal(size=shape)


def drift(rng: Generator, shape: Shape) -> Array:
    """A machine whose speed walks at random from one measurement to the next."""
    rows, arms, blocks = shape
    walk = np.cumsum(0.5 * SCATTER * rng.normal(size=(rows, arms * blocks)), axis=1)
    return _in_order(rng, shape, walk) + 0.25 * SCATTER * rng.normal(size=shape)


def by_block(rng: Generator, shape: Shape) -> Array:
    """Blocks of which some scatter much more than others."""
    rows, _, blocks = shape
    return SCATTER * rng.lognormal(size=(rows, 1, blocks)) * rng.normal(size=shape)


KINDS: dict[str, Draw] = {
    "normal": lambda rng, shape: SCATTER * rng.normal(size=shape),
    "exponential delays": lambda rng, shape: SCATTER * rng.exponential(size=shape),
    "lognormal delays": lambda rng, shape: SCATTER * rng.lognormal(size=shape),
    "heavy-tailed (t, 3)": lambda rng, shape: SCATTER * rng.standard_t(3, size=shape),
    "very heavy-tailed (t, 1.5)": lambda rng, shape: SCATTER * rng.standard_t(1.5, size=shape),
    "half speed in 1 of 10": lambda rng, shape: (
        SCATTER * rng.normal(size=shape) + math.log(0.5) * (rng.random(shape) < 0.1)
    ),
    "two levels, a tenth apart": lambda rng, shape: (
        0.1 * (rng.random(shape) < 0.5) + 0.1 * SCATTER * rng.normal(size=shape)
    ),
    "two machine states": states,
    "rounded to 1 %": lambda rng, shape: np.round(SCATTER * rng.normal(size=shape), 2),
    "blocks of other scatter": by_block,
    "drift": drift,
}


def tested(log_ratios: Array) -> Array:
    """The estimate of each knob that the test finds, and 0 of the others, float64 [ablations,
    knobs].

    Args:
        log_ratios: float64 [ablations, knobs, blocks].
    """
    middle = statistics.centre(log_ratios)[0]
    p_values = [
        statistics.holm([statistics.sign_flip(blocks) for blocks in ablation])
        for ablation in log_ratios
    ]
    found = np.array([[p is not None and p <= ALPHA for p in row] for row in p_values])
    return np.asarray(np.where(found & (np.abs(np.expm1(middle)) >= SMALLEST), middle, 0.0))


def ablations(draw: Draw, rows: int) -> dict[str, Any]:
    """Family error and power of one kind of noise, by rule."""
    blocks = statistics.blocks_needed(KNOBS)
    rng = np.random.default_rng(blocks)
    figures = draw(rng, (rows, KNOBS + 2, blocks))
    baseline = figures[:, :1]
    effects, copies = figures[:, 2:] - baseline, figures[:, 1] - figures[:, 0]
    planted = effects.copy()
    planted[:, 0] += math.log(EFFECT)
    middle, low, high = statistics.centre(copies)
    bands = {
        "A/A interval": np.maximum(np.abs(low), np.abs(high)),
        "A/A difference": np.abs(middle),
        "no A/A": np.zeros(rows),
    }
    none, one = np.abs(tested(effects)), tested(planted)[:, 0]
    return {
        rule: {
            "family_error": float((none > band[:, None]).any(axis=1).mean()),
            "power": float((one > band).mean()),
        }
        for rule, band in bands.items()
    }


def sweeps(draw: Draw, rows: int) -> dict[str, float]:
    """How often ten equal cells have a fastest or a slowest, by the number of blocks: whether any
    pair of cells differs, as `minivllm.analysis.separation` has it."""
    found = {}
    for blocks in BLOCKS:
        rng = np.random.default_rng(blocks)
        figures = draw(rng, (rows, CELLS, blocks))
        order = figures.mean(axis=2).argsort(axis=1)
        wrong = 0
        for cells, ranked in zip(figures, order, strict=True):
            for other in (ranked[0], ranked[-2]):
                signs = np.zeros(CELLS, int)
                signs[ranked[-1]], signs[other] = 1, -1
                told = statistics.contrast(
                    list(cells), signs.tolist(), math.comb(CELLS, 2), blocked=True
                )
                clear = told.low is not None and not told.low <= 1 <= (told.high or 1)
                if clear and abs(told.ratio - 1) >= SMALLEST:
                    wrong += 1
                    break
        found[str(blocks)] = wrong / rows
    return found


def measure(rows: int) -> dict[str, Any]:
    """The record."""
    return {
        "command": __doc__.split("\n\n")[1].strip() if __doc__ else "",
        "simulations": rows,
        "blocks": statistics.blocks_needed(KNOBS),
        "ablations": {name: ablations(draw, rows) for name, draw in KINDS.items()},
        "sweeps": {name: sweeps(draw, rows // 2) for name, draw in KINDS.items()},
    }


def markdown(record: dict[str, Any]) -> str:
    """The table of the documentation: a row a kind."""
    heads = ["family error", "power", "with the A/A interval", "power", "equal cells, 2 blocks"]
    heads += [str(blocks) for blocks in BLOCKS[1:]]
    lines = [f"| noise | {' | '.join(heads)} |", "| :-- |" + " --: |" * len(heads)]
    for name, rules in record["ablations"].items():
        figures = [
            f"{rules[rule][figure]:.{digits}f}"
            for rule in (RULE, "A/A interval")
            for figure, digits in (("family_error", 3), ("power", 2))
        ]
        figures += [f"{record['sweeps'][name][str(blocks)]:.3f}" for blocks in BLOCKS]
        lines.append(f"| {name} | {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Entry point; see the module's docstring."""
    parser = new_parser(__doc__, required=True, help="record; a table is written beside it")
    parser.add_argument("--simulations", type=int, default=2000, help="of each kind of noise")
    args = parser.parse_args()
    record = measure(args.simulations)
    finish_table(args.output, record, markdown(record))


if __name__ == "__main__":
    main()
