"""``alasso reproduce``, as the command line registers it. Heavy imports wait for their turn."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from alasso.bench.cli.console import DataDir, Device, Terminal, end_stopped, say
from alasso.bench.labels import count_of
from alasso.errors import AlassoError

if TYPE_CHECKING:
    from alasso.bench.reproduce.claims import Judged
    from alasso.bench.reproduce.evidence import Evidence
    from alasso.bench.reproduce.plan import Plan
    from alasso.bench.reproduce.study import Study
    from alasso.bench.reproduce.timing import Estimate

A_DAY = 86_400  # seconds


def reproduce(
    only: Annotated[list[str] | None, typer.Option(help="Experiments by id, one or several; see: alasso list")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="All but these experiments.")] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Seeds of each run. Default: as each experiment says.", min=1)
    ] = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Folder of results. Default: results; runs/quick with --quick; runs/… with --study."
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="A small version, on permuted digits: minutes on a CPU, too small to judge the paper."
        ),
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what would be run and how long it takes; run nothing.")
    ] = False,
    judge: Annotated[
        bool, typer.Option("--judge", help="Run nothing: verdicts and the document from the results there are.")
    ] = False,
    document: Annotated[
        Path | None,
        typer.Option(help="The document. Default: docs/reproduction.md; beside other results than those in results."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="The page. Default: runs/report.html; beside other results; with --judge, none."),
    ] = None,
    study: Annotated[
        Path | None, typer.Option(help="Experiments and claims of your own: a folder laid out as the paper's is.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the verdicts.")] = False,
) -> None:
    """Run the paper's experiments as far as they are missing, and give a verdict on each of its claims."""
    from alasso.bench.io import check_file
    from alasso.bench.reproduce.study import Places, Study

    refuse_contradictions(plan, judge, seeds, document, report)
    places = Places.chosen(quick, out, document, report, study)
    work = Study.read(study, only or [], skip or [], seeds, quick, places)
    work.check_template()
    if plan:
        return show_plan(work, device, data_dir)
    if judge and not any(places.out.glob("*.json")):
        raise AlassoError(f"there are no results in {places.out}; name their folder with --out")
    with_page = not judge or report is not None
    check_file(places.document, ".md")
    work.refuse_to_write_over_itself()
    if with_page:
        check_file(places.report, ".html", ".htm")
    if not judge:
        run_missing(work, device, data_dir, quiet=quiet)
    return conclude(work, quiet=quiet, with_page=with_page)


def refuse_contradictions(
    plan: bool, judge: bool, seeds: int | None, document: Path | None, report: Path | None
) -> None:
    if plan and judge:
        raise AlassoError("--plan says what would be run, --judge judges what was: give one of the two")
    if plan and (document or report):
        raise AlassoError(f"--plan writes nothing: leave out {'--document' if document else '--report'}, or --plan")
    if judge and seeds is not None:
        raise AlassoError("--judge takes all seeds there are: leave out --seeds, or --judge")


def show_plan(work: Study, device: str, data_dir: Path | None) -> None:
    from alasso.bench.reproduce import execute as carrying
    from alasso.bench.reproduce import show

    work.evidence()  # what is there can be read
    work.refuse_other_images()
    planned = work.plan(device)
    if planned.empty:
        return say(nothing_to_run(planned, work))
    estimate = work.estimate(planned, device, say)
    Terminal().print(show.plan_table(planned, estimate, work.chosen))
    if not work.places.out.is_dir():
        say(f"{work.places.out} does not exist yet. If you have results elsewhere, name their folder with --out.")
    say(f"{to_do(planned)} already in {work.places.out}{estimated(estimate)}{carrying.came_to_no_end(planned)}.")
    if absent := carrying.absent_data(planned, data_dir):
        advice = carrying.data_advice(absent, work.chosen)
        say(f"{advice[0].upper()}{advice[1:]}.")
    if estimate.seconds > A_DAY:
        quick = "" if work.quick else "--quick takes minutes, "
        say(f"{quick}--only runs some of it: see alasso list.")
    return None


