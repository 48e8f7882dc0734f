"""What a person sees in the terminal: experiments, the plan, the verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from alasso.report.names import number
from alasso.reproduce.claims import DOES_NOT_HOLD, HOLDS, NOT_RUN, WITHIN_NOISE, Claim, Judged, tally
from alasso.reproduce.computations import Finding
from alasso.reproduce.experiments import Experiment
from alasso.reproduce.plan import Plan
from alasso.reproduce.timing import Estimate, human

STYLES = {HOLDS: "green", WITHIN_NOISE: "yellow", DOES_NOT_HOLD: "red", NOT_RUN: "dim"}
#: The quick version says what it saw; it gives no verdict on the paper.
QUICK_WORDS = {HOLDS: "seen", WITHIN_NOISE: "within noise", DOES_NOT_HOLD: "not seen", NOT_RUN: "not run"}

VERDICT_CAPTION = (
    "ours: mean ± standard deviation over seeds (how many). within noise: nearer to the bar than one standard error."
)
QUICK_CAPTION = "Indicative: permuted digits, 10 tasks, one seed, small network. No verdict on the paper."


def experiments_table(experiments: Mapping[str, Experiment]) -> Table:
    table = Table(title="Experiments (alasso reproduce --only …)", title_justify="left")
    table.add_column("id", no_wrap=True)
    for column in ("what it is", "in the paper", "cost"):
        table.add_column(column)
    for experiment in experiments.values():
        table.add_row(experiment.id, experiment.title, experiment.paper, experiment.cost)
    return table


def plan_table(plan: Plan, estimate: Estimate) -> Table:
    table = Table(title="To run", title_justify="left")
    table.add_column("part")
    table.add_column("methods")
    for column in ("runs", "there", "about"):
        table.add_column(column, justify="right", no_wrap=True)
    for part in plan.parts:
        seconds = estimate.parts.get(part.title)
        table.add_row(
            part.title,
            counted([config.method for config in part.configs]),
            str(len(part.configs)),
            str(part.present),
            "?" if seconds is None else human(seconds),
        )
    if plan.probes:
        table.add_row("probes of single weights", "", str(len(plan.probes)), "", human(estimate.probes))
    return table


def counted(names: Sequence[str]) -> str:
    """
    >>> counted(["si", "alasso", "alasso"])
    'si, 2 alasso'
    """
    return ", ".join(
        name if names.count(name) == 1 else f"{names.count(name)} {name}" for name in dict.fromkeys(names)
    )


def verdict_table(judged: Sequence[Judged], *, quick: bool = False) -> Table:
    caption = QUICK_CAPTION if quick else VERDICT_CAPTION
    title = "The paper's statements in small: indicative only" if quick else "The paper's claims"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", show_lines=False)
    table.add_column("claim", ratio=1)
    table.add_column("paper", justify="right")
    table.add_column("ours", justify="right")
    table.add_column("bar", justify="right")
    table.add_column("verdict", no_wrap=True)
    for one in judged:
        says = Text(one.claim.says)
        says.append(f"  {one.claim.where}", style="dim")
        verdict = QUICK_WORDS[one.verdict] if quick else one.verdict
        style = STYLES[one.verdict] if not quick or one.verdict == NOT_RUN else ""
        ours = shown(one.finding) if one.finding else "–"
        table.add_row(says, shown_paper(one.claim), ours, one.claim.bar(), Text(verdict, style))
    return table


def shown(finding: Finding, digits: int = 3) -> str:
    """
    >>> shown(Finding(0.5, 0.01, 3)), shown(Finding(-0.25))
    ('0.500 ± 0.010 (3)', '−0.250 (1)')
    """
    deviation = "" if finding.deviation is None else f" ± {finding.deviation:.{digits}f}"
    return f"{number(finding.value, digits)}{deviation} ({finding.seeds})"


def shown_paper(claim: Claim) -> str:
    return number(claim.paper) if isinstance(claim.paper, float) else claim.paper or "–"


def tally_sentence(judged: Sequence[Judged]) -> str:
    """
    >>> tally_sentence([])
    'No claim rests on these experiments.'
    """
    if not judged:
        return "No claim rests on these experiments."
    counts = tally(judged)
    parts = [f"{count} {verdict}" for verdict, count in counts.items() if count]
    return f"Of {len(judged)} claims: {', '.join(parts)}."


def missing_lines(judged: Sequence[Judged], most: int = 4) -> list[str]:
    """What each claim that was not run waits for, by experiment."""
    waiting: dict[str, dict[str, None]] = {}
    for one in judged:
        for reference in one.missing:
            name, _, run = reference.partition("/")
            waiting.setdefault(name, {})[run] = None
    lines = []
    for name, runs in waiting.items():
        shown_runs = [*list(runs)[:most], *(["…"] if len(runs) > most else [])]
        lines.append(f"not run in {name}: {', '.join(shown_runs)}")
    return lines
