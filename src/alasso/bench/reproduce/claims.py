"""The paper's claims as data, the verdict on each, and how both are put in words.

A claim *holds* where its whole interval over seeds meets its bar, and *does not hold* where its whole interval misses
it; anything else, and one seed, is *undecided*. So a claim of an order is tested against zero, one of at least so much
against that bar, one of a number near the paper's against both ends of its bar; and one about several runs holds where
each of its comparisons does. The interval shown has 95 %. The one that decides is wider: by Holm's correction, all
verdicts on the counted claims together are right with 95 %. Claims in brackets decide by the 95 % interval. Where
results give no number, as a share of nothing, there is no verdict: *not computable*.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from alasso.bench import schema
from alasso.bench.config import count_of, nearest
from alasso.bench.report.style import number
from alasso.bench.reproduce.experiments import Evidence, Experiment, NotRun, config_of, no_seed_in_common
from alasso.bench.reproduce.intervals import ALPHA, holm
from alasso.bench.reproduce.statistics import COMPUTATIONS, Finding, check_arguments, references_in
from alasso.errors import AlassoError

HOLDS, DOES_NOT_HOLD, UNDECIDED = "holds", "does not hold", "undecided"
NOT_COMPUTABLE, NOT_RUN = "not computable", "planned"
VERDICTS = (HOLDS, DOES_NOT_HOLD, UNDECIDED, NOT_COMPUTABLE, NOT_RUN)
#: Marks a claim that its own 95 % interval decides, and all claims together do not.
ALONE = "‡"


@dataclass(frozen=True)
class Claim:
    """A statement of the paper with the bar by which it is judged.

    Args:
        id: Its name.
        topic: The heading under which it is shown.
        where: Where the paper says it.
        says: What the paper says.
        why: Why this bar.
        how: Name of the computation, one of :data:`COMPUTATIONS`.
        arguments: Its arguments.
        paper: The paper's number, or its words where it gives none.
        at_least: The bar's lower end.
        at_most: The bar's upper end.
        note: What to know where it does not hold; a paragraph a line.
        counted: False for what repeats another claim with another choice of what the paper leaves open, and for what
            goes beyond the paper.
    """

    id: str
    topic: str
    where: str
    says: str
    why: str
    how: str
    arguments: Mapping[str, Any]
    paper: float | str = "–"
    at_least: float = -math.inf
    at_most: float = math.inf
    note: str = ""
    counted: bool = True

    @property
    def references(self) -> list[str]:
        """The runs it rests on."""
        return list(dict.fromkeys(references_in(self.arguments)))

    def bar(self) -> str:
        """Writes the bar.

        Returns:
            Its ends with all their digits.

        >>> Claim("", "", "", "", "", "mean", {}, at_least=0.938, at_most=0.95).bar()
        '0.938 to 0.950'
        >>> Claim("", "", "", "", "", "mean", {}, at_most=1e-5).bar()
        '≤ 0.00001'
        """
        digits = max(digits_of(end) for end in (self.at_least, self.at_most) if math.isfinite(end))
        return "above 0" if self.strict else between(self.at_least, self.at_most, digits)

    @property
    def strict(self) -> bool:
        """An order: zero itself does not meet it."""
        return self.at_least == 0 and self.at_most == math.inf

    def margin(self, value: float) -> float:
        """How far inside the bar; negative outside."""
        return min(value - self.at_least, self.at_most - value)

    def of_paper(self) -> str:
        """The paper's number, or its words."""
        return self.paper if isinstance(self.paper, str) else number(self.paper)


def between(low: float, high: float, digits: int = 3) -> str:
    """
    >>> between(0.1, 0.25), between(-math.inf, 0.25), between(0.1, math.inf), between(-math.inf, math.inf)
    ('0.100 to 0.250', '≤ 0.250', '≥ 0.100', '–')
    """
    ends = number(low, digits), number(high, digits)
    if low == -math.inf:
        return f"≤ {ends[1]}" if high < math.inf else "–"
    return f"≥ {ends[0]}" if high == math.inf else f"{ends[0]} to {ends[1]}"


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
class Judged:
    """A claim with its verdict.

    Args:
        claim: The claim.
        verdict: One of :data:`VERDICTS`.
        finding: What was computed; None where it could not be.
        alone: The verdict by its own 95 % interval, whatever the other claims.
        missing: Runs that were not run.
        apart: Runs that are there, but with no seed in common.
        edition: Edition of the data, where it is not the published one.
        diverged: Which of its runs diverged: what is found is of the other seeds.
    """

    claim: Claim
    verdict: str
    finding: Finding | None = None
    alone: str = ""
    missing: Sequence[str] = ()
    apart: Sequence[str] = ()
    edition: str = ""
    diverged: str = ""


