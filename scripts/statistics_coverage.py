"""How often the intervals of ablations contain the truth, and how often the tests are wrong or
right, by simulation.

    python scripts/statistics_coverage.py --output reports/examples/cpu/statistics_coverage.json

Blocks of two arms are drawn with five kinds of noise and a known ratio, and given to
`minivllm.analysis.statistics`. What is drawn is the logarithm of an arm's figure, as `SCATTER`
times the kind's own numbers. For comparison the same blocks go through the bootstrap-t of the mean,
which the intervals were made by before. Seeds are fixed: the same code gives the same record.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from program import finish_table, new_parser

from minivllm.analysis import statistics
from minivllm.analysis.statistics import ALPHA, Array

BLOCKS = (5, 10, 13, 20, 40)
SCATTER = 0.02  # standard deviation of the logarithm of one arm's figure, of normal noise
RATIO = 0.9  # planted where coverage is measured
EFFECT = 1.03  # planted where power is
SPIKE = math.log(0.5)  # a block at half speed
FAMILY = 6  # effects that are tested at once
BOOTSTRAPPED, RESAMPLES = 500, 999

Draw = Callable[
    [np.random.Generator, int, int], Array
]  # generator, rows, blocks -> log-ratios without an effect


def normal(rng: np.random.Generator, rows: int, n: int) -> Array:
    """Both arms scatter normally."""
    return SCATTER * (rng.normal(size=(rows, n)) - rng.normal(size=(rows, n)))


def lognormal(rng: np.random.Generator, rows: int, n: int) -> Array:
    """Both arms are slowed by lognormal delays: seldom, and then by much."""
    delays = rng.lognormal(size=(2, rows, n))
    return SCATTER * (delays[0] - delays[1])


def heavy_tailed(rng: np.random.Generator, rows: int, n: int) -> Array:
    """Both arms scatter as Student's t with three degrees of freedom."""
    return SCATTER * (rng.standard_t(3, size=(rows, n)) - rng.standard_t(3, size=(rows, n)))


def spikes(rng: np.random.Generator, rows: int, n: int) -> Array:
    """Normal noise, and one arm runs at half speed in one block of ten."""
    return normal(rng, rows, n) + SPIKE * (rng.random((rows, n)) < 0.1)


def states(rng: np.random.Generator, rows: int, n: int) -> Array:
    """A machine with two states, a tenth apart, in which it stays for ten measurements on average;
    arms take turns at random."""
    stays = rng.random((rows, 2 * n)) < 0.9
    state = np.empty((rows, 2 * n), bool)
    state[:, 0] = rng.random(rows) < 0.5
    for i in range(1, 2 * n):
        state[:, i] = state[:, i - 1] ^ ~stays[:, i]
    speed = 0.1 * state.reshape(rows, n, 2)
    turn = np.where(rng.random((rows, n)) < 0.5, 1, -1)
    return turn * (speed[..., 0] - speed[..., 1]) + normal(rng, rows, n)


def drifting_ratio(rng: np.random.Generator, rows: int, n: int) -> Array:
    """Not blocks as they should be: the ratio itself drifts from block to block (correlation
    0.7)."""
    steps = normal(rng, rows, n)
    found = np.empty_like(steps)
    found[:, 0] = steps[:, 0] / math.sqrt(1 - 0.7**2)
    for i in range(1, n):
        found[:, i] = 0.7 * found[:, i - 1] + steps[:, i]
    return found


KINDS: dict[str, Draw] = {
    "normal": normal,
    "lognormal": lognormal,
    "heavy-tailed (t, 3)": heavy_tailed,
    "spikes in 1 block of 10, one arm": spikes,
    "two machine states": states,
    "ratio drifts (blocks depend)": drifting_ratio,
}


