"""The paper's claims as data, and the verdict on each.

A claim *holds* where the mean over seeds meets its bar, and *does not hold* where it misses it. Where the mean lies
nearer to the bar than one standard error of the mean, on either side, the seeds do not decide: *within noise*. With one
seed there is no standard error, and the verdict says how many seeds it rests on. Where results give no number, as a
share of nothing, there is no verdict either: *not computable*.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alasso.bench.config import nearest, read_toml
from alasso.bench.report.style import number
from alasso.bench.reproduce.evidence import Evidence, NotRun, Values, check_measure
from alasso.bench.reproduce.experiments import Experiment, config_of
from alasso.bench.reproduce.statistics import COMPUTATIONS, Finding, arguments_of, references_in
from alasso.bench.results import is_number
from alasso.errors import AlassoError

if TYPE_CHECKING:
    from alasso.bench.probe import Measured

HOLDS, WITHIN_NOISE, DOES_NOT_HOLD = "holds", "within noise", "does not hold"
NOT_COMPUTABLE, NOT_RUN = "not computable", "not run"
VERDICTS = (HOLDS, WITHIN_NOISE, DOES_NOT_HOLD, NOT_COMPUTABLE, NOT_RUN)
#: Of these, those that say nothing on the claim.
UNDECIDED = (NOT_COMPUTABLE, NOT_RUN)


@dataclass(frozen=True)
class Claim:
    """What the paper says, by which bar it is judged, why that bar, and how the number is computed."""

    id: str
    topic: str  # heading under which it is shown
    where: str
    says: str
    why: str  # why this bar
    how: str  # name of the computation
    arguments: Mapping[str, Any]
    paper: float | str | None = None  # its number, or its words where it gives none
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""  # what was tried, or what to know, where it does not hold; a paragraph a line
    quick: bool = False  # whether the quick version can say something about it
    counted: bool = True  # not: what another claim says, once more with another choice of what the paper leaves open

    @property
    def references(self) -> list[str]:
        return list(dict.fromkeys(references_in(self.arguments)))

    def bar(self) -> str:
        """
        >>> Claim("", "", "", "", "", "mean", {}, at_least=0.938, at_most=0.95).bar()
        '0.938 to 0.950'
        >>> Claim("", "", "", "", "", "mean", {}, at_most=1e-5).bar()
        '≤ 0.00001'
        """
        ends = [end for end in (self.at_least, self.at_most) if end is not None]
        digits = max(map(digits_of, ends))
        low, high = (None if end is None else number(end, digits) for end in (self.at_least, self.at_most))
        if low and high:
            return f"{low} to {high}"
        return f"≤ {high}" if high else "above 0" if self.strict else f"≥ {low}"

    @property
    def strict(self) -> bool:
        """An order: zero itself does not meet it."""
        return self.at_least == 0 and self.at_most is None

    def margin(self, value: float) -> float:
        """How far inside the bar; negative outside."""
        room = [value - self.at_least] if self.at_least is not None else []
        room += [self.at_most - value] if self.at_most is not None else []
        return min(room)


def digits_of(end: float) -> int:
    """After the point, as it is written."""
    return len(f"{Decimal(repr(end)).normalize():f}".partition(".")[2])


@dataclass(frozen=True)
class Untested:
    """A statement of the paper that no number here stands for, and why."""

    where: str
    says: str
    why: str


@dataclass(frozen=True)
class Claims:
    tested: list[Claim] = field(default_factory=list)
    untested: list[Untested] = field(default_factory=list)


@dataclass(frozen=True)
class Judged:
    claim: Claim
    verdict: str
    finding: Finding | None = None
    missing: list[str] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)  # runs that are there, but with no seed in common
    edition: str = ""  # of the data, where it is not the published one
    diverged: str = ""  # which of its runs came to no end: what is found is of the others


def judge(claim: Claim, evidence: Evidence) -> Judged:
    try:
        finding = COMPUTATIONS[claim.how](evidence, **claim.arguments)
    except NotRun as not_run:
        hopeless = [reference for reference in not_run.missing if evidence.all_diverged(reference)]
        hopeless += not_run.apart if evidence.all_diverged(*not_run.apart) else []
        if hopeless:  # which no run will change
            return Judged(claim, NOT_COMPUTABLE, diverged=evidence.divergences(hopeless))
        return Judged(claim, NOT_RUN, None, not_run.missing, not_run.apart)
    edition, diverged = evidence.edition(claim.references), evidence.divergences(claim.references)
    return Judged(claim, verdict_on(claim, finding), finding, edition=edition, diverged=diverged)


def verdict_on(claim: Claim, finding: Finding) -> str:
    if math.isnan(finding.value):  # which misses every bar, and says nothing on the claim
        return NOT_COMPUTABLE
    margin = claim.margin(finding.value)
    if finding.error is not None and abs(margin) < finding.error:
        return WITHIN_NOISE
    met = margin > 0 or (margin == 0 and not claim.strict)
    return HOLDS if met else DOES_NOT_HOLD


def judge_all(claims: Iterable[Claim], evidence: Evidence) -> list[Judged]:
    return [judge(claim, evidence) for claim in claims]


def about(claims: Iterable[Claim], experiments: Iterable[Experiment]) -> list[Claim]:
    """Claims that rest on one of the experiments."""
    names = {experiment.id for experiment in experiments}
    return [claim for claim in claims if names & {ref.partition("/")[0] for ref in claim.references}]


# -- reading ------------------------------------------------------------------------------------------------------

OWN_FIELDS = ("id", "topic", "where", "says", "why", "how", "paper", "at_least", "at_most", "note", "quick", "counted")


def read_claims(folder: Path, experiments: Mapping[str, Experiment]) -> Claims:
    """``claims.toml`` of a study; every name in it is checked, so that no claim fails only after hours of running."""
    path = folder / "claims.toml"
    if not path.exists():
        return Claims()
    raw = read_toml(path)
    for kind, listed in raw.items():
        if kind not in ("claim", "untested"):
            raise AlassoError(f"{path}: no such table: {kind!r}{nearest(kind, ('claim', 'untested'))}")
        if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
            raise AlassoError(f"{path}: write [[{kind}]], with two brackets on each side: there may be several")
    try:
        claims = [_claim(one, experiments) for one in raw.get("claim", [])]
        untested = [Untested(**one) for one in raw.get("untested", [])]
    except AlassoError as error:
        raise AlassoError(f"{path}: {error}") from error
    except TypeError as error:
        raise AlassoError(f"{path}: an untested statement has where, says and why") from error
    names = [claim.id for claim in claims]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise AlassoError(f"{path}: two claims are called {twice[0]!r}")
    return Claims(claims, untested)


def _claim(raw: Mapping[str, Any], experiments: Mapping[str, Experiment]) -> Claim:
    name = raw.get("id", "a claim without id")
    if lacking := [key for key in ("id", "topic", "where", "says", "why", "how") if key not in raw]:
        raise AlassoError(f"{name}: {lacking[0]} is missing")
    check_kinds(name, raw)
    how = raw["how"]
    if how not in COMPUTATIONS:
        raise AlassoError(f"{name}: there is no computation {how!r}{nearest(how, COMPUTATIONS)}")
    arguments = {key: value for key, value in raw.items() if key not in OWN_FIELDS}
    allowed = arguments_of(how)
    if unknown := sorted(set(arguments) - set(allowed)):
        raise AlassoError(f"{name}: {how} takes no {unknown[0]!r}{nearest(unknown[0], (*allowed, *OWN_FIELDS))}")
    if "at_least" not in raw and "at_most" not in raw:
        raise AlassoError(f"{name}: a bar is missing: at_least, at_most or both")
    if lacking := [key for key, needed in allowed.items() if needed and key not in arguments]:
        raise AlassoError(f"{name}: {how} needs {lacking[0]!r}")
    for reference in references_in(arguments):
        config_of(experiments, reference)
    check_arguments(f"{name}: {how}", how, arguments, experiments)
    return Claim(**{key: raw[key] for key in OWN_FIELDS if key in raw}, arguments=arguments)


class Rehearsal(Evidence):
    """Evidence with made-up numbers: what a computation complains of here, it would complain of after all runs."""

    def measured(self, references: Sequence[str], measure: str) -> dict[str, Values]:
        for reference in references:
            if isinstance(reference, str) and len(reference) == 1:  # of a text that was taken apart
                raise AlassoError("a list of runs belongs where a text stands, or a list of lists where a list does")
            if not isinstance(reference, str) or "/" not in reference:
                raise AlassoError(f"{reference!r} names no run: write experiment/run")
            self.check_that_it_is_trained(reference)
        check_measure(measure)
        if measure == "I":
            self.check_that_single_task_is_run(references)
        return {ref: {0: self.made_up(ref), 1: 0.5} for ref in references}

    def check_that_it_is_trained(self, reference: str) -> None:
        """By whichever experiment: one with [probe] moves weights after the first task, and has no accuracies."""
        trained = {c.hash for one in self.experiments.values() if one.probe is None for c in one.configs(1)}
        if self.config_hash(reference) not in trained:
            raise AlassoError(f"{reference} is probed and not trained to its end: no other experiment has that run")

    def check_that_single_task_is_run(self, references: Sequence[str]) -> None:
        """By whichever experiment: intransigence is measured against it."""
        for reference in references:
            if not self.single_task_beside(reference):
                raise AlassoError(f"I is measured against single-task, of which there is no run beside {reference}")

    def made_up(self, reference: str) -> float:
        """A number of its own for each run."""
        return int(self.config_hash(reference), 16) / 16**10

    def probes(self, reference: str) -> dict[int, Measured]:
        name, _, _ = reference.partition("/")
        if self.experiments[name].probe is None:
            raise AlassoError(f"experiment {name} has no [probe], by which its weights would be moved")
        raise NotRun([reference])


def check_arguments(what: str, how: str, arguments: Mapping[str, Any], experiments: Mapping[str, Experiment]) -> None:
    """Before anything is run: the computation is made once, on made-up numbers."""
    try:
        COMPUTATIONS[how](Rehearsal(experiments, []), **arguments)
    except NotRun:
        return
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        if isinstance(error, AlassoError):  # which is a ValueError, and says more
            raise AlassoError(f"{what}: {error}") from error
        raise AlassoError(f"{what} cannot be computed from {dict(arguments)}") from error


TEXTS = ("id", "topic", "where", "says", "why", "how", "note")
FLAGS = ("quick", "counted")
BARS = ("at_least", "at_most")


def check_kinds(name: object, raw: Mapping[str, Any]) -> None:
    """Texts are texts, and bars numbers that can be met."""
    for key in TEXTS:
        if not isinstance(raw.get(key, ""), str):
            raise AlassoError(f"{name}: {key} must be a text, not {raw[key]!r}")
    for key in FLAGS:
        if not isinstance(raw.get(key, True), bool):
            raise AlassoError(f"{name}: {key} must be true or false, not {raw[key]!r}")
    if "paper" in raw and not isinstance(raw["paper"], str) and not is_number(raw["paper"]):
        raise AlassoError(f"{name}: paper must be its number or its words, not {raw['paper']!r}")
    for key in BARS:
        if key in raw and (not is_number(raw[key]) or math.isnan(raw[key])):
            raise AlassoError(f"{name}: {key} must be a number, not {raw[key]!r}")
    if all(key in raw for key in BARS) and raw["at_least"] > raw["at_most"]:
        raise AlassoError(f"{name}: no number is at least {raw['at_least']} and at most {raw['at_most']}")


def tally(judged: Sequence[Judged]) -> dict[str, int]:
    """How many of the claims given have which verdict."""
    return {verdict: sum(one.verdict == verdict for one in judged) for verdict in VERDICTS}