def judge(claim: Claim, evidence: Evidence) -> Judged:
    """Gives a verdict by the claim's own interval.

    Args:
        claim: The claim.
        evidence: What is known of its runs.

    Returns:
        The claim with its verdict, whatever the other claims.

    Raises:
        AlassoError: The computation cannot be made from the claim's arguments.
    """
    try:
        finding = COMPUTATIONS[claim.how](evidence, **claim.arguments)
    except NotRun as not_run:
        hopeless = [reference for reference in not_run.missing if evidence.all_diverged(reference)]
        if not_run.apart and evidence.all_diverged(*not_run.apart):
            hopeless += not_run.apart
        if hopeless:  # which no run will change
            return Judged(claim, NOT_COMPUTABLE, diverged=evidence.divergences(*hopeless))
        return Judged(claim, NOT_RUN, missing=not_run.missing, apart=not_run.apart)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise AlassoError(f"{claim.id} cannot be computed from {dict(claim.arguments)}: {error}") from error
    edition, diverged = evidence.edition(claim.references), evidence.divergences(*claim.references)
    alone = verdict_on(claim, finding)
    return Judged(claim, alone, finding, alone, edition=edition, diverged=diverged)


def judge_all(claims: Iterable[Claim], evidence: Evidence) -> list[Judged]:
    """Gives every claim its verdict: all counted ones, also those without results, share one probability of an error.

    Args:
        claims: All claims.
        evidence: What is known of their runs.

    Returns:
        Each with its verdict.

    Raises:
        AlassoError: A computation cannot be made.
    """
    judged = [judge(claim, evidence) for claim in claims]
    counted = [one for one in judged if one.claim.counted]

    def verdict_at(alpha: float, one: Judged) -> str:
        return verdict_on(one.claim, one.finding, alpha) if one.finding else one.verdict

    def decided_at(alpha: float) -> int:
        return sum(verdict_at(alpha, one) in (HOLDS, DOES_NOT_HOLD) for one in counted)

    alpha = holm(decided_at, len(counted))
    return [replace(one, verdict=verdict_at(alpha, one)) if one.claim.counted else one for one in judged]


def verdict_on(claim: Claim, finding: Finding, alpha: float = ALPHA) -> str:
    """Compares the interval of what was found with the bar."""
    if math.isnan(finding.value):  # which misses every bar, and says nothing on the claim
        return NOT_COMPUTABLE
    low, high = finding.interval(alpha)
    if low >= claim.at_least and high <= claim.at_most and not (claim.strict and low == 0):
        return HOLDS
    missed = high < claim.at_least or low > claim.at_most or (claim.strict and high <= 0)
    return DOES_NOT_HOLD if missed else UNDECIDED


# -- reading ------------------------------------------------------------------------------------------------------

OWN_FIELDS = [one.name for one in fields(Claim) if one.name != "arguments"]


def read_claims(folder: Path, experiments: Mapping[str, Experiment]) -> tuple[list[Claim], list[Untested]]:
    """Reads ``claims.toml``; checks every name in it, so that no claim fails only after hours of running.

    Args:
        folder: The folder of the paper.
        experiments: All experiments by id.

    Returns:
        The claims, and the statements that are not judged.

    Raises:
        AlassoError: A claim is not whole, or names what there is not.
    """
    path = folder / "claims.toml"
    raw = schema.read_toml(path) if path.exists() else {}
    try:
        if any(isinstance(raw.get(name), dict) for name in ("claim", "untested")):
            raise AlassoError("write [[claim]] and [[untested]]")
        schema.CLAIMS(raw, "")
        claims = [_claim(one, experiments) for one in raw.get("claim", ())]
        untested = [Untested(**one) for one in raw.get("untested", ())]
    except AlassoError as error:
        raise AlassoError(f"{path}: {error}") from error
    names = Counter(claim.id for claim in claims)
    if twice := [name for name, count in names.items() if count > 1]:
        raise AlassoError(f"{path}: two claims are called {twice[0]!r}")
    return claims, untested


def _claim(raw: Mapping[str, Any], experiments: Mapping[str, Experiment]) -> Claim:
    name = f"{raw.get('id', 'a claim without id')}"[:60]
    own = {key: value for key, value in raw.items() if key in OWN_FIELDS}
    try:
        schema.CLAIM(raw, "")
        claim = Claim(**own, arguments={key: value for key, value in raw.items() if key not in OWN_FIELDS})
        if claim.how not in COMPUTATIONS:
            raise AlassoError(f"there is no computation {claim.how!r}{nearest(claim.how, COMPUTATIONS)}")
        check_arguments(claim.how, claim.arguments)
        if not math.isfinite(claim.at_least) and not math.isfinite(claim.at_most):
            raise AlassoError("a bar is missing: at_least, at_most or both")
        if claim.at_least > claim.at_most:
            raise AlassoError(f"no number is at least {claim.at_least} and at most {claim.at_most}")
        for reference in claim.references:
            config_of(experiments, reference)
    except (AlassoError, TypeError) as error:  # a name that is no Python name
        raise AlassoError(f"{name}: {error}") from error
    return claim


