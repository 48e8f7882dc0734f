"""Intervals over seeds by Student's t, and Holm's correction for many claims.

A mean x̄ of n seeds with standard deviation s has the interval x̄ ± t s/√n, where |T| > t has probability α for
Student's T with n − 1 degrees of freedom. Differences are paired before this, seed by seed.

The smallest of k true means lies above the lowest of their lower ends, which needs no correction, and below the lowest
of their upper ends at α/k, for any of the k may be the smallest; the largest of k likewise, the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from alasso.bench.report.aggregate import Mean

ALPHA = 0.05


class Interval(NamedTuple):
    """From where to where."""

    low: float
    high: float


def interval_of(mean: Mean, alpha: float = ALPHA) -> Interval:
    """The interval of a mean over seeds.

    Args:
        mean: Of at least two seeds; one leaves everything open.
        alpha: The probability to miss the true mean.

    Returns:
        The interval.

    >>> interval_of(Mean(0.5, 0.01, 3))
    Interval(low=0.475..., high=0.524...)
    """
    if mean.error is None:
        return Interval(-math.inf, math.inf)
    half = quantile(alpha, mean.count - 1) * mean.error
    return Interval(mean.value - half, mean.value + half)


def interval_of_smallest(means: Sequence[Mean], alpha: float = ALPHA) -> Interval:
    """The interval of the smallest of several true means, whichever it is."""
    low = min(interval_of(mean, alpha).low for mean in means)
    return Interval(low, min(interval_of(mean, alpha / len(means)).high for mean in means))


def interval_of_largest(means: Sequence[Mean], alpha: float = ALPHA) -> Interval:
    """The interval of the largest of several true means, whichever it is."""
    high = max(interval_of(mean, alpha).high for mean in means)
    return Interval(max(interval_of(mean, alpha / len(means)).low for mean in means), high)


def holm(decided_at: Callable[[float], int], family: int) -> float:
    """Holm's step-down: as long as claims are decided, the others share what is left of α.

    Args:
        decided_at: How many claims a level decides.
        family: How many claims there are.

    Returns:
        The level at which all are judged: with a probability of at least 1 − 0.05, each verdict given is right.
    """
    decided = 0
    while decided < family and (found := decided_at(ALPHA / (family - decided))) > decided:
        decided = found
    return ALPHA / max(1, family - decided)


@cache
def quantile(alpha: float, freedom: int) -> float:
    """The t with P(|T| > t) = α."""
    low, high = 0.0, 1.0
    while beyond(high, freedom) > alpha:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(middle, freedom) > alpha else (low, middle)
    return high


def beyond(t: float, freedom: int) -> float:
    """P(|T| > t) for a whole number of degrees of freedom: Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    cos, odd = math.cos(angle), freedom % 2
    term, total = cos if odd else 1.0, 0.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cos * cos * (k - 1) / k
    within = math.sin(angle) * total
    return 1.0 - (2 / math.pi * (angle + within) if odd else within)
