"""How a claim's number is computed from results: a few named functions, and nothing that runs text as code.

Each takes the evidence and the arguments that the claim's file gives, and returns a :class:`Finding`. Runs are compared
seed by seed, over the seeds that all in the comparison have; of several comparisons the least or the largest counts,
by what each comes to, and all of them make the interval (:mod:`~alasso.bench.reproduce.intervals`). Which run is the
best of several is decided by the means over the seeds that all have, so that no seed picks its own winner; the winner
counts with all its seeds.
"""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import numpy.typing as npt

from alasso.bench import metrics
from alasso.bench.config import count_of
from alasso.bench.probe import Measured
from alasso.bench.report.aggregate import Array, Mean, mean_of, paired
from alasso.bench.reproduce.experiments import Evidence, Values
from alasso.bench.reproduce.intervals import (
    ALPHA,
    Interval,
    interval_of,
    interval_of_largest,
    interval_of_smallest,
)
from alasso.errors import AlassoError


@dataclass(frozen=True)
class Finding(Mean):
    """What a computation comes to: a mean over seeds, and what to know about it.

    Args:
        note: What to know.
        least_of: All means of which this is the smallest.
        most_of: All means of which this is the largest.
    """

    note: str = ""
    least_of: Sequence[Mean] = ()
    most_of: Sequence[Mean] = ()

    def interval(self, alpha: float = ALPHA) -> Interval:
        """Where the true value lies, with a probability of 1 − α."""
        if self.least_of:
            return interval_of_smallest(self.least_of, alpha)
        return interval_of_largest(self.most_of, alpha) if self.most_of else interval_of(self, alpha)


NO_DISTANCE = Mean(0.0, 0.0, 2)  # nothing lies nearer, whatever the seeds


def over_seeds(values: Values, note: str = "") -> Finding:
    """Averages over seeds.

    Args:
        values: Seed → value.
        note: What to know about it.

    Returns:
        Mean and deviation; NaN where there is no seed, or one without a number.
    """
    unknown = any(map(math.isnan, values.values()))
    found = None if unknown else mean_of(values.values())
    if found is None:
        return Finding(math.nan, None, len(values), note)
    return Finding(found.value, found.deviation, found.count, note)


def gap(evidence: Evidence, of: str, less: str, measure: str, note: str = "") -> Finding:
    """A measure of one run less that of another."""
    values = evidence.values([of, less], measure)
    return over_seeds(paired(values[less], values[of]), note)


def smallest(evidence: Evidence, pairs: Iterable[tuple[str, str]], measure: str, note: str) -> Finding:
    """The smallest of several gaps, from the lower run of a pair to the higher one."""
    pairs = list(pairs)
    evidence.measured(list(dict.fromkeys(ref for pair in pairs for ref in pair)), measure)
    gaps = [
        gap(evidence, high, low, measure, note.format(low=run_name(low), high=run_name(high))) for low, high in pairs
    ]
    return replace(min(gaps, key=lambda finding: finding.value), least_of=gaps)


def best_of(evidence: Evidence, references: Sequence[str], measure: str) -> str:
    """The run with the largest mean, over the seeds that all have."""
    values = evidence.values(references, measure)
    return max(references, key=lambda ref: over_seeds(values[ref]).value)


def run_name(reference: str) -> str:
    """``run`` of ``experiment/run``."""
    return reference.partition("/")[2]


# -- computations -------------------------------------------------------------------------------------------------


def mean(evidence: Evidence, *, of: str, measure: str = "A") -> Finding:
    """A measure of one run."""
    return over_seeds(evidence.values([of], measure)[of])


def difference(evidence: Evidence, *, of: str, less: str, measure: str = "A") -> Finding:
    """A measure of one run less that of another."""
    return gap(evidence, of, less, measure)


def gap_to_best_other(evidence: Evidence, *, of: str, others: Sequence[str], measure: str = "A") -> Finding:
    """How far a run lies above the best of others."""
    return smallest(evidence, [(other, of) for other in others], measure, "best other: {low}")


def gap_to_least_other(evidence: Evidence, *, of: str, others: Sequence[str], measure: str) -> Finding:
    """How far a run lies below the least of others, for measures of which less is better."""
    return smallest(evidence, [(of, other) for other in others], measure, "least other: {high}")


def order(evidence: Evidence, *, rising: Sequence[Sequence[str]], measure: str = "A") -> Finding:
    """The smallest step from any run of one level to any run of the next: above zero where the levels rise."""
    steps = [(low, high) for below, level in pairwise(rising) for low in below for high in level]
    return smallest(evidence, steps, measure, "smallest step: {low} → {high}")