# -- in words -----------------------------------------------------------------------------------------------------


def verdict_in_words(one: Judged) -> str:
    """In brackets where it is not counted; marked where only the other claims leave it open."""
    words = one.verdict if one.alone in ("", one.verdict) else f"{one.verdict} {ALONE}"
    return words if one.claim.counted else f"({words})"


def by_topic(judged: Iterable[Judged]) -> dict[str, list[Judged]]:
    """Claims under their headings, which say so where the data are not the published edition."""
    judged = list(judged)
    editions = {one.claim.topic: f"{one.claim.topic} ({one.edition})" for one in judged if one.edition}
    found: dict[str, list[Judged]] = {}
    for one in judged:
        found.setdefault(editions.get(one.claim.topic, one.claim.topic), []).append(one)
    return found


def interval_shown(one: Judged) -> str:
    """The 95 % interval; one comparison of a single seed leaves an end open, one of all leaves nothing to show."""
    if one.finding is None or one.finding.count < 2 or math.isnan(one.finding.value):
        return "–"
    return between(*one.finding.interval())


def shown(finding: Finding | None, digits: int = 3) -> str:
    """
    >>> shown(Finding(0.5, 0.01, 3)), shown(Finding(-0.25)), shown(Finding(math.nan)), shown(None)
    ('0.500 ± 0.010 (3)', '−0.250 (1)', '–', '–')
    """
    if finding is None or math.isnan(finding.value):
        return "–"
    deviation = "" if finding.deviation is None else f" ± {finding.deviation:.{digits}f}"
    return f"{number(finding.value, digits)}{deviation} ({finding.count})"


def shown_of(one: Judged) -> str:
    """What was found, marked where that is of some runs only."""
    return f"{shown(one.finding)} †" if one.finding and one.diverged else shown(one.finding)


def tally(judged: Iterable[Judged]) -> dict[str, int]:
    """How many counted claims have which verdict."""
    counts = Counter(one.verdict for one in judged if one.claim.counted)
    return {verdict: counts[verdict] for verdict in VERDICTS}


def tally_sentence(judged: Sequence[Judged]) -> str:
    """
    >>> tally_sentence([])
    'No claim rests on these experiments.'
    """
    if not judged:
        return "No claim rests on these experiments."
    of_many = {HOLDS: "hold", DOES_NOT_HOLD: "do not hold"}  # the others are the same of one and of many
    found = {verdict: count for verdict, count in tally(judged).items() if count}
    parts = [f"{count} {verdict if count == 1 else of_many.get(verdict, verdict)}" for verdict, count in found.items()]
    open_alone = Counter(one.alone for one in judged if ALONE in verdict_in_words(one))
    by_itself = [
        f"{count} more {verdict if count == 1 else of_many[verdict]}"
        for verdict, count in sorted(open_alone.items(), reverse=True)
    ]
    alone = f" Each judged by itself, {' and '.join(by_itself)}." if by_itself else ""
    others = len(judged) - sum(found.values())
    if not found:
        return f"No claim here is counted: {others} in brackets."
    more = f" In brackets, not counted: {others}." if others else ""
    return f"Of {count_of(sum(found.values()), 'claim')}: {', '.join(parts)}.{alone}{more}"


def missing_lines(judged: Iterable[Judged], most: int = 4) -> list[str]:
    """What claims that were not run wait for, by experiment."""
    waiting: dict[str, dict[str, None]] = {}
    lines: dict[str, None] = {}
    for one in judged:
        if one.apart:
            lines[no_seed_in_common(one.apart)] = None
        for reference in one.missing:
            name, _, run = reference.partition("/")
            waiting.setdefault(name, {})[run] = None
    for name, runs in waiting.items():
        lines[f"not run in {name}: {', '.join([*list(runs)[:most], *(['…'] if len(runs) > most else [])])}"] = None
    return list(lines)


def not_computable_lines(judged: Iterable[Judged]) -> list[str]:
    """Why there is no number, claim by claim."""
    without = [one for one in judged if one.verdict == NOT_COMPUTABLE]
    reasons = [one.finding.note if one.finding else one.diverged for one in without]
    return [
        f"not computable: {one.claim.says}" + (f" ({why})" if why else "")
        for one, why in zip(without, reasons, strict=True)
    ]
