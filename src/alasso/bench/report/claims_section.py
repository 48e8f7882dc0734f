"""Verdicts on claims as a section of the report's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from alasso.bench.report.page_parts import text

LONGEST = 500  # letters of a claim


@dataclass(frozen=True)
class ClaimRow:
    """One claim: what it says, where, its numbers (as the columns name them), its verdict.

    Args:
        says: The claim in words.
        where: Where it stands.
        numbers: The cells between the claim and its verdict.
        verdict: In words.
        kind: The verdict that colours it; empty for none.
    """

    says: str
    where: str
    numbers: Sequence[str]
    verdict: str
    kind: str = ""


@dataclass(frozen=True)
class Claims:
    """Verdicts on claims, as the page shows them before its results.

    Args:
        title: Heading of the section.
        note: A sentence under it.
        columns: Headings of the table: of the claim, of its numbers, of its verdict.
        topics: Claims by topic.
    """

    title: str
    note: str
    columns: Sequence[str]
    topics: Mapping[str, Sequence[ClaimRow]]


def claims_section(claims: Claims) -> str:
    """The section as HTML."""
    heads = "".join(f'<th scope="col">{text(name)}</th>' for name in claims.columns)
    topics = "".join(
        f'<tr class="topic"><th scope="colgroup" colspan="5">{text(topic)}</th></tr>' + "".join(map(_row, rows))
        for topic, rows in claims.topics.items()
    )
    return (
        f'<section id="claims"><h2>{text(claims.title)}</h2><p class="about">{text(claims.note, LONGEST)}</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(claims.title)}">'
        f'<table class="claims"><thead><tr>{heads}</tr></thead><tbody>{topics}</tbody></table></div></section>'
    )


def _row(row: ClaimRow) -> str:
    where = f' <span class="spread">{text(row.where)}</span>' if row.where else ""
    numbers = "".join(f"<td>{text(cell)}</td>" for cell in row.numbers)
    verdict = f'<td data-verdict="{text(row.kind)}">{text(row.verdict)}</td>'
    return f'<tr><th scope="row">{text(row.says, LONGEST)}{where}</th>{numbers}{verdict}</tr>'
