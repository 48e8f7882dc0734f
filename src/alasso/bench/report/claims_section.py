"""The verdicts as a section of the report's page: the table that the command ends with, whole."""

from __future__ import annotations

from collections.abc import Sequence

from alasso.bench.report.page_parts import text
from alasso.bench.reproduce import show
from alasso.bench.reproduce.claims import Judged

LONGEST = 500  # letters of a claim


def claims_section(judged: Sequence[Judged], words: show.Words, *, quick: bool) -> str:
    """Empty where there are no claims."""
    if not judged:
        return ""
    note = words.quick_caption if quick else f"{show.tally_sentence(judged)} {show.VERDICT_CAPTION}"
    title = show.in_small(words.claims) if quick else words.claims
    columns = ("claim", words.said, "ours", "bar", show.verdict_heading(quick))
    heads = "".join(f'<th scope="col">{text(name)}</th>' for name in columns)
    topics = "".join(
        f'<tr class="topic"><th scope="colgroup" colspan="5">{text(show.in_small(topic) if quick else topic)}</th></tr>'
        + "".join(_row(one, quick) for one in claims)
        for topic, claims in show.by_topic(judged).items()
    )
    return (
        f'<section id="claims"><h2>{text(title)}</h2><p class="about">{text(note, LONGEST)}</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(title)}">'
        f'<table class="claims"><thead><tr>{heads}</tr></thead><tbody>{topics}</tbody></table></div></section>'
    )


def _row(one: Judged, quick: bool) -> str:
    claim = one.claim
    verdict = show.verdict_in_words(one, quick=quick)
    where = f' <span class="spread">{text(claim.where)}</span>' if claim.where else ""
    numbers = "".join(f"<td>{text(cell)}</td>" for cell in (show.shown_paper(claim), show.shown_of(one), claim.bar()))
    kind = "" if quick else f' data-verdict="{text(one.verdict)}"'
    return f'<tr><th scope="row">{text(claim.says, LONGEST)}{where}</th>{numbers}<td{kind}>{text(verdict)}</td></tr>'