def bootstrap_t(x: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """The studentised bootstrap interval of the mean of each row (Efron and Tibshirani 1993,
    section 12.5)."""
    rows, n = x.shape
    low, high = np.empty(rows), np.empty(rows)
    for row, values in enumerate(x):
        error = values.std(ddof=1) / math.sqrt(n)
        drawn = values[rng.integers(0, n, (RESAMPLES, n))]
        errors = drawn.std(axis=1, ddof=1) / math.sqrt(n)
        usable = errors > 1e-9 * error
        least, most = np.quantile(
            (drawn.mean(axis=1)[usable] - values.mean()) / errors[usable],
            [ALPHA / 2, 1 - ALPHA / 2],
        )
        low[row], high[row] = values.mean() - most * error, values.mean() - least * error
    return low, high


def cell(draw: Draw, n: int, rows: int, typical: float) -> dict[str, Any]:
    """The rates of one kind of noise at one number of blocks.

    Args:
        draw: the noise.
        n: blocks.
        rows: ablations to simulate.
        typical: pseudomedian of the noise, which the intervals are about; 0 but for noise of one
            arm alone.
    """
    rng = np.random.default_rng([n, rows])
    truth = math.log(RATIO)
    x = draw(rng, rows, n) + truth
    _, low, high = statistics.centre(x)
    before = x[:BOOTSTRAPPED]
    was_low, was_high = bootstrap_t(before, rng)
    families = rows // FAMILY // 2
    wrong = sum(
        any(
            (p or 1.0) <= ALPHA
            for p in statistics.holm([statistics.sign_flip(one) for one in family])
        )
        for family in draw(rng, families * FAMILY, n).reshape(families, FAMILY, n)
    )
    found = [statistics.sign_flip(one) for one in draw(rng, rows // 4, n) + math.log(EFFECT)]
    return {
        "blocks": n,
        "coverage_typical": float(np.mean((low <= truth + typical) & (truth + typical <= high))),
        "coverage_planted": float(np.mean((low <= truth) & (truth <= high))),
        "median_width": float(np.median(np.exp(high - low) - 1)),
        "bootstrap_t_coverage_mean": float(
            np.mean((was_low <= truth + _mean(draw)) & (truth + _mean(draw) <= was_high))
        ),
        "bootstrap_t_median_width": float(
            np.median(np.exp(np.minimum(was_high - was_low, 50.0)) - 1)
        ),
        "false_verdicts": wrong / families,
        "power": float(np.mean([p is not None and p <= ALPHA for p in found])),
        "blocks_called_spikes": float(np.mean([statistics.spikes(one) for one in x[:500]]) / n),
    }


def _mean(draw: Draw) -> float:
    """The population's mean of the logarithm, which the bootstrap-t is about."""
    return 0.1 * SPIKE if draw is spikes else 0.0


def typical(draw: Draw) -> float:
    """The population's pseudomedian: the median of the mean of two."""
    if draw is not spikes:
        return 0.0  # differences of two equal arms are symmetric
    return float(np.median(draw(np.random.default_rng(0), 1_000_000, 2).mean(axis=1)))


def measure(rows: int) -> dict[str, Any]:
    """The record: a list of rates for each kind of noise."""
    kinds = {
        name: [cell(draw, n, rows, middle) for n in BLOCKS]
        for name, draw in KINDS.items()
        for middle in [typical(draw)]
    }
    return {
        "command": __doc__.split("\n\n")[1].strip() if __doc__ else "",
        "simulations": rows,
        "kinds": kinds,
    }


def markdown(record: dict[str, Any]) -> str:
    """The table of the documentation: a row a kind, coverage by number of blocks, then what else is
    told."""
    heads = [f"{n} blocks" for n in BLOCKS]
    lines = [
        f"| noise | {' | '.join(heads)} | bootstrap-t, 10 | 40 | false verdicts of {FAMILY}, 13 "
        "| power, 13 |"
    ]
    lines.append("| :-- |" + " --: |" * (len(BLOCKS) + 4))
    for name, cells in record["kinds"].items():
        by = {one["blocks"]: one for one in cells}
        figures = [f"{one['coverage_typical']:.3f}" for one in cells]
        figures += [f"{by[n]['bootstrap_t_coverage_mean']:.2f}" for n in (10, 40)]
        figures += [f"{by[13]['false_verdicts']:.3f}", f"{by[13]['power']:.2f}"]
        lines.append(f"| {name} | {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Entry point; see the module's docstring."""
    parser = new_parser(__doc__, required=True, help="record; a table is written beside it")
    parser.add_argument(
        "--simulations", type=int, default=4000, help="of each kind and number of blocks"
    )
    args = parser.parse_args()
    record = measure(args.simulations)
    finish_table(args.output, record, markdown(record))


if __name__ == "__main__":
    main()
