"""Several runs: all combinations that were asked for, those already finished read back, one table at the end."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from alasso.bench import results
from alasso.bench.config import NOT_CHANGES, RunConfig, known, other_setting
from alasso.bench.data.version import refuse_changed_images
from alasso.bench.io import refuse_those_of_others
from alasso.bench.labels import label, labels, shorter_runs, varying_settings
from alasso.bench.registry import METHODS
from alasso.bench.results import Result
from alasso.bench.training import diverged as divergence
from alasso.bench.training.diverged import Divergence
from alasso.bench.training.progress import (
    Bars,
    CsvLog,
    LanesDiverged,
    Observer,
    PlainLines,
    Quiet,
    Several,
    Stopped,
    TensorBoardLog,
    stop_on_request,
)
from alasso.bench.training.waypoints import Waypoint, carriers, on_the_way
from alasso.errors import AlassoError, DivergedError

__all__ = ["Options", "SomeDiverged", "Stopped", "carry_out", "combinations"]


@dataclass(frozen=True)
class Options:
    """Where and how runs are carried out; nothing here changes what they find."""

    out: Path
    data_dir: Path | None = None
    device: str = "auto"
    resume: bool = False
    restart: bool = False
    quiet: bool = False
    logs: tuple[str, ...] = ()
    checkpoint_every: float = 30.0
    lanes: int | None = None  # runs trained as one stack, at most; None: as many as the device takes
    to_run_again: str = "run again with --restart"  # what to do about a run that is finished


def combinations(
    benchmark: str, methods: Sequence[str], seeds: Sequence[int], fields: Mapping[str, Any], settings: Mapping[str, Any]
) -> list[RunConfig]:
    """One config for every method, value of a setting (a list of them) and seed.

    A setting that some of the methods have and others have not is set where it is known; one that none has is refused.
    """
    for method in methods:
        known(method, METHODS, "method")
    somewhere = {name for m in methods if m in METHODS for name in METHODS[m].settings} | set(RunConfig.field_names())
    if "seed" in settings:
        raise AlassoError("seed is no setting to vary: name the seeds by --seed, or seed = [0, 1] in a file")
    for name in settings:
        if name not in somewhere or name in NOT_CHANGES:
            allowed = sorted(somewhere - set(NOT_CHANGES))
            who = f"{methods[0]} has no" if len(methods) == 1 else f"none of {', '.join(methods)} has a"
            raise AlassoError(f"{who} setting {name!r}{other_setting(name, allowed)}")
    configs = []
    for method in methods:
        own = {
            name: values
            for name, values in settings.items()
            if method not in METHODS or name in METHODS[method].settings or name in RunConfig.field_names()
        }
        for values in itertools.product(*own.values()):
            for seed in seeds:
                changes = {**fields, **dict(zip(own, values, strict=True)), "seed": seed}
                configs.append(RunConfig.for_benchmark(benchmark, method, **changes))
    return list({config.name: config for config in configs}.values())


def carry_out(
    configs: Sequence[RunConfig],
    options: Options,
    console: Console,
    reference: Callable[[RunConfig], Result | None] = lambda config: None,
) -> list[Result]:
    """Run what is not finished yet, in order, with one overall progress; shorter runs on the way of longer ones."""
    check_folder(configs, options)
    paths = {config.name: results.result_path(config, options.out) for config in configs}
    done = {config.name: read_back(paths[config.name]) for config in configs if is_done(config, options)}
    refuse_those_of_other_images(configs, options)
    varying = varying_settings(configs)
    left = [config for config in configs if config.name not in done]
    shorter = on_the_way(left)
    if not options.quiet:
        for config in configs:
            if config.name in done:
                said = f"{label(config, varying)}: already done, {paths[config.name].name} ({options.to_run_again})"
                console.print(said, style="dim")
        if shorter:
            console.print(shorter_runs(shorter, left), style="dim", highlight=False, soft_wrap=True)
    with ExitStack() as stack:
        bars = None
        if console.is_terminal and not options.quiet:
            bars = Bars(console, len(configs))
            stack.enter_context(bars.bars)
        sweep = _Sweep(options, console, bars, varying, reference, done)
        sweep.carry_out(left, shorter, [config for config in configs if config.name not in carriers(configs)])
    if sweep.lost:
        which = " | ".join(f"{'; '.join(names)}: {why}" for why, names in sweep.lost.items())
        raise SomeDiverged(which, [done[config.name] for config in configs if config.name in done])
    return [done[config.name] for config in configs]


class SomeDiverged(DivergedError):
    """Which runs of a sweep diverged, and what the others found."""

    def __init__(self, which: str, finished: list[Result]) -> None:
        super().__init__(which + ("; the other runs are finished" if finished else ""))
        self.which, self.finished = which, finished


@dataclass
class _Sweep:
    """Runs that wait in stacks, and what became of those that were trained."""

    options: Options
    console: Console
    bars: Bars | None
    varying: Sequence[str]
    reference: Callable[[RunConfig], Result | None]
    done: dict[str, Result]
    lost: dict[str, list[str]] = field(default_factory=dict)  # which runs diverged, by why
    waiting: deque[tuple[list[RunConfig], bool]] = field(default_factory=deque)  # and whether to go on from checkpoints
    waypoints: dict[str, list[Waypoint]] = field(default_factory=dict)  # by name of the run that passes them

    def carry_out(
        self, configs: Sequence[RunConfig], shorter: Mapping[str, Sequence[RunConfig]], of: Sequence[RunConfig]
    ) -> None:
        """Train all but those that are on the way of others; ``of``: what they are left of."""
        self.waypoints = {name: [Waypoint(c, self.reference(c)) for c in passed] for name, passed in shorter.items()}
        passed_through = {config.name for passed in shorter.values() for config in passed}
        self.line_up([config for config in configs if config.name not in passed_through], of)
        with stop_on_request() as stop_requested:
            while self.waiting:
                if stop_requested():  # in the last moments of a run
                    raise Stopped("the end of a run")
                self.train_or_go_on_without_some(*self.waiting.popleft())

    def train_or_go_on_without_some(self, group: Sequence[RunConfig], resume: bool) -> None:
        """Where runs of a stack diverge, the others wait for their turn again, to be gone on with where they stand."""
        before = {config.name: self.written(config) for config in group}
        try:
            self.train(group, resume)
        except LanesDiverged as error:
            finished = [config for config in group if self.written(config) != before[config.name]]
            self.take_in([results.read(results.result_path(config, self.options.out)) for config in finished])
            for note in error.lost:
                self.give_up(note, group)
            gone = [*finished, *(note.config for note in error.lost)]
            if left := [config for config in group if config not in gone]:
                self.waiting.appendleft((left, True))

    def line_up(self, configs: Sequence[RunConfig], of: Sequence[RunConfig] = ()) -> None:
        if configs:
            self.waiting.extend((group, self.options.resume) for group in stacks(configs, self.options, of))

    def train(self, group: Sequence[RunConfig], resume: bool) -> None:
        name = labels(group, self.varying)
        if self.bars:
            self.bars.start_run(name, len(self.done))
        passed = [self.waypoints.get(config.name, []) for config in group]
        against = [self.reference(config) for config in group]
        how = replace(self.options, resume=resume)
        found = _carry_out_together(group, name, how, self.console, self.bars, against, passed)
        self.take_in(found)

    def take_in(self, found: Sequence[Result]) -> None:
        self.note_done(found)
        for result in found:
            # What an old checkpoint lies beyond, which does not hold the time, is run by itself.
            self.line_up(self.take_in_waypoints(result.config))

    def note_done(self, found: Sequence[Result]) -> None:
        self.done |= {result.name: result for result in found}
        for result in found:  # which may have diverged at another time
            divergence.note_path(result.config, self.options.out).unlink(missing_ok=True)

    def written(self, config: RunConfig) -> int | None:
        """When its result was, if there is one."""
        path = results.result_path(config, self.options.out)
        return path.stat().st_mtime_ns if path.exists() else None

    def give_up(self, note: Divergence, group: Sequence[RunConfig]) -> None:
        """A run of a stack that diverged, and the shorter ones that it did not reach."""
        from alasso.bench.training.run import torch_device

        results.checkpoint_path(note.config, self.options.out).unlink(missing_ok=True)  # it leads nowhere
        missed = self.take_in_waypoints(note.config)
        not_reached = [config for config in missed if note.task <= (config.tasks or note.task)]
        beside = {"lanes": len(group), "stack": [config.name for config in group]}
        environment = {**results.environment(str(torch_device(self.options.device))), **beside}
        for config in (note.config, *not_reached):
            divergence.write(replace(note, config=config), environment, self.options.out)
            self.lost.setdefault(note.why, []).append(label(config, self.varying))
        self.line_up([config for config in missed if config not in not_reached])  # as in take_in

    def take_in_waypoints(self, config: RunConfig) -> list[RunConfig]:
        """Results that were written on the way of a run; returns the shorter runs that have none."""
        waypoints = self.waypoints.get(config.name, [])
        self.note_done([waypoint.result for waypoint in waypoints if waypoint.result])
        return [waypoint.config for waypoint in waypoints if not waypoint.result]


def is_done(config: RunConfig, options: Options) -> bool:
    """Whether there is a result that stands in place of the run."""
    begun, finished = (options.out / f"{config.name}.{kind}" for kind in ("checkpoint", "json"))
    if options.restart or not finished.exists():
        return False
    # A checkpoint that is older than the result is of a run that was killed in its very last moment; a newer one is of
    # a run that was started over and stopped.
    return not (options.resume and begun.exists() and begun.stat().st_mtime_ns > finished.stat().st_mtime_ns)


def stands_for(config: RunConfig, options: Options) -> Path | None:
    """The result that stands in place of the run, or the checkpoint that it goes on from; None where it starts anew."""
    if is_done(config, options):
        return results.result_path(config, options.out)
    begun = results.checkpoint_path(config, options.out)
    return begun if options.resume and begun.exists() else None


def refuse_those_of_other_images(configs: Sequence[RunConfig], options: Options) -> None:
    """Before anything is run: nothing stands for a run on images that it was not made on."""
    files = [(config, file) for config in configs if (file := stands_for(config, options))]
    refuse_changed_images(files, "run again with --restart, or into another --out")


def read_back(path: Path) -> Result:
    """A result that stands in place of a run; one that cannot be read stands in its way."""
    try:
        return results.read(path)
    except AlassoError as error:
        raise AlassoError(f"{error}; delete it, or run it again with --restart") from error


def stacks(configs: Sequence[RunConfig], options: Options, of: Sequence[RunConfig] = ()) -> list[list[RunConfig]]:
    """Which runs are trained together: those that were begun together, those that would be if all ``of`` which they are
    left were still to be trained, and others as they come.
    """
    from alasso.bench.stacking import lanes
    from alasso.bench.training import run as train

    most = options.lanes or lanes.most_on(train.torch_device(options.device))
    left = {config.name: config for config in configs}
    groups: list[list[RunConfig]] = []
    begun = begun_together(configs, options, most) if options.resume else []
    for group in [*begun, *lanes.grouped(of, most)]:
        if all(config.name in left for config in group):
            groups.append([left.pop(config.name) for config in group])
    return groups + lanes.grouped(list(left.values()), most)


def begun_together(configs: Sequence[RunConfig], options: Options, most: int) -> list[list[RunConfig]]:
    """Stacks of which all runs that did not leave it are still to be finished, by what their checkpoints say."""
    from alasso.bench.training.checkpoint import stack_in

    by_name = {config.name: config for config in configs}
    said = {stack_in(results.checkpoint_path(config, options.out)): None for config in configs}  # in their order
    found: list[list[RunConfig]] = []
    for names in said:
        if 1 < len(names) <= most and set(names) <= set(by_name):
            found.append([by_name.pop(name) for name in names])  # none goes with two
    return found


def _carry_out_together(
    configs: Sequence[RunConfig],
    name: str,
    options: Options,
    console: Console,
    bars: Bars | None,
    references: Sequence[Result | None],
    waypoints: Sequence[Sequence[Waypoint]],
) -> list[Result]:
    from alasso.bench.training import run as train

    with ExitStack() as stack:
        watching: list[Observer] = []
        for config in configs:
            observers: list[Observer] = []
            if config is configs[0]:  # one line, or bar, for all that go together
                if bars:
                    observers.append(bars)
                elif not options.quiet:
                    say = partial(console.print, highlight=False, soft_wrap=True)
                    observers.append(PlainLines(say, name))
            observers += _logs(config, options, stack)
            watching.append(Several(observers) if observers else Quiet())
        return train.run_together(
            configs,
            out=options.out,
            data_dir=options.data_dir,
            device=options.device,
            resume=options.resume,
            references=references,
            observers=watching,
            checkpoint_every=options.checkpoint_every,
            waypoints=waypoints,
        )


def _logs(config: RunConfig, options: Options, stack: ExitStack) -> list[Observer]:
    logs: list[Observer] = []
    if "csv" in options.logs:
        log = CsvLog(options.out / f"{config.name}.csv")
        stack.callback(log.close)
        logs.append(log)
    if "tensorboard" in options.logs:
        board = TensorBoardLog(options.out / "tensorboard" / config.name)
        stack.callback(board.close)
        logs.append(board)
    return logs


def check_folder(configs: Sequence[RunConfig], options: Options) -> None:
    """Before anything is run: the folder takes files, and no unfinished run is thrown away unasked."""
    from alasso.bench.io import check_writable

    check_writable(options.out)
    refuse_those_of_others(options.out, [config.name for config in configs])
    if options.resume or options.restart:
        return
    for config in configs:
        begun, finished = (options.out / f"{config.name}.{kind}" for kind in ("checkpoint", "json"))
        if begun.exists() and not finished.exists():
            raise AlassoError(
                f"{label(config)} was begun and not finished; go on with --resume, or start over with --restart"
            )
