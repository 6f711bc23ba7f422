"""The statistics of ablations and comparisons, on logarithms of ratios;
docs/reference/statistics.md says why these.

Everything is deterministic: equal records give equal figures.
scipy is imported when first used, since it takes a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

ALPHA = 0.05  # accepted rate of false verdicts in a family; intervals have confidence 1 - ALPHA
POWER = 0.8  # with which `minimum_detectable` would be found
RESAMPLES = 9_999  # permutations where there are more than EXACT
EXACT = 1 << 14  # permutations of two samples up to this number are all tried
FEWEST = 4  # samples for an interval
FEWEST_RANKED = 6  # for one by ranks: of five pairs all of one sign is no 95 % yet
MANY = 40  # samples of each side from which the rank sum is taken for normal
# standard deviations from the median, by the median deviation, beyond which a block is a
# spike
FAR = 6.0
SMALLEST = 0.005  # a change of less than this fraction reads as 1.00x, and is none however certain
WITHIN = 0.05  # of the product of what two give alone: two that are so near multiply
# standard deviation of logarithms that the search for spikes takes for granted
LEAST_SCATTER = 0.002
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
    """The typical ratio of paired blocks.

    Args:
        log_ratios: natural logarithms of (with / without), float64 [blocks], at least one.

    Returns:
        The pseudomedian (see `centre`) as a ratio, its interval, and the p-value of the signed-rank
        test, which belongs to the interval: from FEWEST_RANKED blocks the interval leaves 1 out
        where the p-value is at most ALPHA.
    """
    x = np.asarray(log_ratios, dtype=np.float64)
    return _estimate(*centre(x), x)


def mean(log_ratios: Sequence[float] | Array) -> Estimate:
    """The geometric mean of paired ratios with Student's interval: for shares of a whole, which
    have to add up."""
    x = np.asarray(log_ratios, dtype=np.float64)
    return _estimate(x.mean(), *_student(x), x)


def _estimate(middle: Array, low: Array, high: Array, x: Array) -> Estimate:
    """Of logarithms, with the test; without the interval where there are too few."""
    known = len(x) >= FEWEST
    return Estimate(
        _exp(float(middle)),
        _exp(float(low)) if known else None,
        _exp(float(high)) if known else None,
        sign_flip(x),
        len(x),
    )


def two_sample(first: Sequence[float] | Array, second: Sequence[float] | Array) -> Estimate:
    """Ratio of the second to the first, for samples that do not pair.

    Args:
        first: natural logarithms, float64 [n], at least one.
        second: the same, float64 [m].

    Returns:
        The median of all ratios of one of the second to one of the first (Hodges and Lehmann 1963),
        its interval by the rank sum (Moses), and the p-value of the rank-sum test (Mann and Whitney
        1947).
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    differences = np.sort((b[:, None] - a[None, :]).ravel())
    low = high = None
    if min(len(a), len(b)) >= FEWEST:
        k = _rank_sum_ends(len(a), len(b))
        low, high = _exp(float(differences[k - 1])), _exp(float(differences[-k]))
    ratio = _exp(float(np.median(differences)))
    return Estimate(ratio, low, high, _rank_sum(a, b), len(a) + len(b))


def contrast(
    groups: Sequence[Sequence[float] | Array], signs: Sequence[int], tests: int, *, blocked: bool
) -> Estimate:
    """The ratio in which the typical figures of groups are multiplied and divided, with an interval
    for one of so many.

    From `blocks_needed` blocks it is what `paired` says of the blocks. Of fewer it is the analysis
    of variance of a factorial with repeats (Fisher 1935): Student's interval from the scatter
    within all groups, which is taken to be the same, also in those that are no part of the ratio.

    Args:
        groups: natural logarithms, float64 [samples] each, at least one.
        signs: of each group: 1 multiplied, -1 divided by, 0 no part of it.
        tests: of how many intervals all are to hold with 1 - ALPHA (Bonferroni).
        blocked: whether sample i of every group, of which all have as many, was measured in one
            block.

    Returns:
        Without an interval where no group has a second sample; without a p-value.
    """
    samples = [np.asarray(group, dtype=np.float64) for group in groups]
    known = [(group, sign) for group, sign in zip(samples, signs, strict=True) if sign]
    n = min(len(group) for group, _ in known)
    if blocked and n >= max(FEWEST_RANKED, blocks_needed(tests)):
        by_block = np.array(signs, np.float64) @ np.stack(samples)
        ratio, low, high = (_exp(float(value)) for value in centre(by_block, ALPHA / tests))
        return Estimate(ratio, low, high, None, n)
    away = [group - group.mean() for group in samples]
    freedom = sum(len(group) - 1 for group in samples)
    if blocked:  # what a block has in common is no scatter
        away = list(np.stack(away) - np.mean(away, axis=0))
        freedom = (len(samples) - 1) * (n - 1)
    middle = float(sum(sign * group.mean() for group, sign in known))
    if not freedom:
        return Estimate(_exp(middle), None, None, None, n)
    from scipy.stats import t

    variance = math.fsum(float(value) ** 2 for group in away for value in group) / freedom
    deviation = math.sqrt(variance * sum(1 / len(group) for group, _ in known))
    half_width = float(t.ppf(1 - ALPHA / tests / 2, freedom)) * deviation
    return Estimate(_exp(middle), _exp(middle - half_width), _exp(middle + half_width), None, n)


