"""Several runs: all combinations that were asked for, those already finished read back, one table at the end."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from alasso.bench import metrics, results
from alasso.bench.config import NOT_CHANGES, RunConfig, count_of, known, label, other_setting, varying_settings
from alasso.bench.data.editions import refuse_changed_images
from alasso.bench.io import check_writable, refuse_taken
from alasso.bench.registry import METHODS
from alasso.bench.results import Result
from alasso.bench.schema import MOST_RUNS
from alasso.bench.training import checkpoint, nodes
from alasso.bench.training.progress import (
    TRACKERS,
    Bars,
    CsvLog,
    Observer,
    PlainLines,
    Pruned,
    RunBar,
    Several,
    Stopped,
    stop_on_request,
)
from alasso.bench.training.run import RunDiverged, run, torch_device
from alasso.errors import AlassoError, DivergedError

__all__ = ["Options", "SomeDiverged", "Stopped", "carry_out", "combinations", "shard_of"]

MOST_NAMED = 4  # differing fields that a line spells out
Observers = Callable[[RunConfig], AbstractContextManager[Observer]]
Outcomes = Generator[tuple[RunConfig, nodes.Outcome], None, None]


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
    to_run_again: str = "run again with --restart"  # what to do about a run that is finished
    ray: str | None = None  # address of a cluster to train on


class SomeDiverged(DivergedError):
    """Which runs of a sweep diverged, and what the others found."""

    def __init__(self, which: str, finished: list[Result]) -> None:
        super().__init__(which + ("; the other runs are finished" if finished else ""))
        self.which, self.finished = which, finished


def combinations(
    benchmark: str,
    methods: Sequence[str],
    seeds: Sequence[int],
    fields: Mapping[str, Any],
    settings: Mapping[str, Any],
    chosen: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> list[RunConfig]:
    """Makes one config for every method, value of a setting and seed.

    Args:
        benchmark: Name of the benchmark.
        methods: Names of the methods.
        seeds: Seeds.
        fields: Fields of all runs.
        settings: Lists of values, by name of a setting or field; set where a method knows it.
        chosen: By method, settings in place of the benchmark's own: what a search found.

    Returns:
        The configs, each once.

    Raises:
        AlassoError: No method has one of the settings, or a value does not fit.
    """
    for method in methods:
        known(method, METHODS, "method")
    somewhere = {name for method in methods for name in METHODS[method].settings} | set(RunConfig.field_names())
    if "seed" in settings:
        raise AlassoError("seed is not a setting: give seeds with --seed, or as seed = [0, 1] in a file")
    for name in settings:
        if name not in somewhere or name in NOT_CHANGES:
            allowed = sorted(somewhere - set(NOT_CHANGES))
            who = f"{methods[0]} has no" if len(methods) == 1 else f"none of {', '.join(methods)} has a"
            raise AlassoError(f"{who} setting {name!r}{other_setting(name, allowed)}")
    asked = len(methods) * len(seeds) * math.prod(map(len, settings.values()))
    if asked > MOST_RUNS:
        raise AlassoError(f"this asks for {asked:.3g} runs; ask for {MOST_RUNS:,} or fewer at a time")
    configs = []
    for method in methods:
        taken = {*METHODS[method].settings, *RunConfig.field_names()}
        own = {name: values for name, values in settings.items() if name in taken}
        for values in itertools.product(*own.values()):
            changes = {**chosen.get(method, {}), **fields, **dict(zip(own, values, strict=True))}
            configs += [RunConfig.for_benchmark(benchmark, method, **changes, seed=seed) for seed in seeds]
    return list({config.name: config for config in configs}.values())


def shard_of(configs: Sequence[RunConfig], shard: str | None) -> list[RunConfig]:
    """Takes one process's share of some runs; the shares depend on nothing but the runs' names.

    Args:
        configs: The runs.
        shard: ``I/N``: of the runs in the order of their names every N-th, from the I-th on; None takes all.

    Returns:
        The share, in the order of ``configs``; none where N is larger than the number of runs.

    Raises:
        AlassoError: There is no such shard.
    """
    if shard is None:
        return list(configs)
    written = re.fullmatch(r"(\d{1,6})/(\d{1,6})", shard)
    number, count = map(int, written.groups()) if written else (0, 0)
    if not 1 <= number <= count:
        raise AlassoError(f"--shard takes I/N, from 1/N to N/N, as in 2/8, not {shard!r:.40}")
    share = set(sorted({config.name for config in configs})[number - 1 :: count])
    return [config for config in configs if config.name in share]


def carry_out(
    configs: Sequence[RunConfig],
    options: Options,
    console: Console,
    reference: Callable[[RunConfig], Result | None] = lambda config: None,
    watch: Callable[[RunConfig], Observer] | None = None,
) -> list[Result]:
    """Trains what is not finished yet: one run after another, or on the nodes of a cluster.

    Args:
        configs: The runs.
        options: Where and how.
        console: Shows progress.
        reference: The single-task run to measure a run's intransigence against.
        watch: Makes a further observer of a run; one that raises ``Pruned`` ends it.

    Returns:
        The results, in the order of ``configs``; none of runs that were pruned.

    Raises:
        SomeDiverged: Some runs diverged; the others are finished.
        Stopped: The user pressed Ctrl-C; all is saved.
    """
    check_folder(configs, options)
    done = {c.name: read_back(c, options.out) for c in configs if is_done(c, options)}
    refuse_other_images(configs, options)
    varying, diverged = varying_settings(configs), dict[str, list[str]]()
    names = {config.name: label(config, varying) for config in configs}
    for config in (config for config in configs if config.name in done):
        done[config.name] = measured_against(reference(config), done[config.name])
        if not options.quiet:
            file = results.result_path(config, options.out).name
            console.print(f"{names[config.name]}: already done, {file} ({options.to_run_again})", style="dim")
    missing = [config for config in configs if config.name not in done]
    with ExitStack() as stack:
        stop_requested = stack.enter_context(stop_on_request())
        bars = Bars(console, len(configs)) if console.is_terminal and not options.quiet else None
        if bars:
            stack.enter_context(bars.bars)
        observers = partial(observed, names, options, console, bars, watch)
        if options.ray and missing:
            say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
            outcomes = on_nodes(missing, names, options, observers, reference, stop_requested, say)
        else:
            outcomes = one_by_one(missing, options, observers, reference, stop_requested)
        if bars:
            bars.done(len(done))
        for config, outcome in stack.enter_context(closing(outcomes)):
            if isinstance(outcome, Result):
                done[config.name] = outcome
                results.note_path(config, options.out).unlink(missing_ok=True)  # it may have diverged at another time
            else:
                checkpoint.discard(results.checkpoint_path(config, options.out))  # it leads nowhere
            if isinstance(outcome, tuple):
                diverged.setdefault(outcome[0].why, []).append(names[config.name])
                results.write_note(*outcome, options.out)
            if bars:
                bars.done(len(done))
    finished = [done[config.name] for config in configs if config.name in done]
    if diverged:
        raise SomeDiverged(" | ".join(f"{'; '.join(which)}: {why}" for why, which in diverged.items()), finished)
    return finished


@contextmanager
def observed(
    names: Mapping[str, str],
    options: Options,
    console: Console,
    bars: Bars | None,
    watch: Callable[[RunConfig], Observer] | None,
    config: RunConfig,
) -> Iterator[Observer]:
    """Who is told of a run while it trains: the terminal, logs, and who watches."""
    with ExitStack() as logs:
        observers: list[Observer] = []
        if bars:
            observers.append(bar := RunBar(bars, names[config.name]))
            logs.callback(bar.close)
        elif not options.quiet:
            say = partial(console.print, highlight=False, soft_wrap=True)
            observers.append(PlainLines(say, names[config.name]))
        if "csv" in options.logs:
            observers.append(log := CsvLog(options.out / f"{config.name}.csv"))
            logs.callback(log.close)
        for tracker in (TRACKERS[name] for name in options.logs if name in TRACKERS):
            observers.append(one := tracker(options.out, config))
            logs.callback(one.close)
        if watch:
            observers.append(watch(config))
        yield Several(observers)


def one_by_one(
    configs: Sequence[RunConfig],
    options: Options,
    observers: Observers,
    reference: Callable[[RunConfig], Result | None],
    stop_requested: Callable[[], bool],
) -> Outcomes:
    """Trains runs here, and says what became of each."""
    for config in configs:
        if stop_requested():  # in the last moments of a run
            raise Stopped("the end of a run")
        outcome: nodes.Outcome
        try:
            with observers(config) as observer:
                outcome = run(
                    config,
                    out=options.out,
                    data_dir=options.data_dir,
                    device=options.device,
                    resume=options.resume,
                    reference=reference(config),
                    observer=observer,
                    checkpoint_every=options.checkpoint_every,
                )
        except RunDiverged as error:
            outcome = error.note, results.environment(str(torch_device(options.device)))
        except Pruned:
            outcome = None
        yield config, outcome


def on_nodes(
    configs: Sequence[RunConfig],
    names: Mapping[str, str],
    options: Options,
    observers: Observers,
    reference: Callable[[RunConfig], Result | None],
    stop_requested: Callable[[], bool],
    say: Callable[[str], object],
) -> Outcomes:
    """Trains runs on a cluster, writes their results here, and says what became of each."""
    assert options.ray, "the address of a cluster"
    cluster = nodes.Cluster.joined(options.ray, options.device)
    tell = (lambda line: None) if options.quiet else say
    tell(cluster.room(len(configs)))
    how = {
        "data_dir": options.data_dir and options.data_dir.absolute(),
        "resume": options.resume,
        "checkpoint_every": options.checkpoint_every,
    }
    with closing(nodes.trained(configs, cluster, options.out, how, observers, stop_requested)) as outcomes:
        for config, outcome in outcomes:
            if isinstance(outcome, nodes.Lost):
                tell(f"{names[config.name]}: {outcome}")
                continue
            if isinstance(outcome, Result):
                outcome = measured_against(reference(config), outcome)
                results.write(outcome, options.out)
                checkpoint.discard(results.checkpoint_path(config, options.out))
            yield config, outcome


# -- what the folder holds already --------------------------------------------------------------------------------


def is_done(config: RunConfig, options: Options) -> bool:
    """Whether the folder holds the run's result."""
    begun, finished = checkpoints(config, options.out), results.result_path(config, options.out)
    if options.restart or not finished.exists():
        return False
    # A checkpoint that is older than the result is of a run that was killed in its very last moment; a newer one is of
    # a run that was started over and stopped.
    return not (options.resume and begun and begun[0].stat().st_mtime_ns > finished.stat().st_mtime_ns)


