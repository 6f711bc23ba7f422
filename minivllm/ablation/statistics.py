"""The statistics of ablations and comparisons, on logarithms of ratios; docs/reference/statistics.md says why these.

Everything is deterministic: resampling starts from a fixed seed, so equal records give equal figures.
scipy and statsmodels are imported when first used, since they take a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

ALPHA = 0.05  # accepted rate of false verdicts in a family; intervals have confidence 1 - ALPHA
POWER = 0.8  # with which `minimum_detectable` would be found
RESAMPLES = 9_999  # of bootstraps, and of permutations where there are more than this
EXACT = 1 << 14  # permutations up to this number are all tried
FEWEST = 4  # samples for an interval; one resample in nine of three has no spread to studentise by
SEED = 0


@dataclass(frozen=True)
class Estimate:
    """A ratio with its uncertainty."""

    ratio: float
    low: float | None  # confidence interval of the ratio; None for fewer than FEWEST samples
    high: float | None
    p_value: float | None  # of "the ratio is 1"; None for a single sample
    n: int  # samples: blocks, or those of both sides

    @property
    def width(self) -> float | None:
        """Of the interval, relative: high / low - 1."""
        return None if self.low is None or self.high is None else self.high / self.low - 1


def paired(log_ratios: Sequence[float] | Array) -> Estimate:
    """Mean of paired log-ratios, one a block.

    Args:
        log_ratios: natural logarithms of (with / without), float64 [blocks], at least one.

    Returns:
        The geometric mean ratio, its studentised bootstrap interval, and the p-value of the sign-flip test.
    """
    x = np.asarray(log_ratios, dtype=np.float64)
    mean = float(x.mean())
    low, high = _studentised(mean, _standard_error(x), _resampled(x)) if len(x) >= FEWEST else (None, None)
    return Estimate(math.exp(mean), low, high, sign_flip(x), len(x))


def two_sample(first: Sequence[float] | Array, second: Sequence[float] | Array) -> Estimate:
    """Ratio of the second to the first, for samples that do not pair.

    Args:
        first: natural logarithms, float64 [n], at least one.
        second: the same, float64 [m].

    Returns:
        The ratio of geometric means, its studentised bootstrap interval with Welch's standard error, and
        the p-value of the permutation test.
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    difference = float(b.mean() - a.mean())
    means_a, errors_a = _resampled(a)
    means_b, errors_b = _resampled(b, SEED + 1)
    resampled = means_b - means_a, np.hypot(errors_a, errors_b)
    error = math.hypot(_standard_error(a), _standard_error(b))
    low, high = _studentised(difference, error, resampled) if min(len(a), len(b)) >= FEWEST else (None, None)
    return Estimate(math.exp(difference), low, high, _permutation([a, b], "independent"), len(a) + len(b))


def sign_flip(x: Array) -> float | None:
    """Two-sided p-value of "the distribution is symmetric about 0", by flipping signs (Fisher 1935).

    All 2^n sign patterns are tried up to EXACT of them, then RESAMPLES random ones.
    """
    return _permutation([x], "samples")


def _permutation(samples: list[Array], kind: str) -> float | None:
    from scipy.stats import permutation_test

    if max(map(len, samples)) < 2 or min(map(len, samples)) < 1:
        return None

    def statistic(*parts: Array, axis: int = -1) -> Array:
        means = [part.mean(axis=axis) for part in parts]
        # Sums in another order differ in the last bits, which must not tell equal patterns apart.
        return np.round(means[-1] - (means[0] if len(means) == 2 else 0.0), 12)

    count = math.comb(sum(map(len, samples)), len(samples[0])) if len(samples) == 2 else 2 ** len(samples[0])
    result = permutation_test(
        samples,
        statistic,
        permutation_type=kind,
        vectorized=True,
        n_resamples=np.inf if count <= EXACT else RESAMPLES,
        rng=np.random.default_rng(SEED),
    )
    return float(result.pvalue)


def _standard_error(x: Array) -> float:
    return float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.nan


def _resampled(x: Array, seed: int = SEED) -> tuple[Array, Array]:
    """Mean and standard error of RESAMPLES bootstrap samples of x, float64 [RESAMPLES] each."""
    n = len(x)
    samples = x[np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))]
    deviations = samples.std(axis=1, ddof=1) if n > 1 else np.full(RESAMPLES, np.nan)
    return samples.mean(axis=1), deviations / math.sqrt(n)


def _studentised(
    estimate: float, error: float, resampled: tuple[Array, Array]
) -> tuple[float, float] | tuple[None, None]:
    """Bootstrap-t interval of a log-ratio, as ratios (Efron and Tibshirani 1993, section 12.5)."""
    means, errors = resampled
    if not math.isfinite(error):
        return None, None
    if error < 1e-12:  # a virtual clock: every block is the same
        return math.exp(estimate), math.exp(estimate)
    usable = errors > 1e-9 * error
    quotients = (means[usable] - estimate) / errors[usable]
    low, high = np.quantile(quotients, [ALPHA / 2, 1 - ALPHA / 2])
    return _exp(estimate - high * error), _exp(estimate - low * error)


def _exp(value: float) -> float:
    return math.exp(min(max(value, -50.0), 50.0))  # few samples may give an interval beyond all bounds


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """p-values corrected for all of them being looked at (Holm 1979); None stays None."""
    from statsmodels.stats.multitest import multipletests

    known = [p for p in p_values if p is not None]
    corrected = iter(multipletests(known, method="holm")[1] if known else [])
    return [None if p is None else float(next(corrected)) for p in p_values]


def blocks_needed(tests: int, alpha: float = ALPHA) -> int:
    """Fewest blocks with which the sign-flip test can give a verdict on one of so many, after Holm.

    The least two-sided p-value of n blocks is 2 / 2^n, and the smallest of k is compared with alpha / k.
    """
    return 1 + math.ceil(math.log2(max(1, tests) / alpha))


def repeats_needed(tests: int, alpha: float = ALPHA) -> int:
    """Fewest repeats of each side with which the two-sample permutation test can give a verdict, after Holm."""
    n = 2
    while 2 / math.comb(2 * n, n) > alpha / max(1, tests):
        n += 1
    return n


def minimum_detectable(log_ratios: Sequence[float] | Array, tests: int) -> float | None:
    """Smallest relative effect that so many blocks of this noise would find with probability POWER.

    By the power of the paired t-test at the level of Holm's first step.

    Returns:
        A fraction: 0.03 is 3 per cent. None where no effect could be found, however large.
    """
    from statsmodels.stats.power import TTestPower

    x = np.asarray(log_ratios, dtype=np.float64)
    if len(x) < max(FEWEST, blocks_needed(tests)):
        return None
    deviation = float(x.std(ddof=1))
    if deviation < 1e-12:
        return 0.0
    size = TTestPower().solve_power(nobs=len(x), alpha=ALPHA / max(1, tests), power=POWER)
    return math.expm1(float(np.squeeze(size)) * deviation)
