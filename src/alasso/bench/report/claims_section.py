"""The verdicts as a section of the report's page: the table that the command ends with, whole."""

from __future__ import annotations

from collections.abc import Sequence

from alasso.bench.report.page_parts import text
from alasso.bench.reproduce.claims import Judged, by_topic, shown_of, tally_sentence, verdict_in_words

LONGEST = 500  # letters of a claim
HEADINGS = ("claim", "paper", "ours", "bar", "verdict")
NOTE = "ours: mean ± standard deviation over seeds (how many). within noise: nearer to the bar than one standard error."
NOTE_IN_SMALL = "Too small to judge the paper: this shows that everything runs."


def claims_section(judged: Sequence[Judged], *, quick: bool) -> str:
    """Empty where there are no claims."""
    if not judged:
        return ""
    note = NOTE_IN_SMALL if quick else f"{tally_sentence(judged)} {NOTE}"
    title = "The paper's claims" + " (small version)" * quick
    heads = "".join(f'<th scope="col">{text(name)}</th>' for name in HEADINGS)
    topics = "".join(
        f'<tr class="topic"><th scope="colgroup" colspan="5">{text(topic)}</th></tr>'
        + "".join(_row(one, quick) for one in claims)
        for topic, claims in by_topic(judged).items()
    )
    return (
        f'<section id="claims"><h2>{text(title)}</h2><p class="about">{text(note, LONGEST)}</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(title)}">'
        f'<table class="claims"><thead><tr>{heads}</tr></thead><tbody>{topics}</tbody></table></div></section>'
    )


def _row(one: Judged, quick: bool) -> str:
    claim = one.claim
    where = f' <span class="spread">{text(claim.where)}</span>' if claim.where else ""
    numbers = "".join(f"<td>{text(cell)}</td>" for cell in (claim.of_paper(), shown_of(one), claim.bar()))
    kind = "" if quick else f' data-verdict="{text(one.verdict)}"'
    verdict = text(verdict_in_words(one, quick=quick))
    return f'<tr><th scope="row">{text(claim.says, LONGEST)}{where}</th>{numbers}<td{kind}>{verdict}</td></tr>'