def checkpoints(config: RunConfig, out: Path) -> list[Path]:
    """A run's checkpoints in a folder, the newest first."""
    return checkpoint.kept(results.checkpoint_path(config, out))


def refuse_other_images(configs: Sequence[RunConfig], options: Options) -> None:
    """Refuses results and checkpoints of runs on other images than those in the folder now."""
    files = []
    for config in configs:
        if is_done(config, options):
            files.append((config, results.result_path(config, options.out)))
        elif options.resume and (begun := checkpoints(config, options.out)):
            files.append((config, begun[0]))
    refuse_changed_images(files, "run again with --restart, or into another --out")


def read_back(config: RunConfig, out: Path) -> Result:
    """A finished run's result; says what to do about one that cannot be read, or is of another run."""
    path = results.result_path(config, out)
    try:
        result = results.read(path)
        if result.name != config.name:
            raise AlassoError(f"{path} holds the result of {result.name}")
    except AlassoError as error:
        raise AlassoError(f"{error}; delete it, or run it again with --restart") from error
    return result


def measured_against(reference: Result | None, result: Result) -> Result:
    """With I against the reference, if there is one."""
    if reference is None:
        return result
    measured = metrics.intransigence(result.accuracy, reference.accuracy)
    return replace(result, metrics={**result.metrics, "I": measured})