def multiply(ratio: float | None, low: float | None, high: float | None) -> bool | None:
    """Whether two effects multiply, by the interval of what they give together over the product of
    each alone.

    Returns:
        False where the interval keeps clear of 1, True where it has 1 and ends WITHIN of it, None
        where it tells neither.
    """
    if ratio is None or low is None or high is None:
        return None
    if not low <= 1 <= high and abs(ratio - 1) >= SMALLEST:
        return False
    return True if max(high, 1 / low) <= 1 + WITHIN else None


def centre(x: Array, alpha: float = ALPHA) -> tuple[Array, Array, Array]:
    """The pseudomedian of each row with its interval of 1 - alpha.

    The median of the means of every two values, each with itself included (Hodges and Lehmann
    1963). The interval is made of such means, too, those that the exact signed-rank test cannot
    tell from the truth (Tukey; Hollander and Wolfe, section 3.3); of fewer than FEWEST_RANKED
    values it is Student's.

    Args:
        x: float64 [..., n].
        alpha: from FEWEST_RANKED values at least 2 / 2^n, see `blocks_needed`.

    Returns:
        Estimate, low and high, float64 [...]; low and high are NaN for a single value.
    """
    n = x.shape[-1]
    i, j = np.triu_indices(n)
    pairs = np.sort((x[..., i] + x[..., j]) / 2, axis=-1)
    middle = np.median(pairs, axis=-1)
    if n < FEWEST_RANKED:
        return middle, *_student(x, alpha)
    k = _signed_rank_ends(n, alpha)
    return middle, pairs[..., k - 1], pairs[..., -k]


def _student(x: Array, alpha: float = ALPHA) -> tuple[Array, Array]:
    """Student's interval of the mean of each row; NaN for a single value."""
    from scipy.stats import t

    n = x.shape[-1]
    if n < 2:
        return np.full(x.shape[:-1], np.nan), np.full(x.shape[:-1], np.nan)
    half_width = t.ppf(1 - alpha / 2, n - 1) * x.std(axis=-1, ddof=1) / math.sqrt(n)
    return x.mean(axis=-1) - half_width, x.mean(axis=-1) + half_width


@cache
def _signed_rank_ends(n: int, alpha: float = ALPHA) -> int:
    """Which mean of two, counted from either end, bounds the interval: the greatest k with P(W < k)
    <= alpha / 2."""
    return int(np.searchsorted(_cumulated(tuple(range(1, n + 1))), alpha / 2, side="right"))


@lru_cache
def _cumulated(ranks: tuple[int, ...]) -> Array:
    """Probability that the ranks of positive sign sum up to at most s, over all patterns of signs,
    float64 [s]."""
    weights = np.ones(1)
    for rank in ranks:
        grown = np.zeros(len(weights) + rank)
        grown[: len(weights)] += weights / 2
        grown[rank:] += weights / 2
        weights = grown
    return np.minimum(np.cumsum(weights), 1.0)


def sign_flip(x: Array) -> float | None:
    """Two-sided p-value of "the distribution is symmetric about 0": Wilcoxon's signed-rank test
    (1945), exact.

    Of all 2^n patterns of signs it counts those whose ranks sum up to as much or more on one side.
    Ties share their mean rank; a zero has no sign.
    """
    from scipy.stats import rankdata

    if len(x) < 2:
        return None
    x = np.round(x, 12)  # the last bits must not tell equal values apart
    x = x[x != 0]
    if not len(x):
        return 1.0
    doubled = np.rint(2 * rankdata(np.abs(x))).astype(int)
    least = int(min(doubled[x > 0].sum(), doubled[x < 0].sum()))
    return float(min(1.0, 2 * _cumulated(tuple(np.sort(doubled).tolist()))[least]))


