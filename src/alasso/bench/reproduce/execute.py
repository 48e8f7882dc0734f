"""Carrying a plan out: part by part, probes last. What is finished stays finished wherever it is stopped."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console

from alasso.bench import data, results
from alasso.bench import labels as naming
from alasso.bench.config import RunConfig
from alasso.bench.io import is_anothers, write_whole
from alasso.bench.labels import count_of
from alasso.bench.registry import BENCHMARKS
from alasso.bench.reproduce import timing
from alasso.bench.reproduce.counting import is_variational
from alasso.bench.reproduce.experiments import Experiment
from alasso.bench.reproduce.lost import LostStack
from alasso.bench.reproduce.parts import note_part
from alasso.bench.reproduce.plan import Part, Plan, Probe, part_title
from alasso.bench.results import checkpoint_path, result_path
from alasso.bench.training import diverged as divergence
from alasso.bench.training import sweep as runs
from alasso.bench.training.progress import stop_on_request
from alasso.errors import AlassoError


def options_for(out: Path, data_dir: Path | None, device: str, *, quiet: bool) -> runs.Options:
    """Runs begun before are gone on with; as many like runs are stacked as the device takes."""
    return runs.Options(out=out, data_dir=data_dir, device=device, resume=True, quiet=quiet, lanes=None)


def carry_out(
    plan: Plan, estimate: timing.Estimate, options: runs.Options, console: Console, say: Callable[[str], None]
) -> None:
    training: list[Callable[[], None]] = [
        *(partial(train_part, part, estimate, options, console, say) for part in plan.parts),
        *(partial(train_again, stack, options, console, say) for stack in plan.again),
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
    say(f"{part.title}: {counted(len(part.trained), len(part.on_the_way))}{about}")
    with timed(part, estimate.device, options.out):
        try:
            runs.carry_out(part.configs, options, console)
        except runs.SomeDiverged as error:  # no reason to leave out the other parts
            console.print(error.which, highlight=False, soft_wrap=True, markup=False)


def train_again(stack: LostStack, options: runs.Options, console: Console, say: Callable[[str], None]) -> None:
    """Train a stack once more in a folder of its own; of what it finds, only what is missing goes among the results."""
    aside = options.out / stack.folder
    say(f"{part_title(stack.runs[0])}: {as_before([stack])}")
    whole = can_be_gone_on_with(stack, aside)
    how = dataclasses.replace(options, out=aside, lanes=len(stack.runs), resume=whole, restart=not whole)
    try:
        runs.carry_out(stack.configs, how, console)
    except runs.SomeDiverged as error:  # as the first time, and no reason to leave out the others
        console.print(error.which, highlight=False, soft_wrap=True, markup=False)
    if changed := not_as_before(stack, aside, options.out):
        console.print(f"not as before: {'; '.join(changed)}", highlight=False, soft_wrap=True, markup=False)
    for config in stack.configs:
        made, place = (result_path(config, folder) for folder in (aside, options.out))
        if made.exists() and not place.exists():
            made.replace(place)
    for config in stack.lost:
        if (note := divergence.note_path(config, aside)).exists():
            note.replace(divergence.note_path(config, options.out))
    shutil.rmtree(aside)


def can_be_gone_on_with(stack: LostStack, aside: Path) -> bool:
    """As a whole or not at all: from some of its runs alone, or from different places, others would come out."""
    from alasso.bench.training.checkpoint import place_in  # torch: only where something was begun

    if any(result_path(config, aside).exists() for config in stack.runs):
        return False
    saved = [checkpoint_path(config, aside) for config in stack.runs]
    return all(path.exists() for path in saved) and len({place_in(path) for path in saved}) == 1


def not_as_before(stack: LostStack, aside: Path, out: Path) -> list[str]:
    """What speaks against lost results having come back as they were: runs beside them that did not."""
    names = [config.name for config in stack.runs]
    found = {name: results.read(aside / f"{name}.json") for name in names if (aside / f"{name}.json").exists()}
    there = [results.read(out / f"{name}.json") for name in names if (out / f"{name}.json").exists()]
    of_this_stack = [result for result in there if result.environment.get("stack") == names]
    others = [r.name for r in of_this_stack if r.name not in found or found[r.name].accuracy != r.accuracy]
    apart = any(r.environment["lanes"] + len(r.environment["diverged"]) < len(names) for r in found.values())
    said = [f"{others[0]}, which was trained again beside what was lost, differs from its result"] if others else []
    return said + (["this device does not hold the stack as one"] if apart else [])


def tidy(out: Path) -> None:
    """Remove folders of stacks trained again of which nothing is missing any more: killed before that was done."""
    for aside in out.glob(".again-*"):
        if is_anothers(aside):
            continue
        names = [path.stem for path in aside.iterdir() if path.suffix in (".json", ".checkpoint")]
        if all((out / f"{name}.json").exists() for name in names):
            shutil.rmtree(aside)


def as_before(stacks: Sequence[LostStack]) -> str:
    lost = sum(len(stack.lost) for stack in stacks)
    others = sum(len(stack.configs) for stack in stacks) - lost
    whose = "its stack" if lost == 1 else "their stacks"
    return f"{count_of(lost, 'lost result')}, trained again with {count_of(others, 'other run')} of {whose}"


def with_other_rounding(plan: Plan) -> list[str]:
    """A line on results that do not come back as they were, where there are such."""
    if not plan.alone:
        return []
    results_, runs_ = (
        f"{count_of(len(plan.alone), 'result')} {'was' if len(plan.alone) == 1 else 'were'}",
        f"{count_of(plan.unknown, 'run')} {'is' if plan.unknown == 1 else 'are'}",
    )
    back = "it comes back" if len(plan.alone) == 1 else "they come back"
    return [f"{results_} trained in a stack of which {runs_} no longer planned; {back} with other rounding"]


def counted(trained: int, on_the_way: int = 0) -> str:
    """
    >>> counted(1), counted(36, 33)
    ('1 run', '36 runs (33 shorter runs are written when longer ones come past them)')
    """
    in_passing = f" ({naming.written_in_passing(on_the_way)})" if on_the_way else ""
    return count_of(trained, "run") + in_passing


def came_to_no_end(plan: Plan) -> str:
    """Half a sentence, for the end of one; nothing where there is nothing to say."""
    if not plan.diverged:
        return ""
    count = len(plan.diverged)
    notes = f"note, {plan.diverged[0].name}{divergence.SUFFIX}," if count == 1 else f"notes, NAME{divergence.SUFFIX},"
    advice = f"not tried again until {'its' if count == 1 else 'their'} {notes} {'is' if count == 1 else 'are'} deleted"
    return f"; not counting {count_of(count, 'run')} that diverged, which {'is' if count == 1 else 'are'} {advice}"


def to_do(plan: Plan) -> str:
    """All that the plan's table counts: runs, and single weights measured."""
    runs_ = [counted(plan.runs, plan.on_the_way)] if plan.runs else []
    again = [as_before(plan.again)] if plan.again else []
    probes = [count_of(len(plan.probes), "probe")] if plan.probes else []
    return " and ".join(runs_ + again + probes)


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
            found.append(dataclasses.replace(config, tasks=divergence.read(divergence.note_path(config, out)).task))
        except AlassoError:
            continue
    return found


