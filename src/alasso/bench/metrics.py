r"""Measures of continual learning, from the accuracy matrix alone.

``accuracy[t][j]`` is the accuracy on task j after training task t, j ≤ t, both counted from 0: a lower triangle, given
as a list of rows of growing length. With T tasks:

    A    average accuracy      mean_j a[T−1][j]
    F    forgetting            mean over j < T−1 of  max_{l<T−1} a[l][j] − a[T−1][j]  (Chaudhry et al. 2018)
    I    intransigence         mean_j  r[j] − a[j][j],  r: accuracy of a reference that learns task j alone
    std  over tasks            standard deviation of a[T−1][·]
    learning accuracy          mean_j a[j][j]
    backward transfer          mean over j < T−1 of  a[T−1][j] − a[j][j]  (Lopez-Paz & Ranzato 2017)
    forward transfer           mean over j > 0 of  accuracy on j just before learning it − accuracy on j untrained
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from alasso.bench.config import FIELDS, RunConfig, count_of, label
from alasso.errors import AlassoError

if TYPE_CHECKING:
    from alasso.bench.results import Result

Rows = Sequence[Sequence[float]]
Matrix = npt.NDArray[np.float64]


def lower_triangle(accuracy: Rows) -> Matrix:
    """The rows as a square matrix with NaN above the diagonal; refuses what is not a lower triangle of accuracies."""
    count = len(accuracy)
    if count == 0:
        raise AlassoError("the accuracy matrix is empty")
    matrix = np.full((count, count), np.nan)
    for t, row in enumerate(accuracy):
        if len(row) != t + 1:
            raise AlassoError(
                f"row {t + 1} of the accuracy matrix has {len(row)} of {t + 1} entries: is it transposed?"
            )
        matrix[t, : t + 1] = row
    known = matrix[~np.isnan(matrix)]
    if len(known) != count * (count + 1) // 2 or known.min() < 0 or known.max() > 1:
        raise AlassoError("accuracies must be numbers between 0 and 1")
    return matrix


def average_accuracy(accuracy: Rows) -> float:
    """Mean accuracy over all tasks after the last one.

    >>> average_accuracy([[1.0], [0.5, 0.75]])
    0.625
    """
    return float(lower_triangle(accuracy)[-1].mean())


def forgetting(accuracy: Rows) -> float:
    """Mean loss of accuracy since each earlier task was at its best; negative where later tasks helped.

    >>> forgetting([[0.75], [1.0, 0.5], [0.5, 0.75, 1.0]])   # (1.0 − 0.5, 0.5 − 0.75)
    0.125
    """
    matrix = lower_triangle(accuracy)
    if len(matrix) == 1:
        return 0.0
    best_past = np.nanmax(matrix[:-1, :-1], axis=0)
    return float((best_past - matrix[-1, :-1]).mean())


def learning_accuracy(accuracy: Rows) -> float:
    """How well each task was learned when it was learned."""
    return float(np.diag(lower_triangle(accuracy)).mean())


def intransigence(accuracy: Rows, reference: Rows) -> float:
    """What the method could not learn at all, against a run of single_task on the same stream.

    >>> intransigence([[0.75], [0.25, 0.5]], [[1.0], [1.0, 1.0]])
    0.375
    """
    ours, theirs = np.diag(lower_triangle(accuracy)), np.diag(lower_triangle(reference))
    if len(ours) > len(theirs):
        raise AlassoError(f"the reference run has {count_of(len(theirs), 'task')}, this one {len(ours)}")
    return float((theirs[: len(ours)] - ours).mean())


def task_deviation(accuracy: Rows) -> float:
    """Standard deviation of the final accuracy over tasks."""
    return float(lower_triangle(accuracy)[-1].std())


def backward_transfer(accuracy: Rows) -> float:
    """Change of earlier tasks' accuracy by later learning; negative is forgetting.

    >>> backward_transfer([[0.75], [0.5, 1.0]])
    -0.25
    """
    matrix = lower_triangle(accuracy)
    if len(matrix) == 1:
        return 0.0
    return float((matrix[-1, :-1] - np.diag(matrix)[:-1]).mean())


def forward_transfer(ahead: Sequence[float], untrained: Sequence[float]) -> float:
    """Mean accuracy on the next task, above that of the untrained network.

    ``ahead[t]``: accuracy on task t+1 after training task t. ``untrained[j]``: on task j before any training.

    >>> forward_transfer([0.25, 0.5], [0.1, 0.125, 0.125])
    0.25
    """
    if len(untrained) != len(ahead) + 1:
        raise AlassoError("forward transfer needs one accuracy ahead for every task but the first")
    return float((np.asarray(ahead) - np.asarray(untrained[1:])).mean()) if len(ahead) else 0.0


def accuracy_curve(accuracy: Rows) -> list[float]:
    """A after each task: the paper's main figure."""
    return [float(np.mean(row)) for row in accuracy]


