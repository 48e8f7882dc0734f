"""``docs/reproduction.md`` from its template and the results: prose from a file, every number from a result.

In a template ``{{name argument …}}`` is replaced by what the function of that name in :class:`Document` finds. A
number whose results are not there is "not run", or "diverged" where a run came to no end.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from alasso.bench.cli.console import spread
from alasso.bench.config import RunConfig, nearest
from alasso.bench.labels import count_of
from alasso.bench.probe import Measured
from alasso.bench.report.aggregate import Group
from alasso.bench.reproduce import parts, show, timing
from alasso.bench.reproduce.claims import DOES_NOT_HOLD, NOT_RUN, WITHIN_NOISE, Judged, Untested
from alasso.bench.reproduce.counting import EXAMPLES, steps_of
from alasso.bench.reproduce.evidence import Evidence, NotRun
from alasso.bench.reproduce.experiments import Experiment
from alasso.bench.reproduce.plan import part_title, whole_parts
from alasso.bench.reproduce.statistics import Finding, difference, mean
from alasso.bench.results import Result, device_of
from alasso.errors import AlassoError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIRECTIVE = re.compile(r"\{\{\s*(.*?)\s*\}\}")
STRAY = re.compile(r"\{\{[^{}\n]*\}?|[^{}\s]*\}\}")
MISSING = "not run"
TABLE_MEASURES = (("A", "A"), ("F", "F"), ("I", "I"), ("std", "std over tasks"), ("first_task", "first task"))

OF_PROBES = {"probe-sides": "sides", "probe-surrogates": "surrogates"}  # figures, and what draws them

#: Used where a study has no template of its own.
PLAIN_TEMPLATE = "# Reproduction\n\n{{tally}}\n\n{{verdicts}}\n\n## Times\n\n{{times}}\n"

QUICK_TEMPLATE = "# Small version\n\n{{quick-note}}\n\n{{verdicts}}\n\n{{experiments}}\n\n{{machines}}.\n"

RE_SPLIT = (
    "**CIFAR-100 is the re-split edition**: the same 60,000 images, but divided anew into 500 for training and 100 for "
    "testing a class. Its numbers are comparable with each other, and only roughly with published ones."
)
UNVERIFIED = "Unverified: complete, but not unpacked from the publisher's archive, whose checksum is known."


@dataclass
class Document:
    """All that a template can ask for. ``figures``: folder for drawings, None for no drawings."""

    evidence: Evidence
    judged: Sequence[Judged]
    untested: Sequence[Untested] = ()
    out: Path = Path("results")
    figures: Path | None = None
    quick: bool = False
    words: show.Words = show.OF_PAPER

    def fill(self, template: str) -> str:
        if stray := STRAY.search(DIRECTIVE.sub("", template)):
            raise AlassoError(f"{stray[0]!r} is not closed, or not opened: write {{{{name}}}}")
        return DIRECTIVE.sub(lambda found: self.answer(found[1].split()), template)

    def known(self) -> dict[str, Callable[..., str]]:
        """What a template can ask for, by name."""
        return {
            "tally": self.tally,
            "quick-note": lambda: self.words.quick_note,
            "verdicts": self.verdicts,
            "not-holding": self.not_holding,
            "bars": self.bars,
            "untested": self.untested_list,
            "mean": self.mean,
            "difference": self.difference,
            "table": self.table,
            "figure": self.figure,
            "experiments": self.experiments,
            "times": self.times,
            "edition": self.edition,
            "editions": self.editions,
            "machines": self.machines,
        }

    def answer(self, words: Sequence[str]) -> str:
        known = self.known()
        name, *arguments = words or [""]
        if name not in known:
            raise AlassoError(f"the template asks for {name!r}{nearest(name, known)}")
        try:
            inspect.signature(known[name]).bind(*arguments)
        except TypeError as error:
            raise AlassoError(f"the template's {' '.join(words)!r} has too few or too many words") from error
        return known[name](*arguments)

    # -- claims -------------------------------------------------------------------------------------------------

    def tally(self) -> str:
        return show.tally_sentence(self.judged)

    def verdicts(self) -> str:
        rows = [["claim", self.words.where, self.words.said, "ours", "bar", show.verdict_heading(self.quick)]]
        for topic, claims in show.by_topic(self.judged).items():
            rows.append([f"**{show.in_small(topic) if self.quick else topic}**", "", "", "", "", ""])
            for one in claims:
                verdict = show.verdict_in_words(one, quick=self.quick)
                verdict = f"**{verdict}**" if one.verdict == DOES_NOT_HOLD else verdict
                ours = show.shown_of(one)
                claim = one.claim
                rows.append([claim.says, claim.where, show.shown_paper(claim), ours, claim.bar(), verdict])
        some = dict.fromkeys(one.diverged for one in self.judged if one.finding and one.diverged)
        notes = [f"† {diverged}. What is found is of the other seeds." for diverged in some]
        return "\n\n".join([markdown_table(rows, right=(2, 3, 4)), *notes])

    def not_holding(self) -> str:
        """Every claim that does not hold or is within noise: by how much, and what was tried."""
        judged = [one for one in self.judged if one.verdict in (DOES_NOT_HOLD, WITHIN_NOISE)]
        lines: list[str] = []
        for topic, claims in show.by_topic(judged).items():
            lines += ["", f"**{topic}**", "", *(line for one in claims for line in self.falling_short(one))]
        waiting = show.missing_lines([one for one in self.judged if one.verdict == NOT_RUN], most=99)
        if waiting:
            lines += ["", "Claims that wait for results:", "", *(f"- {line}" for line in waiting)]
        if without := show.not_computable_lines(self.judged):
            lines += ["", "Claims for which the results give no number:", "", *(f"- {line}" for line in without)]
        return "\n".join(lines).strip() or "None."

    def falling_short(self, one: Judged) -> list[str]:
        """By how much, in one line, and below it the paragraphs of the claim's note."""
        claim, finding = one.claim, one.finding
        assert finding is not None  # or there would be no verdict of this kind
        margin = claim.margin(finding.value)
        far = f"{abs(margin):.3f}" if abs(margin) >= 0.0005 else "less than 0.001"
        by = f"{far} {'inside' if margin >= 0 else 'outside'} the bar ({claim.bar()})"
        about = f" ({finding.note})" if finding.note else ""
        first = (
            f"- **{claim.says}** ({claim.where}) {show.verdict_in_words(one, quick=False)}: "
            f"{show.shown(finding)}{about}, {by}; "
            f"{self.words.it_says}: {show.shown_paper(claim)}."
        )
        return [first, *(f"    - {paragraph}" for paragraph in claim.note.splitlines() if paragraph)]

    def bars(self) -> str:
        rows = [["claim", "computed as", "from", "bar", "why this bar"]]
        for one in self.judged:
            claim = one.claim
            references = ", ".join(f"`{reference}`" for reference in claim.references)
            measure = claim.arguments.get("measure")
            how = f"{claim.how} of {measure}" if measure else claim.how
            rows.append([f"`{claim.id}`", how.replace("_", " "), references, claim.bar(), claim.why])
        return markdown_table(rows)

    def untested_list(self) -> str:
        return "\n".join(f"- “{one.says}” ({one.where}) {one.why}" for one in self.untested) or "None."

    # -- numbers ------------------------------------------------------------------------------------------------

    def mean(self, reference: str, measure: str = "A") -> str:
        found = self._number(lambda: mean(self.evidence, of=reference, measure=measure))
        return beside(found, self.evidence.how_it_diverged(reference))

    def difference(self, reference: str, less: str, measure: str = "A") -> str:
        found = self._number(lambda: difference(self.evidence, of=reference, less=less, measure=measure), signed=True)
        return beside(found, self.evidence.divergences([reference, less]))

    def _number(self, compute: Callable[[], Finding], *, signed: bool = False) -> str:
        try:
            finding = compute()
        except NotRun:
            return MISSING
        sign = "+" if signed and round(finding.value, 3) > 0 else ""
        return sign + show.shown(finding)

    def table(self, *names: str) -> str:
        """Every run of some experiments with its measures."""
        rows = [["run", *(heading for _, heading in TABLE_MEASURES), "seeds"]]
        for name, experiment in self._experiments(names).items():
            for run in experiment.runs:
                group = self.evidence.group(f"{name}/{run}")
                diverged = self.evidence.how_it_diverged(f"{name}/{run}")
                if group is None:
                    rows.append([run, beside(MISSING, diverged), *[""] * len(TABLE_MEASURES)])
                else:
                    numbers = [measured(group, key) for key, _ in TABLE_MEASURES]
                    rows.append([run, *numbers, beside(str(len(group.results)), diverged)])
        return markdown_table(rows, right=range(1, len(rows[0])))

    def _experiments(self, names: Sequence[str]) -> dict[str, Experiment]:
        """By name; a template that asks for others, or for none, has a slip."""
        known = self.evidence.experiments
        if not names:
            raise AlassoError("the template names no experiment where it should")
        for name in names:
            if name not in known:
                raise AlassoError(f"there is no experiment {name!r}{nearest(name, known)}")
        return {name: known[name] for name in names}

    # -- figures ------------------------------------------------------------------------------------------------

    def figure(self, name: str, *experiments: str) -> str:
        """One of the report's figures from the results of these experiments alone."""
        title = f"{name.replace('-', ' ')}: {', '.join(experiments)}"
        known = [*drawers(), *OF_PROBES]
        if name not in known:
            raise AlassoError(f"there is no figure {name!r}{nearest(name, known)}")
        found = self._experiments(experiments)
        if name in OF_PROBES and not all(one.probe for one in found.values()):
            raise AlassoError(f"the figure {name} is of an experiment with [probe], which {experiments[0]} has not")
        if self.figures is None:
            return f"*No figure of {title}: figures need the extra `report`.*"
        drawn = self.drawn(name, experiments)
        if drawn is None:
            lacking = why_not_drawn(name) if self.evidence.results_of(experiments) else MISSING
            return f"*No figure of {title}: {lacking}.*"
        from alasso.bench.report.figures import save

        (path,) = save(drawn, self.figures, f"{experiments[0]}-{name}", formats=("svg",))
        return f"![{title}]({self.figures.name}/{path.name})"

    def drawn(self, name: str, experiments: Sequence[str]) -> Figure | None:
        from alasso.bench.probe import figures as probe_figures

        if name in OF_PROBES:
            draw = getattr(probe_figures, OF_PROBES[name])
            run = next(iter(self.evidence.experiments[experiments[0]].runs))
            try:
                first = next(iter(self.evidence.probes(f"{experiments[0]}/{run}").values()))
                return draw(first)  # type: ignore[no-any-return]
            except NotRun:
                return None
        found = self.evidence.results_of(experiments)
        return drawers()[name](found) if found else None

    # -- how it was run -----------------------------------------------------------------------------------------

    def experiments(self) -> str:
        rows = [["experiment", "what it is", self.words.where, "results", "asked for", "seconds in result files"]]
        for one in self.evidence.experiments.values():
            found = self.evidence.results_of([one.id])
            if one.probe is not None:
                there = sum(len(self._probes_of(f"{one.id}/{run}")) for run in one.runs)
                rows.append([f"`{one.id}`", one.title, one.paper, str(there), str(len(one.configs())), "–"])
                continue
            seconds = f"{sum(result.seconds for result in found):,.0f}" if found else "–"
            rows.append([f"`{one.id}`", one.title, one.paper, str(len(found)), str(len(one.configs())), seconds])
        return markdown_table(rows, right=(3, 4, 5))

    def _probed(self) -> list[str]:
        return [f"{e.id}/{run}" for e in self.evidence.experiments.values() if e.probe is not None for run in e.runs]

    def _probes_of(self, reference: str) -> list[Measured]:
        try:
            return list(self.evidence.probes(reference).values())
        except NotRun:
            return []

    def times(self) -> str:
        """Wall-clock time of each part, as it was carried out; of others, what their result files say."""
        clocked = parts.summed(parts.read_parts(self.out))
        if not clocked:
            return "No part has been timed by the clock; what runs took by themselves is in their files."
        whole, one_seed = (self._runs_of_parts(seeds) for seeds in (None, 1))
        titles = {row.part for row in clocked}
        found = clocked + [row for row in self._by_result_files() if row.part in whole and row.part not in titles]
        rows = [["part", "device", "runs", "time", "seconds a run", "runs in all", "at this rate", "with one seed"]]
        sums: dict[str, list[float]] = {}
        for row in found:
            times = [row.seconds, *(row.seconds_for(of.get(row.part, ())) or 0.0 for of in (whole, one_seed))]
            taken, *at_rate = map(human_or_dash, times)
            count, a_run = str(row.runs), f"{row.seconds / max(row.runs, 1):.1f}"
            title = row.part if row.part in titles else f"{row.part} (by result files)"
            rows.append([title, row.device, count, taken, a_run, str(len(whole.get(row.part, ()))), *at_rate])
            if "tiny-imagenet" not in row.part:  # which the goal for the whole leaves out
                sums[row.device] = [a + b for a, b in zip(sums.get(row.device, (0, 0, 0)), times, strict=True)]
        but_one = any("tiny-imagenet" in row.part for row in found)
        for device, of_device in sums.items():  # apart: a part that two devices have carried out is needed once
            taken, *at_rate = map(human_or_dash, of_device)
            title = f"of these, all{' but Tiny ImageNet' if but_one else ''}"
            rows.append([title, device, "", taken, "", "", *at_rate])
        return markdown_table(rows, right=(2, 3, 4, 5, 6, 7))

    def _by_result_files(self) -> list[parts.Row]:
        """What runs took by themselves, which leaves out what lies between them."""
        of_known_size = [result for result in self._all_results() if result.config.benchmark in EXAMPLES]
        return parts.summed(
            parts.Row(
                part_title(one.config), device_of(one.environment), 1, steps_of(one.config), one.seconds, finished=""
            )
            for one in of_known_size
        )

    def _runs_of_parts(self, seeds: int | None) -> dict[str, Sequence[RunConfig]]:
        """By title of part, what it trains where nothing is there yet."""
        return {part.title: part.trained for part in whole_parts(self.evidence.experiments.values(), seeds)}

    def edition(self, *names: str) -> str:
        """A remark beside numbers whose data are not the published edition."""
        experiments = self._experiments(names)
        found = self.evidence.edition(f"{name}/{run}" for name, one in experiments.items() for run in one.runs)
        return f"Data: {found}." if found else ""

    def editions(self) -> str:
        """Which editions of the data the results rest on."""
        found: dict[str, set[str]] = {}
        for result in self._all_results():
            for name, edition in result.data.items():
                found.setdefault(name, set()).add(edition)
        if not found:
            return MISSING
        lines = [f"{name}: {' and '.join(sorted(editions))}" for name, editions in sorted(found.items())]
        text = "Editions of the data, as the result files name them: " + "; ".join(lines) + "."
        re_split = "re-split" in found.get("cifar100", set())
        unverified = any("unverified" in editions for editions in found.values())
        return f"{text}{f' {RE_SPLIT}' if re_split else ''}{f' {UNVERIFIED}' if unverified else ''}"

    def machines(self) -> str:
        """Devices and versions, with the commits and how many results, probes among them, each of these has."""
        counts: dict[str, Counter[str]] = {}
        probed = [one for name in self._probed() for one in self._probes_of(name)]
        for env in [*(result.environment for result in self._all_results()), *(one.environment for one in probed)]:
            on = counts.setdefault(f"{device_of(env)}, torch {env.get('torch')}", Counter())
            on[str(env.get("commit") or "unknown")[:8]] += 1
        lines = []
        for name, of_commit in counts.items():
            commits = ", ".join(f"{commit} ({count})" for commit, count in of_commit.most_common())
            lines.append(f"{name}: {count_of(of_commit.total(), 'result')}, by commit: {commits}")
        return "; ".join(lines) or MISSING

    def _all_results(self) -> list[Result]:
        return self.evidence.results_of(self.evidence.experiments)