def measure(probe: Probe, options: runs.Options, say: Callable[[str], None]) -> None:
    """Learn the first task of a run again and move its weights; the numbers go beside the results."""
    from alasso.bench.probe.measure import probe_first_task

    measured = probe_first_task(probe.config, probe.plan, data_dir=options.data_dir, device=options.device, say=say)
    write_whole(probe.path(options.out), measured.as_file())


# -- networks -----------------------------------------------------------------------------------------------------


def check_networks(plan: Plan, experiments: Iterable[Experiment]) -> None:
    """Make each network that is not its benchmark's own once, lest it be found out after hours that it cannot be."""
    networks: dict[tuple[object, ...], RunConfig] = {}
    for config in plan.to_train:
        if not has_usual_network(config):
            stream = (config.benchmark, config.path, config.tasks, config.classes_per_task, config.image_size)
            networks.setdefault((config.model, is_variational(config), *stream), config)
    for config in networks.values():
        try:
            check_network(config)
        except AlassoError as error:
            whose = [one.id for one in experiments if config.hash in {own.hash for own in one.configs(1)}]
            raise AlassoError(f"experiment {whose[0]}: {error}" if whose else str(error)) from error


def has_usual_network(config: RunConfig) -> bool:
    """On inputs as usual, which are known to go together."""
    usual = BENCHMARKS[config.benchmark].preset
    return (config.model, config.image_size) == (usual["model"], usual.get("image_size"))


def check_network(config: RunConfig) -> None:
    from alasso.bench import models  # torch: only where a network is to be made
    from alasso.bench._make_streams import inputs_and_classes
    from alasso.vcl.layers import check_convertible

    network = models.build(config.model, *inputs_and_classes(config), hidden=config.hidden)
    if is_variational(config):
        check_convertible(network)


# -- data ---------------------------------------------------------------------------------------------------------


def absent_data(plan: Plan, data_dir: Path | None) -> list[str]:
    """Names of the data sets that the plan needs and that are not whole on this machine."""
    planned = [part.trained[0] for part in plan.parts] + [stack.runs[0] for stack in plan.again]
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
