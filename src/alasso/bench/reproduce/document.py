"""``REPRODUCTION.md`` from its template and the results: prose from a file, every number from a result.

In the template ``{{name argument …}}`` is replaced by what the method of that name of :class:`Document` finds, with
hyphens for underscores. A number whose results are not there is "planned", or "diverged" where its runs diverged.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from alasso.bench.config import count_of, nearest
from alasso.bench.io import write_whole
from alasso.bench.probe import Measured
from alasso.bench.probe import figures as probe_figures
from alasso.bench.report import figures
from alasso.bench.report.aggregate import Mean, mean_of
from alasso.bench.report.style import number
from alasso.bench.reproduce.claims import (
    DOES_NOT_HOLD,
    HOLDS,
    NOT_RUN,
    UNDECIDED,
    VERDICTS,
    Judged,
    Untested,
    by_topic,
    interval_shown,
    missing_lines,
    not_computable_lines,
    shown,
    shown_of,
    tally,
    tally_sentence,
    verdict_in_words,
)
from alasso.bench.reproduce.experiments import Evidence, Experiment, NotRun
from alasso.bench.reproduce.statistics import Finding, difference, mean
from alasso.bench.results import Result, device_of
from alasso.errors import AlassoError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIRECTIVE = re.compile(r"\{\{\s*([^\s{}]+)\s*([^{}]*?)\s*\}\}")
DECIDED = (HOLDS, DOES_NOT_HOLD)
MEASURES = (("A", "A"), ("F", "F"), ("I", "I"), ("std", "std over tasks"), ("first_task", "first task"))
#: Figures of results and of probes, by name.
OF_RESULTS = {name: draw for name, draw, _ in (*figures.OF_A_SECTION, *figures.OF_ALL)}
OF_PROBES: dict[str, Callable[[Measured], Figure | None]] = {
    "probe-sides": probe_figures.sides,
    "probe-surrogates": probe_figures.surrogates,
}
RE_SPLIT = (
    "**CIFAR-100 is the re-split edition**: the same 60,000 images, but divided anew into 500 for training and 100 for "
    "testing a class. Its numbers are comparable with each other, and only roughly with published ones."
)
UNVERIFIED = "Unverified: complete, but not unpacked from the publisher's archive, whose checksum is known."


class Document:
    """All that a template can ask for: the methods with one-line docstrings, by name.

    Args:
        evidence: The results.
        judged: Every claim with its verdict.
        untested: Statements that are not judged.
        figures: The folder for drawings.
    """

    def __init__(
        self, evidence: Evidence, judged: Sequence[Judged], untested: Sequence[Untested], figures: Path
    ) -> None:
        self.evidence, self.judged, self.statements, self.figures = evidence, judged, untested, figures

    def fill(self, template: str) -> str:
        """Replaces every directive.

        Args:
            template: The text with directives.

        Returns:
            The document.

        Raises:
            AlassoError: A directive is unknown, or names what there is not.
        """
        if stray := re.search(r"\{\{.*|.*\}\}", DIRECTIVE.sub("", template)):
            raise AlassoError(f"the template has {stray[0]!r}: write {{{{name argument …}}}}")
        return DIRECTIVE.sub(lambda found: self._answer(found[1], found[2].split()), template)

    def _answer(self, name: str, arguments: Sequence[str]) -> str:
        known = {
            one.replace("_", "-"): getattr(self, one)
            for one, method in vars(Document).items()
            if inspect.isfunction(method) and not one.startswith("_") and one != "fill"
        }
        if name not in known:
            raise AlassoError(f"the template asks for {name!r}{nearest(name, known)}")
        try:
            inspect.signature(known[name]).bind(*arguments)
        except TypeError as error:
            raise AlassoError(f"the template's {' '.join([name, *arguments])!r}: {error}") from error
        return str(known[name](*arguments))

    # -- claims -------------------------------------------------------------------------------------------------

    def tally(self) -> str:
        """How many claims have which verdict."""
        return tally_sentence(self.judged)

    def topics(self) -> str:
        """How many counted claims of each topic have which verdict."""
        of_topics = {topic: tally(claims) for topic, claims in by_topic(self.judged).items()}
        shown = {topic: counts for topic, counts in of_topics.items() if any(counts.values())}
        verdicts = [verdict for verdict in VERDICTS if any(counts[verdict] for counts in shown.values())]
        rows = [["claims on", *verdicts]]
        rows += [[topic, *(str(counts[verdict] or "–") for verdict in verdicts)] for topic, counts in shown.items()]
        return markdown_table(rows, right=range(1, len(rows[0])))

    def verdicts(self, which: str = "all") -> str:
        """Claims with their verdicts: all, the decided or the open ones."""
        judged = [one for one in self.judged if which == "all" or (one.verdict in DECIDED) == (which == "decided")]
        rows = [["claim", "in the paper", "paper", "ours", "95 % interval", "bar", "verdict"]]
        for topic, claims in by_topic(judged).items():
            rows.append([f"**{topic}**", *[""] * 6])
            for one in claims:
                words = verdict_in_words(one)
                verdict = f"**{words}**" if one.verdict == DOES_NOT_HOLD else words
                claim, found = one.claim, (shown_of(one), interval_shown(one))
                rows.append([claim.says, claim.where, claim.of_paper(), *found, claim.bar(), verdict])
        some = dict.fromkeys(one.diverged for one in judged if one.finding and one.diverged)
        notes = [f"† {diverged}. What is found is of the other seeds." for diverged in some]
        return "\n\n".join([markdown_table(rows, right=(2, 3, 4, 5)), *notes])

    def not_holding(self) -> str:
        """Claims that do not hold, and undecided ones of which there is something to say."""
        short = [
            one for one in self.judged if one.verdict == DOES_NOT_HOLD or (one.verdict == UNDECIDED and one.claim.note)
        ]
        lines: list[str] = []
        for topic, claims in by_topic(short).items():
            lines += ["", f"**{topic}**", "", *(line for one in claims for line in _falling_short(one))]
        waiting = missing_lines([one for one in self.judged if one.verdict == NOT_RUN], most=99)
        for heading, found in (
            ("Claims that wait for results:", waiting),
            ("Claims for which the results give no number:", not_computable_lines(self.judged)),
        ):
            lines += ["", heading, "", *(f"- {line}" for line in found)] if found else []
        return "\n".join(lines).strip() or "None."

    def bars(self) -> str:
        """How each claim is computed, from which runs, and why its bar stands where it stands."""
        rows = [["claim", "computed as", "from", "bar", "why this bar"]]
        for claim in (one.claim for one in self.judged):
            references = ", ".join(f"`{reference}`" for reference in claim.references)
            measure = claim.arguments.get("measure")
            how = (f"{claim.how} of {measure}" if measure else claim.how).replace("_", " ")
            rows.append([f"`{claim.id}`", how, references, claim.bar(), claim.why])
        return markdown_table(rows)

    def untested(self) -> str:
        """Statements that are not judged."""
        return "\n".join(f"- “{one.says}” ({one.where}) {one.why}" for one in self.statements) or "None."

    # -- numbers ------------------------------------------------------------------------------------------------

    def mean(self, reference: str, measure: str = "A") -> str:
        """A measure of one run."""
        diverged = self.evidence.how_it_diverged(reference)
        return _number(lambda: mean(self.evidence, of=reference, measure=measure), diverged)

    def difference(self, reference: str, less: str, measure: str = "A") -> str:
        """A measure of one run less that of another."""
        diverged = self.evidence.divergences(reference, less)
        found = _number(lambda: difference(self.evidence, of=reference, less=less, measure=measure), diverged)
        return f"+{found}" if found[0].isdigit() and not found.startswith("0.000") else found

    def table(self, *names: str) -> str:
        """Every run of some experiments with its measures."""
        rows = [["run", *(heading for _, heading in MEASURES), "seeds"]]
        planned = []
        for reference in self._references(names):
            group, diverged = self.evidence.group(reference), self.evidence.how_it_diverged(reference)
            run = reference.partition("/")[2]
            if group is not None:
                means = [_spread(mean_of(group.measures[key])) for key, _ in MEASURES]
                rows.append([run, *means, _beside(str(len(group.results)), diverged)])
            elif diverged:
                rows.append([run, diverged, *[""] * len(MEASURES)])
            else:
                planned.append(run)
        waiting = [f"Planned, without results yet: {', '.join(planned)}."] if planned else []
        return "\n\n".join([markdown_table(rows, right=range(1, len(rows[0]))), *waiting])

    def _experiments(self, names: Sequence[str]) -> list[Experiment]:
        known = self.evidence.experiments
        for name in names:
            if name not in known:
                raise AlassoError(f"the template names no experiment with {name!r}{nearest(name, known)}")
        return [known[name] for name in names]

    def _references(self, names: Sequence[str]) -> list[str]:
        return [reference for one in self._experiments(names) for reference in one.references]

    # -- figures ------------------------------------------------------------------------------------------------

    def figure(self, name: str, *experiments: str) -> str:
        """A figure of the results of some experiments; a drawing of the same results is kept as it is."""
        if name not in (known := [*OF_RESULTS, *OF_PROBES]):
            raise AlassoError(f"there is no figure {name!r}{nearest(name, known)}")
        title = f"{name.replace('-', ' ')}: {', '.join(experiments)}"
        found = self._shown_in(name, self._references(experiments))
        mark = f"<!-- drawn from {_digest(found)} -->\n"
        path = self.figures / f"{experiments[0]}-{name}.svg"
        if not path.exists() or not path.read_text(encoding="utf-8").endswith(mark):
            drawn = _drawn(name, found) if found else None
            if drawn is None:
                return f"*No figure of {title}: the results do not give it.*"
            figures.save(drawn, self.figures, path.stem, formats=("svg",))
            write_whole(path, path.read_bytes() + mark.encode())
        return f"![{title}]({self.figures.name}/{path.name})"

    def _shown_in(self, name: str, references: Sequence[str]) -> list[Result] | list[Measured]:
        if name in OF_RESULTS:
            return self.evidence.results_of(references)
        return [probe for reference in references for probe in self._probes_of(reference)][:1]

    def _probes_of(self, reference: str) -> list[Measured]:
        try:
            return list(self.evidence.probes(reference).values())
        except NotRun:
            return []

    # -- how it was run -----------------------------------------------------------------------------------------

    def experiments(self) -> str:
        """Every experiment with how many results it has."""
        rows = [["experiment", "what it is", "in the paper", "results", "asked for", "seconds in result files"]]
        for one in self.evidence.experiments.values():
            found = self.evidence.results_of(one.references)
            count, seconds = len(found), f"{sum(result.seconds for result in found):,.0f}" if found else "–"
            if one.probe is not None:
                count, seconds = sum(len(self._probes_of(reference)) for reference in one.references), "–"
            rows.append([f"`{one.id}`", one.title, one.paper, str(count), str(len(one.configs())), seconds])
        return markdown_table(rows, right=(3, 4, 5))

    def edition(self, *names: str) -> str:
        """A remark beside numbers whose data are not the published edition."""
        found = self.evidence.edition(self._references(names))
        return f"Data: {found}." if found else ""

    def editions(self) -> str:
        """Which editions of the data the results rest on."""
        found = self.evidence.editions()
        lines = [f"{name}: {' and '.join(sorted(editions))}" for name, editions in sorted(found.items())]
        text = f"Editions of the data, as the result files name them: {'; '.join(lines) or NOT_RUN}."
        re_split = [RE_SPLIT] if "re-split" in found.get("cifar100", ()) else []
        unverified = [UNVERIFIED] if any("unverified" in editions for editions in found.values()) else []
        return " ".join([text, *re_split, *unverified])

    def machines(self) -> str:
        """Devices and versions, with the commits and how many results and probes each of these has."""
        probed = [ref for one in self.evidence.experiments.values() if one.probe is not None for ref in one.references]
        probes = [probe.environment for reference in probed for probe in self._probes_of(reference)]
        counts: dict[str, Counter[str]] = {}
        for environment in [*(result.environment for result in self.evidence.results), *probes]:
            on = counts.setdefault(f"{device_of(environment)}, torch {environment.get('torch')}", Counter())
            on[str(environment.get("commit") or "unknown")[:8]] += 1
        lines = []
        for name, of_commit in counts.items():
            commits = ", ".join(f"{commit} ({count})" for commit, count in of_commit.most_common())
            lines.append(f"{name}: {count_of(of_commit.total(), 'result')}, by commit: {commits}")
        return "; ".join(lines) or NOT_RUN


def _falling_short(one: Judged) -> list[str]:
    """By how much, in one line, and below it the paragraphs of the claim's note."""
    claim, finding = one.claim, one.finding
    assert finding is not None  # or there would be no verdict of this kind
    margin = claim.margin(finding.value)
    far = f"{abs(margin):.3f}" if abs(margin) >= 0.0005 else "less than 0.001"
    by = f"{far} {'inside' if margin >= 0 else 'outside'} the bar ({claim.bar()})"
    about = f" ({finding.note})" if finding.note else ""
    first = (
        f"- **{claim.says}** ({claim.where}) {verdict_in_words(one)}: {shown(finding)}{about}, {by}; "
        f"the paper: {claim.of_paper()}."
    )
    return [first, *(f"    - {paragraph}" for paragraph in claim.note.splitlines() if paragraph)]


