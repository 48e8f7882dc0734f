"""``alasso reproduce``: runs the paper's experiments as far as they are missing, and judges its claims."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from alasso.bench import results
from alasso.bench.cli.console import AllowModel, DataDir, Device, Ray, Shard, Terminal, end_stopped, say
from alasso.bench.config import RunConfig, count_of
from alasso.bench.io import check_file, write_whole
from alasso.bench.models import check_allowed
from alasso.bench.report.page import ClaimRow, Claims, build
from alasso.bench.report.sections import collect
from alasso.bench.reproduce.claims import (
    ALONE,
    DOES_NOT_HOLD,
    HOLDS,
    UNDECIDED,
    Claim,
    Judged,
    Untested,
    by_topic,
    interval_shown,
    judge_all,
    missing_lines,
    not_computable_lines,
    read_claims,
    shown_of,
    tally_sentence,
    verdict_in_words,
)
from alasso.bench.reproduce.document import Document
from alasso.bench.reproduce.experiments import Evidence, Experiment, chosen, find_paper, read_experiments
from alasso.bench.reproduce.experiments import pack as move_into_lines
from alasso.bench.reproduce.plan import Plan, carry_out, check_data, estimate, make_plan, roughly
from alasso.bench.training.sweep import Options, Stopped
from alasso.errors import AlassoError

MOST_SEEDS = 1000
PAGE = Path("runs/report.html")
TITLE = "The paper's claims"
STYLES = {HOLDS: "green", UNDECIDED: "yellow", DOES_NOT_HOLD: "red"}
CAPTION = (
    "ours: mean ± standard deviation over seeds (how many), and its 95 % interval. "
    f"{ALONE}: its own interval decides; by Holm's correction all claims together do not."
)
WIDE = 100  # columns of a terminal with room for the bar and where a claim stands
NARROW = 76  # and below these, numbers go under the claim


def reproduce(
    only: Annotated[list[str] | None, typer.Option(help="Experiments by id, one or several; see: alasso list")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="All but these experiments.")] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Seeds of each run. Default: as each experiment says.", min=1, max=MOST_SEEDS)
    ] = None,
    allow_model: AllowModel = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    paper: Annotated[
        Path | None, typer.Option(help="Folder of experiments, claims and results. Default: paper.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder of results. Default: that of the paper."),
    ] = None,
    shard: Shard = None,
    ray: Ray = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only show what is missing and how long it takes.")] = False,
    judge: Annotated[bool, typer.Option("--judge", help="Run nothing: judge the results there are.")] = False,
    unpack: Annotated[
        Path | None, typer.Option(help="Run nothing: write each result there is as a JSON file into this folder.")
    ] = None,
    pack: Annotated[
        bool, typer.Option("--pack", help="Run nothing: move results into one file an experiment, a line each.")
    ] = False,
    document: Annotated[
        Path | None,
        typer.Option(help="The document. Default: REPRODUCTION.md in the paper's folder; in another --out, there."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help=f"The page. Default: {PAGE}; in another --out, there; with --judge, none.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the verdicts.")] = False,
) -> None:
    """Run the paper's missing experiments and judge each of its claims."""
    if sum((plan, judge, pack, unpack is not None)) > 1:
        raise AlassoError("--plan, --judge, --pack and --unpack exclude each other: give one of them")
    if judge and seeds is not None:
        raise AlassoError("--judge takes all seeds there are: leave out --seeds, or --judge")
    if shard is not None and (judge or unpack is not None):
        raise AlassoError("--judge and --unpack take all results there are: leave out --shard")
    work = Work.read(paper, only or [], skip or [], out)
    for line in work.evidence.left_out.values():
        say(f"left out: {line}")
    if unpack is not None:
        found = [results.write(one, unpack) for one in work.evidence.results_of(work.references)]
        return say(f"wrote {count_of(len(found), 'result')} to {unpack}")
    if pack:
        return say(f"moved {count_of(move_into_lines(work.chosen, work.evidence, work.out), 'result')} in {work.out}")
    if plan:
        return show_plan(work, make_plan(work.chosen, work.evidence, seeds, shard))
    document = document or (work.paper if work.is_papers_own else work.out) / "REPRODUCTION.md"
    page_file = report or (None if judge else PAGE if work.is_papers_own else work.out / PAGE.name)
    check_file(document, ".md")
    if page_file is not None:
        check_file(page_file, ".html", ".htm")
    if not judge:
        planned = make_plan(work.chosen, work.evidence, seeds, shard)
        used = [config.model for config in (*planned.missing, *(probe.config for probe in planned.probes))]
        check_allowed(used, allow_model or [], work.paper, "--allow-model")
        options = Options(out=work.out, data_dir=data_dir, device=device, resume=True, quiet=quiet, ray=ray)
        run_missing(work, planned, options)
        if shard is not None:
            return say("When all shards are there, the same command with --judge and without --shard judges.")
        work = replace(work)  # forgets the evidence it has read
    return conclude(work, document, page_file, quiet=quiet)


