"""How a claim's number is computed from results: a few named functions, and nothing that runs text as code.

Each takes the evidence and the arguments that the claim's file gives, and returns a :class:`Finding`. Runs are compared
seed by seed, over the seeds that all in the comparison have; of several comparisons the least or the largest counts,
by what each comes to. Which run is the best of several is decided by the means over the seeds that all have, so that
no seed picks its own winner; the winner counts with all its seeds.
"""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from alasso.bench import metrics
from alasso.bench.labels import count_of
from alasso.bench.probe import check_surrogate
from alasso.bench.report.aggregate import Array
from alasso.bench.reproduce.evidence import Evidence, Values
from alasso.errors import AlassoError

if TYPE_CHECKING:
    from alasso.bench.probe import Measured


@dataclass(frozen=True)
class Finding:
    """Mean over seeds, standard deviation over seeds (None: one seed), how many seeds, and what to know about it."""

    value: float
    deviation: float | None = None
    seeds: int = 1
    note: str = ""

    @property
    def error(self) -> float | None:
        """Standard error of the mean."""
        return None if self.deviation is None else self.deviation / math.sqrt(self.seeds)


def over_seeds(values: Values, note: str = "") -> Finding:
    numbers = list(values.values())
    if any(map(math.isnan, numbers)):
        return Finding(math.nan, None, len(numbers), note)
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else None
    return Finding(statistics.fmean(numbers), deviation, len(numbers), note)


def minus(one: Values, other: Values) -> Values:
    return {seed: one[seed] - other[seed] for seed in one}


def average(values: Values) -> float:
    return statistics.fmean(values.values())


def run_name(reference: str) -> str:
    return reference.partition("/")[2]


def require(evidence: Evidence, references: Sequence[str], measure: str) -> None:
    """Say all that is missing, and not only what is asked for first."""
    evidence.measured(references, measure)


def value_of(finding: Finding) -> float:
    return finding.value


def gap(evidence: Evidence, of: str, less: str, measure: str, note: str) -> Finding:
    return replace(difference(evidence, of=of, less=less, measure=measure), note=note)


def best_of(evidence: Evidence, references: Sequence[str], measure: str) -> str:
    values = evidence.values(references, measure)
    return max(references, key=lambda ref: average(values[ref]))


# -- computations -------------------------------------------------------------------------------------------------


def mean(evidence: Evidence, *, of: str, measure: str = "A") -> Finding:
    """A measure of one run."""
    return over_seeds(evidence.values([of], measure)[of])


def difference(evidence: Evidence, *, of: str, less: str, measure: str = "A") -> Finding:
    """A measure of one run less that of another."""
    values = evidence.values([of, less], measure)
    return over_seeds(minus(values[of], values[less]))


def gap_to_best_other(evidence: Evidence, *, of: str, others: Sequence[str], measure: str = "A") -> Finding:
    """How far a run lies above the best of others."""
    require(evidence, [of, *others], measure)
    return min((gap(evidence, of, ref, measure, f"best other: {run_name(ref)}") for ref in others), key=value_of)


def gap_to_least_other(evidence: Evidence, *, of: str, others: Sequence[str], measure: str) -> Finding:
    """How far a run lies below the least of others, for measures of which less is better."""
    require(evidence, [of, *others], measure)
    return min((gap(evidence, ref, of, measure, f"least other: {run_name(ref)}") for ref in others), key=value_of)


def order(evidence: Evidence, *, rising: Sequence[Sequence[str]], measure: str = "A") -> Finding:
    """The smallest step from any run of one level to any run of the next: above zero where the levels rise."""
    require(evidence, [ref for level in rising for ref in level], measure)
    pairs = [(low, high) for below, level in pairwise(rising) for low in below for high in level]
    steps = [
        gap(evidence, high, low, measure, f"smallest step: {run_name(low)} → {run_name(high)}") for low, high in pairs
    ]
    return min(steps, key=value_of)


def best(evidence: Evidence, *, among: Sequence[str], measure: str = "A") -> Finding:
    """The best of several runs."""
    top = best_of(evidence, among, measure)
    return replace(mean(evidence, of=top, measure=measure), note=f"best: {run_name(top)}")


def spread(evidence: Evidence, *, over: Sequence[str], measure: str = "A") -> Finding:
    """The best less the worst of several runs."""
    require(evidence, over, measure)
    ranges = [
        gap(evidence, high, low, measure, f"from {run_name(low)} to {run_name(high)}")
        for low, high in permutations(over, 2)
    ]
    return max(ranges, key=value_of)


def gain_of_best(evidence: Evidence, *, among: Sequence[str], less: str, measure: str = "A") -> Finding:
    """The best of several runs less another one."""
    require(evidence, [*among, less], measure)
    top = best_of(evidence, among, measure)
    return replace(difference(evidence, of=top, less=less, measure=measure), note=f"best: {run_name(top)}")


def largest_deviation(evidence: Evidence, *, table: Mapping[str, float], measure: str = "A") -> Finding:
    """How far the run that lies farthest from the paper's table lies from it."""
    require(evidence, list(table), measure)
    found = {ref: mean(evidence, of=ref, measure=measure) for ref in table}
    shown = ", ".join(f"{run_name(ref)}: {of_run.value:.3f}" for ref, of_run in found.items())
    away = [replace(of_run, value=abs(of_run.value - table[ref]), note=shown) for ref, of_run in found.items()]
    return max(away, key=value_of)


def smaller_loss(
    evidence: Evidence, *, of: Sequence[str], others: Sequence[Sequence[str]], measure: str = "A"
) -> Finding:
    """By how much less a run loses from one setting to another (two names each) than whichever other loses least."""
    require(evidence, [*of, *(ref for pair in others for ref in pair)], measure)
    found = []
    for before, after in others:
        values = evidence.values([*of, before, after], measure)
        own, other = minus(values[of[0]], values[of[1]]), minus(values[before], values[after])
        note = f"loses {average(own):.3f}; {run_name(before)} loses {average(other):.3f}"
        found.append(over_seeds(minus(other, own), note))
    return min(found, key=value_of)