def check_folder(configs: Sequence[RunConfig], options: Options) -> None:
    """Refuses a folder that takes no files, and, unless asked to, to throw away an unfinished run."""
    check_writable(options.out)
    refuse_taken(options.out, [config.name for config in configs])
    if options.resume or options.restart:
        return
    for config in configs:
        if checkpoints(config, options.out) and not results.result_path(config, options.out).exists():
            raise AlassoError(f"{label(config)} is unfinished; continue it with --resume, or start over with --restart")


def check_resumed(configs: Sequence[RunConfig], out: Path) -> str | None:
    """Checks, before runs resume, that there is something to resume.

    A checkpoint belongs to its whole config: with a setting changed it is another run's.

    Args:
        configs: The runs.
        out: Folder of checkpoints and results.

    Returns:
        A line on runs that start from the beginning; None if all resume.

    Raises:
        AlassoError: The folder holds none of the runs with any seed, but an unfinished one of the same method with
            other settings.
    """
    new = [c for c in configs if not (checkpoints(c, out) or results.result_path(c, out).exists())]
    asked = {config.name for config in configs}
    begun = [other for other in unfinished({(c.benchmark, c.method) for c in new}, out) if other.name not in asked]
    pairs = [(c, other) for c in new for other in begun if (c.benchmark, c.method) == (other.benchmark, other.method)]
    if not pairs:
        return f"nothing to resume in {out}; starting" if len(new) == len(configs) else None
    config, other = min(pairs, key=lambda pair: (len(pair[0].unlike(pair[1])), pair[1].name))
    named = [f"{name}={theirs}, not {ours}" for name, (ours, theirs) in config.unlike(other).items()]
    if len(named) > MOST_NAMED:
        named[MOST_NAMED:] = [f"{len(named) - MOST_NAMED} other settings"]
    said = f"an unfinished run of {config.method} has {'; '.join(named)}"
    known_here = any(True for c in configs for _ in out.glob(f"{c.name.rpartition('_')[0]}_s*"))  # with another seed
    if len(new) == len(configs) and not known_here:
        what = label(config) if len(configs) == 1 else f"any of these {len(configs)} runs"
        raise AlassoError(
            f"there is nothing to resume in {out} for {what}; {said}: "
            "give its settings to continue it, or leave out --resume to start a new run"
        )
    what = f"{label(config)} has" if len(new) == 1 else f"{len(new)} of {count_of(len(configs), 'run')} have"
    return f"{what} nothing to resume in {out} and will start from the beginning; {said}"


def unfinished(kinds: Iterable[tuple[str, str]], out: Path) -> list[RunConfig]:
    """Configs of checkpoints without a result, of some (benchmark, method)."""
    paths = [path for benchmark, method in kinds for path in sorted(out.glob(f"{benchmark}_{method}_*.checkpoint"))]
    found = [_config_in(path) for path in paths if not path.with_suffix(".json").exists()]
    return [config for config in found if config is not None]


def _config_in(path: Path) -> RunConfig | None:
    """The config of a checkpoint; None where it is damaged: another run's file stands in nobody's way."""
    try:
        return checkpoint.config_in(path)
    except (AlassoError, LookupError, TypeError, AttributeError):
        return None
