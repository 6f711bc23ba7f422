"""How often the interval of `task=capacity` contains the truth, and how often a rate that must not
hold is accepted, by simulation of a queue.

    python scripts/capacity_coverage.py --output reports/examples/cpu/capacity_coverage.json

A rate is Poisson arrivals at one server with lognormal service times (M/G/1, of coefficient of
variation 1). Its runs begin with an empty queue and have 200 requests, whose waits follow from
Lindley's recursion. The objective is the wait that a given share of all requests keep, and the
truth is the mean share of 10,000 runs. Each of 1,000 searches measures that rate as
`minivllm.analysis.capacity.search` does, with the default criterion. Seeds are fixed: the same code
gives the same record.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from program import finish_table, new_parser

from minivllm.analysis.capacity import Criterion, Probe, search

LOADS = (0.5, 0.8, 0.95)
SHARES = (0.6, 0.85, 0.88, 0.9, 0.95, 0.99)  # that meet the objective: up to 0.9 none may hold
REQUESTS, RUNS, SEARCHES = 200, 10_000, 1_000


def waits(rng: np.random.Generator, load: float, runs: int, requests: int) -> NDArray[np.float64]:
    """Waits before service in units of the mean service time, float64 [runs, requests].

    Lindley's recursion, W' = max(0, W + service - gap), is the sum of its steps above the least
    sum so far.
    """
    spread = np.log(2.0)  # variance of the logarithm: the coefficient of variation is 1
    services = rng.lognormal(-spread / 2, np.sqrt(spread), (runs, requests - 1))
    gaps = rng.exponential(1 / load, (runs, requests - 1))
    sums = np.concatenate([np.zeros((runs, 1)), np.cumsum(services - gaps, axis=1)], axis=1)
    return np.asarray(sums - np.minimum.accumulate(sums, axis=1))


def searched(met: Sequence[Sequence[bool]], order: Sequence[int], criterion: Criterion) -> Probe:
    """What a search sees at one rate, whose measurements are the runs of this order."""
    one_rate = Criterion(**{**vars(criterion), "max_rates": 1})
    capacity = search(lambda _, block: met[order[block]], one_rate, 1.0)
    return capacity.probes[0]


def rates(load: float, share: float, searches: int) -> dict[str, Any]:
    """How the searches of one load and objective end."""
    rng = np.random.default_rng([int(1000 * load), int(1000 * share)])
    criterion = Criterion()
    waited = waits(rng, load, RUNS, REQUESTS)
    in_time = waited <= np.quantile(waited, share)
    truth, runs = float(in_time.mean()), in_time.tolist()
    probes = [
        searched(runs, rng.choice(RUNS, criterion.max_blocks, replace=False).tolist(), criterion)
        for _ in range(searches)
    ]
    intervals = [probe.interval(criterion) for probe in probes]
    verdicts = [probe.verdict(criterion) for probe in probes]
    return {
        "load": load,
        "truth": truth,
        "coverage": fmean(low <= truth <= high for low, high in intervals),
        **{name: verdicts.count(name) / searches for name in ("holds", "fails", "undecided")},
        "runs": fmean(len(probe.blocks) for probe in probes),
    }


def markdown(record: dict[str, Any]) -> str:
    """The table of the documentation: a row a load and share."""
    lines = [
        "| load | share that meets the objective | coverage | holds | fails | undecided | runs |",
        "| --: |" + " --: |" * 6,
    ]
    lines += [
        f"| {one['load']:g} | {one['truth']:.2f} | {one['coverage']:.3f} | {one['holds']:.3f} | "
        f"{one['fails']:.3f} | {one['undecided']:.3f} | {one['runs']:.0f} |"
        for one in record["rates"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Entry point; see the module's docstring."""
    parser = new_parser(__doc__, required=True, help="record; a table is written beside it")
    parser.add_argument("--searches", type=int, default=SEARCHES, help="of each load and share")
    args = parser.parse_args()
    record = {
        "command": __doc__.split("\n\n")[1].strip() if __doc__ else "",
        "searches": args.searches,
        "requests": REQUESTS,
        "rates": [rates(load, share, args.searches) for load in LOADS for share in SHARES],
    }
    finish_table(args.output, record, markdown(record))


if __name__ == "__main__":
    main()