def deviation_curve(accuracy: Rows) -> list[float]:
    """Standard deviation over tasks after each task."""
    return [float(np.std(row)) for row in accuracy]


def summary(
    accuracy: Rows, *, ahead: Sequence[float], untrained: Sequence[float], reference: Rows | None = None
) -> dict[str, float | None]:
    """The measures that a result file carries; I is None without a reference run."""
    return {
        "A": average_accuracy(accuracy),
        "F": forgetting(accuracy),
        "I": None if reference is None else intransigence(accuracy, reference),
        "std": task_deviation(accuracy),
        "learning_accuracy": learning_accuracy(accuracy),
        "backward_transfer": backward_transfer(accuracy),
        "forward_transfer": forward_transfer(ahead, untrained),
    }


# -- intransigence: which run the others are measured against ----------------------------------------------------

#: Fields in which a run and its reference may differ.
NOT_THE_STREAM = ("method", "settings", "reset_optimizer", "memory", "memory_share")


def check_reference(reference: Result, configs: Iterable[RunConfig]) -> None:
    """Refuse, before anything runs, a reference that intransigence cannot be measured against."""
    if reference.config.method != "single-task":
        raise AlassoError(f"intransigence is measured against a single-task run, not one of {reference.config.method}")
    for config in configs:
        # Another seed is another stream of the same kind; all else has to be the same.
        theirs = replace(reference.config, seed=config.seed)
        if not same_stream(config, theirs):
            name = stream_differences(config, theirs)[0]
            ours = getattr(config, name)
            raise AlassoError(f"the reference run has {name}={getattr(theirs, name)}, {label(config)} has {ours}")


def other_seed(reference: Result, configs: Iterable[RunConfig]) -> str | None:
    """A line on a reference that learned other tasks of the same kind; None where all learned the same."""
    theirs = reference.config.seed
    others = sorted({config.seed for config in configs} - {theirs})
    if not others:
        return None
    return (
        f"I of seed {', '.join(map(str, others))} is against a reference of seed {theirs}: other tasks of the same kind"
    )


def with_intransigence(result: Result, found: Sequence[Result]) -> Result:
    """With I filled in, if a single-task run on the same stream is among those found."""
    if result.metrics["I"] is not None:
        return result
    for other in found:
        if other.config.method == "single-task" and same_stream(other.config, result.config):
            measured = intransigence(result.accuracy, other.accuracy)
            return replace(result, metrics={**result.metrics, "I": measured})
    return result


def same_stream(one: RunConfig, other: RunConfig) -> bool:
    """Whether two runs learned the same tasks with the same network and effort."""
    return not stream_differences(one, other)


def stream(config: RunConfig) -> tuple[object, ...]:
    """What two runs have alike that learned the same tasks with the same network and effort."""
    return tuple(getattr(config, name) for name in FIELDS if name not in NOT_THE_STREAM)


def stream_differences(one: RunConfig, other: RunConfig) -> list[str]:
    return [name for name in FIELDS if name not in NOT_THE_STREAM and getattr(one, name) != getattr(other, name)]