def to_do(planned: Plan) -> str:
    from alasso.bench.reproduce import execute as carrying

    return f"To do: {carrying.to_do(planned)}; {planned.present + planned.probes_present}"


def estimated(estimate: Estimate) -> str:
    return f"; {sentence}" if (sentence := estimate.sentence()) else ""


def nothing_to_run(planned: Plan, work: Study) -> str:
    from alasso.bench.reproduce import execute as carrying

    found = f"{there(planned)} in {work.places.out}{carrying.came_to_no_end(planned)}"
    return f"Nothing to run: {found}. To make them yourself, name another folder: --out."


def there(planned: Plan) -> str:
    runs, probes = planned.present, planned.probes_present
    if not runs + probes:
        return "no result is" if planned.diverged else "what there is to measure is"
    counted = " and ".join(count_of(count, kind) for count, kind in ((runs, "result"), (probes, "probe")) if count)
    if runs + probes == 1:
        return f"the {counted} is"
    return f"{'the' if max(runs, probes) == 1 else 'all'} {counted} are"


def run_missing(work: Study, device: str, data_dir: Path | None, *, quiet: bool) -> None:
    from alasso.bench.reproduce import execute as carrying
    from alasso.bench.training.sweep import Stopped

    work.evidence()  # what is there can be read
    work.refuse_other_images()
    planned = work.plan(device)
    if planned.empty:
        return say(nothing_to_run(planned, work))
    if absent := carrying.absent_data(planned, data_dir):
        raise AlassoError(carrying.data_advice(absent, work.chosen))
    work.places.refuse_mixture(work)
    hush = (lambda line: None) if quiet else say
    estimate = work.estimate(planned, device, hush)
    hush(f"{to_do(planned)} already there{estimated(estimate)}{carrying.came_to_no_end(planned)}.")
    options = carrying.options_for(work.places.out, data_dir, device, quiet=quiet)
    try:
        return carrying.carry_out(planned, estimate, options, Terminal(), hush)
    except (Stopped, KeyboardInterrupt) as stopped:
        raise end_stopped(stopped, sys.argv[1:]) from None


def conclude(work: Study, *, quiet: bool, with_page: bool) -> None:
    """The verdict table, the document, the page."""
    from alasso.bench.reproduce import show
    from alasso.bench.reproduce.claims import NOT_RUN

    evidence = work.evidence()
    judged = work.judged(evidence)
    if judged and all(one.verdict == NOT_RUN for one in judged) and not evidence.by_hash:
        raise AlassoError(f"{work.places.out} holds no result of these experiments; name their folder with --out")
    about = [one for one in judged if one.claim in work.claims_about_chosen()]
    console = Terminal()
    if about:
        console.print(show.verdict_table(about, quick=work.quick, width=console.width, words=work.words))
    if not work.quick or not about:
        say(show.tally_sentence(about))
    for line in show.diverged_lines(evidence, work.chosen, about):
        say(line)
    if not quiet:
        for line in (*show.not_computable_lines(about), *show.missing_lines(about)):
            say(line)
    write(work, judged, evidence, with_page=with_page)


def write(work: Study, judged: Sequence[Judged], evidence: Evidence, *, with_page: bool) -> None:
    from alasso.bench.io import write_whole

    page = work.page(judged) if with_page else None
    write_whole(work.places.document, work.document(judged, drawing=True, evidence=evidence).encode())
    uncounted = sum(not one.claim.counted for one in judged)
    aside = f", {uncounted} of them not counted" if uncounted else ""
    say(f"wrote {work.places.document}: {count_of(len(judged), 'claim')}{aside}")
    if page is not None:
        write_whole(work.places.report, page.encode())
        say(f"wrote {work.places.report}: all results in {work.places.out}")