def _rank_sum(a: Array, b: Array) -> float | None:
    """Two-sided p-value of "both are drawn from one distribution", by which sample each rank
    belongs to.

    All ways to deal the ranks are tried up to EXACT of them, then RESAMPLES random ones.
    """
    from scipy.stats import permutation_test, rankdata

    if min(len(a), len(b)) < 2:
        return None
    ranks = rankdata(np.round(np.concatenate([a, b]), 12))

    def statistic(one: Array, other: Array, axis: int = -1) -> Array:
        return np.asarray(other.mean(axis=axis) - one.mean(axis=axis)).round(12)

    result = permutation_test(
        (ranks[: len(a)], ranks[len(a) :]),
        statistic,
        permutation_type="independent",
        vectorized=True,
        n_resamples=np.inf if math.comb(len(ranks), len(a)) <= EXACT else RESAMPLES,
        rng=np.random.default_rng(SEED),
    )
    return float(result.pvalue)


@cache
def _rank_sum_ends(n: int, m: int) -> int:
    """Which difference, counted from either end, bounds the interval: the greatest k with P(U < k)
    <= ALPHA / 2."""
    if min(n, m) > MANY:
        from scipy.stats import norm

        deviation = math.sqrt(n * m * (n + m + 1) / 12)
        return max(1, math.floor(n * m / 2 - norm.ppf(1 - ALPHA / 2) * deviation))
    # Ways to deal n + m ranks with each value of U: the Gaussian binomial coefficient, a factor
    # after the other.
    ways = [1] + [0] * (n * m)
    for i in range(1, n + 1):
        for u in range(n * m, m + i - 1, -1):
            ways[u] -= ways[u - m - i]
        for u in range(i, n * m + 1):
            ways[u] += ways[u - i]
    allowed, k = math.comb(n + m, n) * ALPHA / 2, 0
    while (allowed := allowed - ways[k]) >= 0:
        k += 1
    return k


def spikes(log_ratios: Sequence[float] | Array) -> int:
    """How many blocks lie so far from the median that they are no part of the scatter of the
    others."""
    x = np.asarray(log_ratios, dtype=np.float64)
    if len(x) < FEWEST_RANKED:
        return 0
    away = np.abs(x - np.median(x))
    return int((away > FAR * max(1.4826 * float(np.median(away)), LEAST_SCATTER)).sum())


def withstands_a_spike(n: int) -> bool:
    """Whether one block, however far off, leaves both ends of the interval of n blocks among the
    others."""
    return n >= FEWEST_RANKED and _signed_rank_ends(n) > n


def _exp(value: float) -> float:
    return math.exp(min(max(value, -50.0), 50.0))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """p-values corrected for all of them being looked at (Holm 1979); None stays None."""
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    greatest = 0.0
    for rank, (p, i) in enumerate(known):
        greatest = max(greatest, min(1.0, p * (len(known) - rank)))
        corrected[i] = greatest
    return corrected


def blocks_needed(tests: int, alpha: float = ALPHA) -> int:
    """Fewest blocks with which the signed-rank test can give a verdict on one of so many, after
    Holm.

    The least two-sided p-value of n blocks is 2 / 2^n, and the smallest of k is compared with alpha
    / k.
    """
    return 1 + math.ceil(math.log2(max(1, tests) / alpha))


def repeats_needed(tests: int) -> int:
    """Fewest repeats of each side with which the two-sample permutation test can give a verdict,
    after Holm."""
    n = 2
    while 2 / math.comb(2 * n, n) > ALPHA / max(1, tests):
        n += 1
    return n


def minimum_detectable(log_ratios: Sequence[float] | Array, tests: int) -> float | None:
    """Smallest relative effect that so many blocks of this noise would find with probability POWER.

    By the power of the paired t-test at the level of Holm's first step.

    Returns:
        A fraction: 0.03 is 3 per cent. None where no effect could be found, however large.
    """
    from scipy.optimize import brentq
    from scipy.special import nctdtr
    from scipy.stats import t

    x = np.asarray(log_ratios, dtype=np.float64)
    if len(x) < max(FEWEST, blocks_needed(tests)):
        return None
    deviation = float(x.std(ddof=1))
    if deviation < 1e-12:
        return 0.0
    freedom = len(x) - 1
    limit = t.isf(ALPHA / max(1, tests) / 2, freedom)

    # The power is that of the effect's own side: the other one adds less than 1e-6 to it.
    shift = brentq(lambda shift: 1 - POWER - nctdtr(freedom, shift, limit), 0.0, 4 * limit)
    return math.expm1(shift / math.sqrt(len(x)) * deviation)