def drawers() -> dict[str, Callable[[Sequence[Result]], Figure | None]]:
    """Figures that are drawn from results, by name."""
    from alasso.bench.report import figures as figure_files

    return {known: draw for known, draw, _ in (*figure_files.OF_A_SECTION, *figure_files.OF_ALL)}


def why_not_drawn(name: str) -> str:
    """What results lack that give no such figure."""
    from alasso.bench.report import figures as figure_files

    lacking = {known: why for known, _, why in (*figure_files.OF_A_SECTION, *figure_files.OF_ALL)}
    return lacking.get(name) or MISSING


def beside(found: str, diverged: str) -> str:
    """What was found, and of which seeds nothing could be.

    >>> beside("not run", ""), beside("not run", "diverged: …"), beside("0.9 (2)", "diverged: …")
    ('not run', 'diverged: …', '0.9 (2); diverged: …')
    """
    return diverged if diverged and found == MISSING else "; ".join(filter(None, (found, diverged)))


def measured(group: Group, key: str) -> str:
    return spread(group.measures[key]).replace("-", "−")


def human_or_dash(seconds: float) -> str:
    return timing.human(seconds) if seconds else "–"


def markdown_table(rows: Sequence[Sequence[str]], right: Sequence[int] | range = ()) -> str:
    """
    >>> print(markdown_table([["a", "b"], ["x|y", "1"]], right=[1]))
    | a | b |
    |---|---:|
    | x\\|y | 1 |
    """
    line = "|" + "|".join("---:" if column in right else "---" for column in range(len(rows[0]))) + "|"
    cells = [["".join(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    shown = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([shown[0], line, *shown[1:]])


def template_of(folder: Path) -> str:
    path = folder / "document.md"
    if not path.exists():
        return PLAIN_TEMPLATE
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise AlassoError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise AlassoError(f"{path} is not a text in UTF-8") from error