def best(evidence: Evidence, *, among: Sequence[str], measure: str = "A") -> Finding:
    """The best of several runs."""
    top = best_of(evidence, among, measure)
    means = [mean(evidence, of=reference, measure=measure) for reference in among]
    return replace(mean(evidence, of=top, measure=measure), note=f"best: {run_name(top)}", most_of=means)


def spread(evidence: Evidence, *, over: Sequence[str], measure: str = "A") -> Finding:
    """The best less the worst of several runs."""
    evidence.measured(over, measure)
    ranges = [
        gap(evidence, high, low, measure, f"from {run_name(low)} to {run_name(high)}")
        for low, high in permutations(over, 2)
    ]
    return replace(max(ranges, key=lambda finding: finding.value), most_of=[*ranges, NO_DISTANCE])


def gain_of_best(evidence: Evidence, *, among: Sequence[str], less: str, measure: str = "A") -> Finding:
    """The best of several runs less another one."""
    evidence.measured([*among, less], measure)
    top = best_of(evidence, among, measure)
    gains = [gap(evidence, reference, less, measure) for reference in among]
    return replace(gap(evidence, top, less, measure, f"best: {run_name(top)}"), most_of=gains)


def largest_deviation(evidence: Evidence, *, table: Mapping[str, float], measure: str = "A") -> Finding:
    """How far the run that lies farthest from the paper's table lies from it."""
    found = {ref: over_seeds(values) for ref, values in evidence.measured(list(table), measure).items()}
    shown = ", ".join(f"{run_name(ref)}: {of_run.value:.3f}" for ref, of_run in found.items())
    above = [replace(of_run, value=of_run.value - table[ref], note=shown) for ref, of_run in found.items()]
    away = [*above, *(replace(one, value=-one.value) for one in above)]
    return replace(max(away, key=lambda finding: finding.value), most_of=[*away, NO_DISTANCE])


def smaller_loss(
    evidence: Evidence, *, of: Sequence[str], others: Sequence[Sequence[str]], measure: str = "A"
) -> Finding:
    """By how much less a run loses from one setting to another (two names each) than whichever other loses least."""
    evidence.measured([*of, *(ref for pair in others for ref in pair)], measure)
    found = []
    for before, after in others:
        values = evidence.values([*of, before, after], measure)
        own, other = paired(values[of[1]], values[of[0]]), paired(values[after], values[before])
        losses = f"loses {over_seeds(own).value:.3f}; {run_name(before)} loses {over_seeds(other).value:.3f}"
        found.append(over_seeds(paired(own, other), losses))
    return replace(min(found, key=lambda finding: finding.value), least_of=found)


def recovered(evidence: Evidence, *, of: str, floor: str, ceiling: str, measure: str = "A") -> Finding:
    """Which share of the way from one run to another a third one has gone."""
    values = evidence.values([of, floor, ceiling], measure)
    gone, whole = paired(values[floor], values[of]), paired(values[floor], values[ceiling])
    shares = {seed: gone[seed] / whole[seed] for seed in gone if whole[seed]}
    return over_seeds(shares, "" if shares else "floor and ceiling are equal")


