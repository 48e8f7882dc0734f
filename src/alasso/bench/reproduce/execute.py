"""Carrying a plan out: part by part, probes last. What is finished stays finished wherever it is stopped."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console

from alasso.bench import data, results
from alasso.bench.config import RunConfig
from alasso.bench.io import write_whole
from alasso.bench.labels import count_of
from alasso.bench.registry import BENCHMARKS
from alasso.bench.reproduce import timing
from alasso.bench.reproduce.experiments import Experiment
from alasso.bench.reproduce.parts import note_part
from alasso.bench.reproduce.plan import Part, Plan, Probe
from alasso.bench.results import result_path
from alasso.bench.training import sweep as runs
from alasso.bench.training.progress import stop_on_request
from alasso.errors import AlassoError


def options_for(out: Path, data_dir: Path | None, device: str, *, quiet: bool) -> runs.Options:
    """Runs begun before are gone on with."""
    return runs.Options(out=out, data_dir=data_dir, device=device, resume=True, quiet=quiet)


def carry_out(
    plan: Plan, estimate: timing.Estimate, options: runs.Options, console: Console, say: Callable[[str], None]
) -> None:
    training: list[Callable[[], None]] = [
        *(partial(train_part, part, estimate, options, console, say) for part in plan.parts),
    ]
    with stop_on_request() as stop_requested:
        for train in training:
            train()
            if stop_requested() and (plan.probes or train is not training[-1]):  # in the last moments of its last run
                raise runs.Stopped("the end of a part")
    for probe in plan.probes:
        measure(probe, options, say)


def train_part(
    part: Part, estimate: timing.Estimate, options: runs.Options, console: Console, say: Callable[[str], None]
) -> None:
    about = f", about {timing.roughly(estimate.parts[part.title])}" if part.title in estimate.parts else ""
    say(f"{part.title}: {counted(len(part.trained))}{about}")
    with timed(part, estimate.device, options.out):
        try:
            runs.carry_out(part.configs, options, console)
        except runs.SomeDiverged as error:  # no reason to leave out the other parts
            console.print(error.which, highlight=False, soft_wrap=True, markup=False)


def counted(trained: int) -> str:
    return count_of(trained, "run")


def came_to_no_end(plan: Plan) -> str:
    """Half a sentence, for the end of one; nothing where there is nothing to say."""
    if not plan.diverged:
        return ""
    count = len(plan.diverged)
    notes = f"note, {plan.diverged[0].name}{results.DIVERGED}," if count == 1 else f"notes, NAME{results.DIVERGED},"
    advice = f"not tried again until {'its' if count == 1 else 'their'} {notes} {'is' if count == 1 else 'are'} deleted"
    return f"; not counting {count_of(count, 'run')} that diverged, which {'is' if count == 1 else 'are'} {advice}"


def to_do(plan: Plan) -> str:
    """All that the plan's table counts: runs, and single weights measured."""
    runs_ = [counted(plan.runs)] if plan.runs else []
    probes = [count_of(len(plan.probes), "probe")] if plan.probes else []
    return " and ".join(runs_ + probes)


@contextmanager
def timed(part: Part, device: str, out: Path) -> Iterator[None]:
    """Note how long a part took, also when it was stopped midway; runs on the way of others took no time."""
    began = time.monotonic()
    try:
        yield
    finally:
        trained = [config for config in part.trained if result_path(config, out).exists()]
        if out.is_dir():  # a part that was stopped before any of its runs ended took time, too
            note_part(out, part.title, device, trained, time.monotonic() - began, ended_early(part, out))


def ended_early(part: Part, out: Path) -> list[RunConfig]:
    """Runs of a part that diverged, as long as they went; a note that cannot be read is said elsewhere."""
    found = []
    for config in part.trained:
        try:
            found.append(dataclasses.replace(config, tasks=results.read_note(results.note_path(config, out)).task))
        except AlassoError:
            continue
    return found


def measure(probe: Probe, options: runs.Options, say: Callable[[str], None]) -> None:
    """Learn the first task of a run again and move its weights; the numbers go beside the results."""
    from alasso.bench.probe.measure import probe_first_task

    measured = probe_first_task(probe.config, probe.plan, data_dir=options.data_dir, device=options.device, say=say)
    write_whole(probe.path(options.out), measured.as_file())


# -- data ---------------------------------------------------------------------------------------------------------


def absent_data(plan: Plan, data_dir: Path | None) -> list[str]:
    """Names of the data sets that the plan needs and that are not whole on this machine."""
    planned = [part.trained[0] for part in plan.parts]
    benchmarks = dict.fromkeys(config.benchmark for config in [*planned, *(probe.config for probe in plan.probes)])
    names = dict.fromkeys(name for benchmark in benchmarks for name in BENCHMARKS[benchmark].data)
    return [name for name in names if not _is_there(name, data_dir)]


def _is_there(name: str, data_dir: Path | None) -> bool:
    try:
        return all(report.status == "ok" for report in data.check(name, data_dir))
    except AlassoError:
        return False


def data_advice(absent: Sequence[str], experiments: Iterable[Experiment]) -> str:
    """One line: what is missing, how to get it, how to do without."""
    experiments = list(experiments)
    waiting = [one.id for one in experiments if set(one.data()) & set(absent)]
    without = f"; or go on without: --skip {' '.join(waiting)}" if len(waiting) < len(experiments) else ""
    return (
        f"data not found: {', '.join(absent)}; name their folder with --data-dir, "
        f"or run `alasso data fetch {' '.join(absent)}`{without}"
    )