@dataclass(frozen=True)
class Work:
    """What one call works with.

    Args:
        paper: The folder of experiments and claims.
        out: The folder of results.
        experiments: All experiments.
        chosen: Those that were asked for.
        claims: What is judged.
        untested: What is not.
    """

    paper: Path
    out: Path
    experiments: Mapping[str, Experiment]
    chosen: Sequence[Experiment]
    claims: Sequence[Claim]
    untested: Sequence[Untested]

    @staticmethod
    def read(paper: Path | None, only: Sequence[str], skip: Sequence[str], out: Path | None) -> Work:
        """Reads experiments and claims."""
        folder = find_paper(paper)
        experiments = read_experiments(folder)
        claims, untested = read_claims(folder, experiments)
        out = out or folder / "results"
        return Work(folder, out, experiments, chosen(experiments, only, skip), claims, untested)

    @property
    def is_papers_own(self) -> bool:
        """Whether results go among the paper's own."""
        return self.out.resolve() == (self.paper / "results").resolve()

    @property
    def references(self) -> list[str]:
        """The runs that were asked for."""
        return [reference for one in self.chosen for reference in one.references]

    @cached_property
    def evidence(self) -> Evidence:
        """What lies in the folder of results."""
        return Evidence.of_folder(self.experiments, self.out)

    @cached_property
    def known(self) -> Sequence[results.Result]:
        """Finished runs, by which others are estimated: those in the folder, and the paper's."""
        if self.is_papers_own:
            return self.evidence.results
        return self.evidence.results + Evidence.of_folder(self.experiments, self.paper / "results").results


# -- what is missing ------------------------------------------------------------------------------------------------


def show_plan(work: Work, planned: Plan) -> None:
    """What is there, what is missing, and how long it takes."""
    table = Table(title="To run", title_justify="left")
    table.add_column("part")
    table.add_column("used by", overflow="fold")  # ids, which have to be typed
    for column in ("missing", "done", "about"):
        table.add_column(column, justify="right", no_wrap=True)
    for part in planned.parts:
        about = how_long(work, part.missing)[0] if part.missing else "–"
        table.add_row(part.title, ", ".join(part.used_by), str(len(part.missing)), str(part.present), about or "?")
    if planned.probes or planned.probes_present:
        users = ", ".join(one.id for one in work.chosen if one.probe is not None)
        table.add_row("single weights", users, str(len(planned.probes)), str(planned.probes_present), "–")
    Terminal().print(table)
    say(to_do(work, planned))


def to_do(work: Work, planned: Plan) -> str:
    """One line: what is missing, how long it takes, what is there, what is not tried again."""
    there = f"{count_of(planned.present, 'result')} in {work.out}"
    about, where = how_long(work, planned.missing)
    missing = f"To do: {planned.to_do()}{f', about {about} {where}' if about else ''}; {there}"
    nothing = f"Nothing to run: {there}; to make them yourself, name another folder with --out"
    said = nothing if planned.empty else missing
    if planned.diverged:
        runs = count_of(len(planned.diverged), "run")
        said += f"; {runs} diverged and will not be tried again: delete NAME{results.DIVERGED} to try"
    return f"{said}."


def how_long(work: Work, configs: Sequence[RunConfig]) -> tuple[str, str]:
    """How long runs take, and as on which device; empty where no finished run tells."""
    found = estimate(configs, work.known)
    return (roughly(found[0]), f"as on {found[1]}") if found and configs else ("", "")


