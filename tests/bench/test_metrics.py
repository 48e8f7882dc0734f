"""Measures against matrices worked by hand."""

import pytest

from alasso import AlassoError
from alasso.bench import metrics

#      on task:   1    2    3
MATRIX = [[0.9], [0.7, 0.8], [0.6, 0.9, 1.0]]
REFERENCE = [[0.95], [0.95, 0.9], [0.95, 0.9, 0.97]]


def test_every_measure_by_hand():
    assert metrics.average_accuracy(MATRIX) == pytest.approx((0.6 + 0.9 + 1.0) / 3)
    # Best before the last task: 0.9 on task 1, 0.8 on task 2.
    assert metrics.forgetting(MATRIX) == pytest.approx(((0.9 - 0.6) + (0.8 - 0.9)) / 2)
    assert metrics.learning_accuracy(MATRIX) == pytest.approx((0.9 + 0.8 + 1.0) / 3)
    assert metrics.intransigence(MATRIX, REFERENCE) == pytest.approx((0.05 + 0.1 - 0.03) / 3)
    assert metrics.backward_transfer(MATRIX) == pytest.approx(((0.6 - 0.9) + (0.9 - 0.8)) / 2)
    # mean 2.5/3; deviations −7/30, 2/30, 5/30 → variance (49 + 4 + 25)/900/3
    assert metrics.task_deviation(MATRIX) == pytest.approx((78 / 2700) ** 0.5)
    assert metrics.forward_transfer([0.2, 0.3], [0.1, 0.15, 0.1]) == pytest.approx((0.05 + 0.2) / 2)


def test_forgetting_takes_the_best_past_accuracy_not_the_first():
    assert metrics.forgetting([[0.5], [0.9, 1.0], [0.4, 1.0, 1.0]]) == pytest.approx((0.5 + 0.0) / 2)


def test_a_single_task_has_nothing_to_forget():
    assert metrics.forgetting([[0.7]]) == metrics.backward_transfer([[0.7]]) == metrics.forward_transfer([], [0.1]) == 0


def test_curves():
    assert metrics.accuracy_curve(MATRIX) == pytest.approx([0.9, 0.75, 2.5 / 3])
    assert metrics.deviation_curve(MATRIX)[:2] == pytest.approx([0.0, 0.05])


def test_intransigence_is_absent_without_a_reference():
    found = metrics.summary(MATRIX, ahead=[0.1, 0.1], untrained=[0.1, 0.1, 0.1])
    assert found["I"] is None and found["A"] == pytest.approx(2.5 / 3)
    found = metrics.summary(MATRIX, ahead=[0.1, 0.1], untrained=[0.1, 0.1, 0.1], reference=REFERENCE)
    assert found["I"] == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([], "empty"),
        ([[0.9, 0.7], [0.8]], "transposed"),
        ([[0.9], [0.7, 80.0]], "between 0 and 1"),
        ([[0.9], [0.7, float("nan")]], "between 0 and 1"),
    ],
)
def test_what_is_no_accuracy_matrix_is_refused(matrix, message):
    with pytest.raises(AlassoError, match=message):
        metrics.average_accuracy(matrix)


def test_a_reference_with_too_few_tasks_is_refused():
    with pytest.raises(AlassoError, match="reference run has 2 tasks, this one 3"):
        metrics.intransigence(MATRIX, REFERENCE[:2])