def _digest(found: Sequence[Result] | Sequence[Measured]) -> str:
    """Differs between different results."""
    facts = [(one.name, one.accuracy[-1]) if isinstance(one, Result) else (one.config, one.seconds) for one in found]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _drawn(name: str, found: Sequence[Result] | Sequence[Measured]) -> Figure | None:
    return OF_RESULTS[name](found) if name in OF_RESULTS else OF_PROBES[name](found[0])  # type: ignore[arg-type]


def _number(compute: Callable[[], Finding], diverged: str) -> str:
    try:
        return _beside(shown(compute()), diverged)
    except NotRun:
        return diverged or NOT_RUN


def _spread(found: Mean | None) -> str:
    if found is None:
        return "–"
    return number(found.value) + ("" if found.deviation is None else f" ± {number(found.deviation)}")


def _beside(found: str, diverged: str) -> str:
    """What was found, and of which seeds nothing could be."""
    return "; ".join(filter(None, (found, diverged)))


def markdown_table(rows: Sequence[Sequence[str]], right: Sequence[int] | range = ()) -> str:
    """Writes a table.

    Args:
        rows: Cells, row by row; the first one is the heading.
        right: Columns that are aligned to the right.

    Returns:
        The table in Markdown.

    >>> print(markdown_table([["a", "b"], ["x|y", "1"]], right=[1]))
    | a | b |
    |---|---:|
    | x\\|y | 1 |
    """
    line = "|" + "|".join("---:" if column in right else "---" for column in range(len(rows[0]))) + "|"
    cells = [["".join(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    head, *body = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([head, line, *body])
