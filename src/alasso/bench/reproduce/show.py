"""What a person sees in the terminal: experiments, the plan, the verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from alasso.bench.labels import count_of
from alasso.bench.report.page import ClaimRow, Claims
from alasso.bench.report.style import number
from alasso.bench.reproduce.claims import (
    DOES_NOT_HOLD,
    HOLDS,
    NOT_COMPUTABLE,
    NOT_RUN,
    UNDECIDED,
    WITHIN_NOISE,
    Claim,
    Judged,
    tally,
)
from alasso.bench.reproduce.evidence import Evidence, no_seed_in_common
from alasso.bench.reproduce.experiments import Experiment
from alasso.bench.reproduce.plan import Plan, part_title
from alasso.bench.reproduce.statistics import Finding
from alasso.bench.reproduce.timing import Estimate, roughly

STYLES = {HOLDS: "green", WITHIN_NOISE: "yellow", DOES_NOT_HOLD: "red", NOT_COMPUTABLE: "dim", NOT_RUN: "dim"}
#: The quick version says what it saw; it gives no verdict on the paper.
QUICK_WORDS = {
    HOLDS: "seen",
    WITHIN_NOISE: "within noise",
    DOES_NOT_HOLD: "not seen",
    NOT_COMPUTABLE: "not computable",
    NOT_RUN: "not run",
}

VERDICT_CAPTION = (
    "ours: mean ± standard deviation over seeds (how many). within noise: nearer to the bar than one standard error."
)


class Words(NamedTuple):
    """How the claims of a study are spoken of: the paper's, or one's own."""

    claims: str  # title of their table
    where: str  # heading of the places where they stand
    said: str  # and of the numbers, or words, that stand there
    it_says: str  # before such a number in a sentence
    quick_caption: str
    quick_note: str


OF_PAPER = Words(
    claims="The paper's claims",
    where="in the paper",
    said="paper",
    it_says="the paper",
    quick_caption="Too small to judge the paper: this shows that everything runs.",
    quick_note=(
        "`alasso reproduce --quick`: permuted digits in place of permuted MNIST, few tasks, short training. Too small "
        "to judge the paper: this shows that everything runs."
    ),
)
OF_OWN = Words(
    claims="Claims",
    where="where",
    said="said",
    it_says="said",
    quick_caption="Too small to judge by: this shows that everything runs.",
    quick_note=(
        "`alasso reproduce --quick`: each experiment as its `[quick]` changes it, with one seed. Too small to judge "
        "by: this shows that everything runs."
    ),
)


def experiments_table(experiments: Mapping[str, Experiment]) -> Table:
    table = Table(title="Experiments (alasso reproduce --only …)", title_justify="left")
    table.add_column("id", no_wrap=True)
    for column in ("what it is", "in the paper", "on one H200, unstacked"):
        table.add_column(column)
    for experiment in experiments.values():
        table.add_row(experiment.id, experiment.title, experiment.paper, experiment.cost)
    return table


def plan_table(plan: Plan, estimate: Estimate, experiments: Sequence[Experiment]) -> Table:
    table = Table(title="To run", title_justify="left")
    table.add_column("part")
    table.add_column("used by", overflow="fold")  # ids, which have to be typed
    for column in ("runs", "along the way", "done", "about"):
        table.add_column(column, justify="right", no_wrap=True)
    for part in plan.parts:
        seconds = estimate.parts.get(part.title)
        missing = {config.hash for config in part.configs}
        waiting = [one.id for one in experiments if one.probe is None and missing & {c.hash for c in one.configs(1)}]
        about = "?" if seconds is None else roughly(seconds)
        counts = [str(len(counted)) for counted in (part.trained, ())]
        table.add_row(part.title, ", ".join(waiting), *counts, str(part.present), about)
    for title, present in plan.nothing_to_train.items():
        of = [one.id for one in experiments if one.probe is None and title in {part_title(c) for c in one.configs(1)}]
        table.add_row(title, ", ".join(of), "0", "0", str(present), "–")
    if plan.probes or plan.probes_present:
        of = [one.id for one in experiments if one.probe is not None]
        counts = [str(len(plan.probes)), "0", str(plan.probes_present)]
        table.add_row("single weights", ", ".join(of), *counts, roughly(estimate.probes) if plan.probes else "–")
    return table


WIDE = 100  # columns of a terminal with room for the bar and where a claim stands
NARROW = 76  # and below these, numbers go under the claim


def verdict_table(
    judged: Sequence[Judged], *, quick: bool = False, width: int = WIDE, words: Words = OF_PAPER
) -> Table:
    """Claims under their topics; a terminal that is not wide gets what matters most."""
    title = in_small(words.claims) if quick else words.claims
    caption = words.quick_caption if quick else VERDICT_CAPTION
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=SIMPLE_HEAD)
    wide, narrow = width >= WIDE, width < NARROW
    table.add_column("claim", ratio=1)
    if wide:
        table.add_column(words.where, max_width=22)
    if not narrow:
        table.add_column(words.said, justify="right", max_width=12)
        table.add_column("ours", justify="right", no_wrap=True)
    if wide:
        table.add_column("bar", justify="right", no_wrap=True)
    table.add_column(verdict_heading(quick), no_wrap=True)
    for topic, claims in by_topic(judged).items():
        table.add_row(Text(in_small(topic) if quick else topic, "bold"))
        for one in claims:
            style = "" if quick and one.verdict not in UNDECIDED else STYLES[one.verdict]
            ours = shown_of(one)
            paper = shown_paper(one.claim) if wide else shown_number(one.claim)
            says = Text(one.claim.says)
            if narrow:
                says.append(f"\n{ours}; {words.it_says}: {paper}", "dim")
            cells: list[RenderableType] = [Padding(says, (0, 0, 0, 2))]
            cells += [one.claim.where] if wide else []
            cells += [] if narrow else [paper, ours]
            cells += [one.claim.bar()] if wide else []
            table.add_row(*cells, Text(verdict_in_words(one, quick=quick), style))
    return table


def for_page(judged: Sequence[Judged], words: Words, *, quick: bool) -> Claims | None:
    """The same table, whole, for the report's page; None where there are no claims."""
    if not judged:
        return None
    topics = {
        in_small(topic) if quick else topic: [
            ClaimRow(
                says=one.claim.says,
                where=one.claim.where,
                numbers=(shown_paper(one.claim), shown_of(one), one.claim.bar()),
                verdict=verdict_in_words(one, quick=quick),
                kind="" if quick else one.verdict,
            )
            for one in claims
        ]
        for topic, claims in by_topic(judged).items()
    }
    return Claims(
        title=in_small(words.claims) if quick else words.claims,
        note=words.quick_caption if quick else f"{tally_sentence(judged)} {VERDICT_CAPTION}",
        columns=("claim", words.said, "ours", "bar", verdict_heading(quick)),
        topics=topics,
    )


