"""Student's t, intervals and Holm's correction against references, and how often the intervals are right."""

import math
import statistics

import numpy as np
import pytest

from alasso.bench.report.aggregate import Mean, mean_of
from alasso.bench.reproduce.intervals import (
    beyond,
    holm,
    interval_of,
    interval_of_largest,
    interval_of_smallest,
    quantile,
)

FREEDOMS = [1, 2, 3, 4, 5, 7, 8, 29, 30, 99]


@pytest.mark.parametrize("freedom", FREEDOMS)
def test_students_t_is_that_of_scipy(freedom):
    student = pytest.importorskip("scipy.stats").t
    for t in (0.0, 0.3, 1.0, 2.5, 7.0, 40.0):
        assert beyond(t, freedom) == pytest.approx(2 * student.sf(t, freedom), abs=1e-13)
    for alpha in (0.5, 0.05, 0.05 / 57, 0.05 / 57 / 30):
        assert quantile(alpha, freedom) == pytest.approx(student.isf(alpha / 2, freedom), rel=1e-8)


def test_the_quantiles_of_the_tables():
    assert [round(quantile(0.05, freedom), 3) for freedom in (1, 2, 4, 7, 30)] == [12.706, 4.303, 2.776, 2.365, 2.042]


def test_the_interval_of_a_mean():
    values = [0.61, 0.57, 0.66, 0.60]
    half = 3.182446 * statistics.stdev(values) / 2
    assert interval_of(mean_of(values)) == pytest.approx((0.61 - half, 0.61 + half))
    assert interval_of(mean_of([0.61])) == (-math.inf, math.inf)  # one seed leaves everything open


def test_the_smallest_and_the_largest_of_several():
    """Outward ends are uncorrected; the inward one may be of any of them, and is widened for their number."""
    means = [Mean(0.5, 0.02, 4), Mean(0.6, 0.30, 4), Mean(0.7, 0.01, 4)]
    low = [interval_of(mean).low for mean in means]
    high = [interval_of(mean, 0.05 / 3).high for mean in means]
    assert interval_of_smallest(means) == (min(low), min(high)) and low[1] < low[0]
    mirrored = [Mean(-mean.value, mean.deviation, mean.count) for mean in means]
    assert interval_of_largest(mirrored) == pytest.approx((-min(high), -min(low)))
    assert interval_of_smallest([*means, Mean(0.9)]).low == -math.inf  # a comparison of one seed may be any


def test_intervals_hold_the_true_value_as_often_as_they_say():
    """2,000 draws of five means of four seeds, all alike, where the smallest is hardest to tell: 95 % at least."""
    draws = np.random.default_rng(0).normal(size=(2000, 5, 4))
    means = [[mean_of(seeds) for seeds in draw] for draw in draws.tolist()]
    of_smallest = [interval_of_smallest(some) for some in means]
    assert np.mean([low <= 0 <= high for low, high in of_smallest]) >= 0.94
    alone = [interval_of(some[0]) for some in means]
    assert np.mean([low <= 0 <= high for low, high in alone]) == pytest.approx(0.95, abs=0.015)
    # The interval of whichever mean came out smallest would be wrong more often.
    picked = [interval_of(min(some, key=lambda mean: mean.value)) for some in means]
    assert np.mean([low <= 0 <= high for low, high in picked]) < 0.93


@pytest.mark.parametrize("p_values", [[0.001, 0.011, 0.02, 0.6], [0.2, 0.3], [0.0124, 0.0166, 0.0249, 0.0499], []])
def test_holm_steps_down(p_values):
    decided = 0
    for rank, p in enumerate(sorted(p_values)):
        if p > 0.05 / (len(p_values) - rank):
            break
        decided += 1
    alpha = holm(lambda level: sum(p <= level for p in p_values), len(p_values))
    assert sum(p <= alpha for p in p_values) == decided