def run_missing(work: Work, planned: Plan, options: Options) -> None:
    """Trains and measures what is missing."""
    tell = (lambda line: None) if options.quiet else say
    if planned.empty:
        return say(to_do(work, planned))
    check_data(planned, work.chosen, options.data_dir)
    tell(to_do(work, planned))
    try:
        return carry_out(planned, options, Terminal(), tell)
    except (Stopped, KeyboardInterrupt) as stopped:
        raise end_stopped(stopped, sys.argv[1:]) from None


# -- verdicts -------------------------------------------------------------------------------------------------------


def conclude(work: Work, document: Path | None, page_file: Path | None, *, quiet: bool) -> None:
    """Judges all claims on all results there are; shows the verdicts, writes the document and the page."""
    evidence = work.evidence
    if not evidence.names and not evidence.all_probes and not evidence.ended_early:
        raise AlassoError(f"{work.out} holds no result of these experiments; name their folder with --out")
    judged = judge_all(work.claims, evidence)
    about = [one for one in judged if set(work.references) & set(one.claim.references)]
    console = Terminal()
    if about:
        console.print(verdict_table(about, width=console.width))
    say(tally_sentence(about))
    for reference in work.references:
        if how := evidence.how_it_diverged(reference):
            say(f"{reference} {how}")
    for line in () if quiet else (*not_computable_lines(about), *missing_lines(about)):
        say(line)
    if document is not None:
        template = work.paper / "template.md"
        text = Document(evidence, judged, work.untested, document.parent / "figures").fill(read_template(template))
        write_whole(document, text.encode())
        say(f"wrote {document}: {count_of(len(judged), 'claim')}")
    if page_file is not None and work.out.is_dir():
        html = build(collect([work.out]), claims=for_page(judged))
        write_whole(page_file, html.encode())
        say(f"wrote {page_file}: all results in {work.out}")


def read_template(path: Path) -> str:
    """The document's template."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AlassoError(f"{path} cannot be read: {error}") from error


def verdict_table(judged: Sequence[Judged], *, width: int = WIDE) -> Table:
    """Claims under their topics; a terminal that is not wide gets what matters most."""
    table = Table(title=TITLE, title_justify="left", caption=CAPTION, caption_justify="left", box=SIMPLE_HEAD)
    wide, narrow = width >= WIDE, width < NARROW
    table.add_column("claim", ratio=1)
    if wide:
        table.add_column("in the paper", max_width=22)
    if not narrow:
        table.add_column("paper", justify="right", max_width=12)
        table.add_column("ours", justify="right", no_wrap=True)
    if wide:
        table.add_column("interval", justify="right", no_wrap=True)
        table.add_column("bar", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for topic, claims in by_topic(judged).items():
        table.add_row(Text(topic, "bold"))
        for one in claims:
            paper = one.claim.of_paper() if wide or not isinstance(one.claim.paper, str) else "–"
            says = Text(one.claim.says)
            if narrow:
                says.append(f"\n{shown_of(one)}; the paper: {paper}", "dim")
            cells: list[RenderableType] = [Padding(says, (0, 0, 0, 2))]
            cells += [one.claim.where] if wide else []
            cells += [] if narrow else [paper, shown_of(one)]
            cells += [interval_shown(one), one.claim.bar()] if wide else []
            table.add_row(*cells, Text(verdict_in_words(one), STYLES.get(one.verdict, "dim")))
    return table


def for_page(judged: Sequence[Judged]) -> Claims:
    """The same for the page."""
    topics = {topic: [page_row(one) for one in own] for topic, own in by_topic(judged).items()}
    columns = ("claim", "paper", "ours", "interval", "bar", "verdict")
    return Claims(TITLE, f"{tally_sentence(judged)} {CAPTION}", columns, topics)


def page_row(one: Judged) -> ClaimRow:
    """A claim with its verdict."""
    numbers = one.claim.of_paper(), shown_of(one), interval_shown(one), one.claim.bar()
    return ClaimRow(one.claim.says, one.claim.where, numbers, verdict_in_words(one), one.verdict)