def growth_of_gap(evidence: Evidence, *, of: str, less: str) -> Finding:
    """The gap in mean accuracy after all tasks less the gap half way."""
    seeds = evidence.values([of, less])[of]
    rises: dict[str, Values] = {}
    for reference, group in evidence.groups([of, less]).items():
        curves = {r.config.seed: metrics.accuracy_curve(r.accuracy) for r in group.results if r.config.seed in seeds}
        rises[reference] = {seed: curve[-1] - curve[len(curve) // 2 - 1] for seed, curve in curves.items()}
    return over_seeds(paired(rises[less], rises[of]))


def tasks_near(evidence: Evidence, *, of: str, bound: str, every: int = 5, within: float = 0.01) -> Finding:
    """At which share of every so-many-th tasks the final accuracy comes near another run's.

    Seed by seed: a task has other classes, or pixels elsewhere, with each.
    """
    found, near = evidence.groups([of, bound]), {}
    for seed in evidence.values([of, bound])[of]:
        own, other = (found[ref].matrices[found[ref].seeds.index(seed), -1, every - 1 :: every] for ref in (of, bound))
        near[seed] = own >= other - within
    return of_each_seed(near, np.mean, lambda count: f"{sum(map(sum, near.values()))} of {count_of(count, 'task')}")


def probe_evenness(evidence: Evidence, *, of: str) -> Finding:
    """Median over weights of the loss's change on the shallow side over its rise on the steep side; 1: symmetric."""
    return of_each_seed({seed: one.shallow_over_steep() for seed, one in evidence.probes(of).items()}, np.median)


def probe_underestimated(
    evidence: Evidence, *, of: str, surrogate: str = "SI", at: float | None = None, rise: float = 0.0
) -> Finding:
    """Of weights whose loss rises on the side training did not see, the share where the surrogate lies below the loss.

    At the far end of the line or, with ``at``, so far from where training ended. ``rise``: of weights whose loss rises
    there by more than this share of itself.
    """
    found = {}
    for seed, measured in evidence.probes(of).items():
        moved, true = on_unseen_side(measured, measured.changes(), at)
        _, guessed = on_unseen_side(measured, measured.surrogate(surrogate), at)
        at_rest = measured.losses[0][measured.middle]  # the same, whichever weight is to move
        rises = moved & (true > rise * at_rest)
        found[seed] = guessed[rises] < true[rises]
    return share_of_weights(found)


def probe_unseen_is_steeper(evidence: Evidence, *, of: str) -> Finding:
    """Of weights that moved and matter, the share whose loss is higher at the unseen end than at the seen one.

    A symmetric function that fits the seen side is too low on the unseen side of these, and of no others.
    """
    found = {}
    for seed, measured in evidence.probes(of).items():
        moved, unseen_end = on_unseen_side(measured, measured.changes())
        _, seen_end = on_unseen_side(measured, measured.changes()[:, ::-1])
        matters = moved & (unseen_end != seen_end)
        found[seed] = unseen_end[matters] > seen_end[matters]
    return share_of_weights(found)


def on_unseen_side(measured: Measured, lines: Array, at: float | None = None) -> tuple[npt.NDArray[np.bool_], Array]:
    """Which weights moved at all, and each line's value on the side that training did not come from, at its end or at
    the place nearest to a distance.
    """
    came_from, middle = np.array(measured.came_from), measured.middle
    right = np.array(measured.offsets[middle + 1 :])
    if at is not None and not 0 < at <= measured.plan.span:
        raise AlassoError(f"at must lie above 0 and not above {measured.plan.span:g}, where the lines end, not {at}")
    steps = len(right) if at is None else 1 + int(np.abs(right - at).argmin())
    place = np.where(came_from > 0, middle - steps, middle + steps)  # came from the right: the left side is unseen
    return came_from != 0, lines[np.arange(len(lines)), place]


def share_of_weights(found: Mapping[int, npt.NDArray[np.bool_]]) -> Finding:
    """The deviation is not below that of shares of so few weights, drawn by chance: seeds may agree by luck."""
    finding = of_each_seed(found, np.mean)
    if finding.deviation is None:
        return finding
    drawn = math.sqrt(statistics.fmean(of.mean() * (1 - of.mean()) / len(of) for of in found.values()))
    return replace(finding, deviation=max(finding.deviation, drawn))


def of_each_seed(
    found: Mapping[int, npt.NDArray[Any]],
    summed_up: Callable[[npt.NDArray[Any]], Any],
    note: Callable[[int], str] = lambda count: count_of(count, "weight"),
) -> Finding:
    """Over seeds, what each seed's numbers come to; ``note`` says how many they are in all."""
    values = {seed: float(summed_up(numbers)) if len(numbers) else math.nan for seed, numbers in found.items()}
    return over_seeds(values, note(sum(map(len, found.values()))))


COMPUTATIONS: dict[str, Callable[..., Finding]] = {
    function.__name__: function
    for function in (
        mean, difference, gap_to_best_other, gap_to_least_other, order, best, spread, gain_of_best, largest_deviation,
        smaller_loss, recovered, growth_of_gap, tasks_near, probe_evenness, probe_underestimated,
        probe_unseen_is_steeper,
    )
}  # fmt: skip


def check_arguments(computation: str, arguments: Mapping[str, Any]) -> None:
    """Refuses arguments that a computation does not take, and names those that it lacks."""
    try:
        inspect.signature(COMPUTATIONS[computation]).bind(None, **arguments)
    except TypeError as error:
        raise AlassoError(f"{computation}: {error}") from error


def references_in(arguments: Any) -> list[str]:
    """Every ``experiment/run`` among a claim's arguments, however deep."""
    if isinstance(arguments, str):
        return [arguments] if "/" in arguments else []
    if isinstance(arguments, Mapping):
        return [ref for item in (*arguments.keys(), *arguments.values()) for ref in references_in(item)]
    if isinstance(arguments, Sequence):
        return [ref for item in arguments for ref in references_in(item)]
    return []