def verdict_in_words(one: Judged, *, quick: bool) -> str:
    """In brackets where it is not counted: it judges once more what another one does."""
    words = QUICK_WORDS[one.verdict] if quick else one.verdict
    return words if one.claim.counted else f"({words})"


def in_small(topic: str) -> str:
    return f"{topic} (small version)"


def verdict_heading(quick: bool) -> str:
    return "seen?" if quick else "verdict"


def by_topic(judged: Sequence[Judged]) -> dict[str, list[Judged]]:
    """Claims under their headings, which say so where the data are not the published edition."""
    editions: dict[str, str] = {}
    for one in judged:
        if one.edition:
            editions[one.claim.topic] = f"{one.claim.topic} ({one.edition})"
    found: dict[str, list[Judged]] = {}
    for one in judged:
        found.setdefault(editions.get(one.claim.topic, one.claim.topic), []).append(one)
    return found


def shown(finding: Finding, digits: int = 3) -> str:
    """
    >>> shown(Finding(0.5, 0.01, 3)), shown(Finding(-0.25)), shown(Finding(math.nan))
    ('0.500 ± 0.010 (3)', '−0.250 (1)', '–')
    """
    if math.isnan(finding.value):
        return "–"
    deviation = "" if finding.deviation is None else f" ± {finding.deviation:.{digits}f}"
    return f"{number(finding.value, digits)}{deviation} ({finding.seeds})"


def shown_of(judged: Judged) -> str:
    """What was found, marked where that is of some runs only."""
    if judged.finding is None:
        return "–"
    found = shown(judged.finding)
    return f"{found} †" if judged.diverged else found


def shown_paper(claim: Claim) -> str:
    return number(claim.paper) if isinstance(claim.paper, int | float) else claim.paper or "–"


def shown_number(claim: Claim) -> str:
    """Its number; what it says in words is in the claim itself."""
    return number(claim.paper) if isinstance(claim.paper, int | float) else "–"


def tally_sentence(judged: Sequence[Judged]) -> str:
    """
    >>> tally_sentence([])
    'No claim rests on these experiments.'
    """
    if not judged:
        return "No claim rests on these experiments."
    counted = [one for one in judged if one.claim.counted]
    of_many = {HOLDS: "hold", DOES_NOT_HOLD: "do not hold"}  # the others are the same of one and of many
    found = {verdict: count for verdict, count in tally(counted).items() if count}
    parts = [f"{count} {verdict if count == 1 else of_many.get(verdict, verdict)}" for verdict, count in found.items()]
    others = f" In brackets, not counted: {len(judged) - len(counted)}." if len(counted) < len(judged) else ""
    return f"Of {count_of(len(counted), 'claim')}: {', '.join(parts)}.{others}"


def missing_lines(judged: Sequence[Judged], most: int = 4) -> list[str]:
    """What each claim that was not run waits for, by experiment."""
    waiting: dict[str, dict[str, None]] = {}
    for one in judged:
        for reference in one.missing:
            name, _, run = reference.partition("/")
            waiting.setdefault(name, {})[run] = None
    lines = list(dict.fromkeys(no_seed_in_common(one.apart) for one in judged if one.apart))
    for name, runs in waiting.items():
        shown_runs = [*list(runs)[:most], *(["…"] if len(runs) > most else [])]
        lines.append(f"not run in {name}: {', '.join(shown_runs)}")
    return lines


def diverged_lines(evidence: Evidence, experiments: Sequence[Experiment], judged: Sequence[Judged]) -> list[str]:
    """Runs that came to no end, each once; claims on them are marked, for what is found is of the other seeds."""
    marked = {reference for one in judged if one.finding and one.diverged for reference in one.claim.references}
    found: dict[str, str] = {}
    for one in experiments:
        for run in one.runs:
            reference = f"{one.id}/{run}"
            if said := evidence.how_it_diverged(reference):
                mark = "† " if reference in marked else ""
                found.setdefault(evidence.config_hash(reference), f"{mark}{reference} {said}")
    return list(found.values())


def not_computable_lines(judged: Sequence[Judged]) -> list[str]:
    """Why there is no number, claim by claim."""
    without = [one for one in judged if one.verdict == NOT_COMPUTABLE]
    reasons = [one.finding.note if one.finding else one.diverged for one in without]
    said = zip(without, reasons, strict=True)
    return [f"not computable: {one.claim.says}" + (f" ({why})" if why else "") for one, why in said]