def recovered(evidence: Evidence, *, of: str, floor: str, ceiling: str, measure: str = "A") -> Finding:
    """Which share of the way from one run to another a third one has gone."""
    values = evidence.values([of, floor, ceiling], measure)
    shares = {
        seed: (values[of][seed] - values[floor][seed]) / (values[ceiling][seed] - values[floor][seed])
        for seed in values[of]
        if values[ceiling][seed] != values[floor][seed]
    }
    return over_seeds(shares) if shares else Finding(math.nan, None, 0, "floor and ceiling are equal")


def growth_of_gap(evidence: Evidence, *, of: str, less: str) -> Finding:
    """The gap in mean accuracy after all tasks less the gap half way."""
    seeds = evidence.values([of, less])[of]
    rises: dict[str, Values] = {}
    for reference, group in evidence.groups([of, less]).items():
        curves = {r.config.seed: metrics.accuracy_curve(r.accuracy) for r in group.results if r.config.seed in seeds}
        rises[reference] = {seed: curve[-1] - curve[len(curve) // 2 - 1] for seed, curve in curves.items()}
    return over_seeds(minus(rises[of], rises[less]))


def tasks_near(evidence: Evidence, *, of: str, bound: str, every: int = 5, within: float = 0.01) -> Finding:
    """At which share of every so-many-th tasks the final accuracy comes near another run's.

    Seed by seed: a task has other classes, or pixels elsewhere, with each.
    """
    seeds = evidence.values([of, bound])[of]
    found = evidence.groups([of, bound])
    near = {}
    for seed in seeds:
        own, other = (found[ref].matrices[found[ref].seeds.index(seed), -1, every - 1 :: every] for ref in (of, bound))
        near[seed] = own >= other - within
    shares = {seed: float(tasks.mean()) if len(tasks) else math.nan for seed, tasks in near.items()}
    of_all = np.concatenate(list(near.values()))
    return over_seeds(shares, f"{of_all.sum()} of {count_of(len(of_all), 'task')}")


def probe_evenness(evidence: Evidence, *, of: str) -> Finding:
    """Median over weights of the loss's change on the shallow side over its rise on the steep side; 1: symmetric."""
    found = {seed: measured.shallow_over_steep() for seed, measured in evidence.probes(of).items()}
    return of_weights(found, np.median)


def probe_underestimated(
    evidence: Evidence, *, of: str, surrogate: str = "SI", at: float | None = None, rise: float = 0.0
) -> Finding:
    """Of weights whose loss rises on the side training did not see, the share where the surrogate lies below the loss.

    At the far end of the line or, with ``at``, so far from where training ended. ``rise``: of weights whose loss rises
    there by more than this share of itself.
    """
    check_surrogate(surrogate)
    found = {}
    for seed, measured in evidence.probes(of).items():
        unseen, true = on_unseen_side(measured, measured.changes(), at)
        _, guessed = on_unseen_side(measured, measured.surrogate(surrogate), at)
        at_rest = measured.losses[0][measured.middle]  # the same, whichever weight is to move
        rises = unseen & (true > rise * at_rest)
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
        raise AlassoError(
            f"at must be above 0 and at most {measured.plan.span:g}, where the probe's lines end, not {at}"
        )
    steps = len(right) if at is None else 1 + int(np.abs(right - at).argmin())
    place = np.where(came_from > 0, middle - steps, middle + steps)  # came from the right: the left side is unseen
    return came_from != 0, lines[np.arange(len(lines)), place]


def share_of_weights(found: Mapping[int, npt.NDArray[np.bool_]]) -> Finding:
    """The deviation is not below that of shares of so few weights, drawn by chance: seeds may agree by luck."""
    finding = of_weights(found, np.mean)
    if finding.deviation is None:
        return finding
    drawn = math.sqrt(statistics.fmean(of.mean() * (1 - of.mean()) / len(of) for of in found.values()))
    return replace(finding, deviation=max(finding.deviation, drawn))


def of_weights(found: Mapping[int, npt.NDArray[Any]], summed_up: Callable[[npt.NDArray[Any]], Any]) -> Finding:
    """Over seeds, what each seed's weights come to; how many weights that are, in all."""
    values = {seed: float(summed_up(numbers)) if len(numbers) else math.nan for seed, numbers in found.items()}
    return over_seeds(values, count_of(sum(map(len, found.values())), "weight"))


Computation = Callable[..., Finding]
COMPUTATIONS: dict[str, Computation] = {
    function.__name__: function
    for function in (
        mean, difference, gap_to_best_other, gap_to_least_other, order, best, spread, gain_of_best, largest_deviation,
        smaller_loss, recovered, growth_of_gap, tasks_near, probe_evenness, probe_underestimated,
        probe_unseen_is_steeper,
    )
}  # fmt: skip


def arguments_of(computation: str) -> dict[str, bool]:
    """Names of a computation's arguments, and whether each must be given."""
    parameters = inspect.signature(COMPUTATIONS[computation]).parameters.values()
    return {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}


def references_in(arguments: Any) -> list[str]:
    """Every ``experiment/run`` among a claim's arguments, however deep."""
    if isinstance(arguments, str):
        return [arguments] if "/" in arguments else []
    if isinstance(arguments, Mapping):
        return [ref for item in (*arguments.keys(), *arguments.values()) for ref in references_in(item)]
    if isinstance(arguments, Sequence):
        return [ref for item in arguments for ref in references_in(item)]
    return []
