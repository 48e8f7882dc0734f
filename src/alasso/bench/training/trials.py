"""Settings that Optuna's TPE suggests, trial after trial. A run that is clearly worse stops after a task.

What was tried lies in a journal beside the results. Processes that share the folder share the search.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from alasso.bench import results
from alasso.bench.config import RunConfig
from alasso.bench.io import Taken
from alasso.bench.results import Result, as_text
from alasso.bench.streams import Stream
from alasso.bench.training import nodes, sweep
from alasso.bench.training.progress import Accuracy, Observer, Pruned
from alasso.errors import AlassoError

JOURNAL = "optuna.journal"
DIVERGED = "diverged"  # what the study keeps of a trial: which of its runs did, and how
AT_RANDOM = 5  # trials before TPE has seen enough to suggest


@dataclass
class Tried:
    """A trial that is on: its settings, a run a seed, and the tasks it has reported of."""

    trial: Any
    settings: dict[str, Any]
    configs: list[RunConfig]
    reported: set[int] = field(default_factory=set)
    pruned: bool = False

    @property
    def words(self) -> str:
        """The settings."""
        return " ".join(f"{name}={value}" for name, value in self.settings.items())

    def report(self, config: RunConfig, accuracy: Accuracy, tasks: int) -> int:
        """Tells Optuna the mean accuracy after each task; a seed's tasks come after those of the seeds before it."""
        first = [one.name for one in self.configs].index(config.name) * tasks
        for step, row in enumerate(accuracy, first):
            if step not in self.reported:
                self.reported.add(step)
                self.trial.report(statistics.fmean(row), step)
        return first


class ByTask(Observer):
    """Ends a run whose mean accuracy is below what the best trial's was after the same task, and was at its end.

    At the same task alone would not do: who forgets is ahead at first. The end alone would not do: tasks differ.
    """

    def __init__(self, study: Any, tried: Tried, config: RunConfig) -> None:
        self.study, self.tried, self.config = study, tried, config

    def begin(self, config: RunConfig, stream: Stream, done: int, total: int) -> None:
        self.tasks = len(stream)
        if self.tried.pruned:  # with another seed
            raise Pruned

    def task_done(self, task: int, accuracy: Accuracy, seconds_left: float) -> None:
        first = self.tried.report(self.config, accuracy, self.tasks)
        best = best_values(self.study)
        bar = min(best.get(first + place, -math.inf) for place in (task, self.tasks - 1))
        if statistics.fmean(accuracy[-1]) < bar and task + 1 < self.tasks:
            self.tried.pruned = True
            raise Pruned


def best_values(study: Any) -> Mapping[int, float]:
    """What the best finished trial has reported after each task; nothing before the first has finished."""
    try:
        values: Mapping[int, float] = study.best_trial.intermediate_values
    except ValueError:
        return {}
    return values


def search_by_trials(
    space: Mapping[str, Sequence[Any]],
    preset: Mapping[str, Any],
    configs_of: Callable[[Mapping[str, Sequence[Any]]], list[RunConfig]],
    count: int,
    options: sweep.Options,
    console: Console,
) -> tuple[list[RunConfig], dict[str, Any]]:
    """Tries settings until so many trials have ended, in this process and all that share the folder.

    Args:
        space: Values of each setting: numbers are suggested between the least and the largest, words among them.
        preset: Settings to begin with, where they lie in the space.
        configs_of: Makes the runs of some values, one a seed.
        count: How many trials.
        options: Where and how to train.
        console: Shows progress.

    Returns:
        The runs of all trials that were finished, and notes: how many were stopped, what diverged.

    Raises:
        AlassoError: Optuna is not installed.
        Stopped: The user pressed Ctrl-C; the same search resumes.
    """
    optuna = library()
    first = configs_of({})
    about = [config.to_json() | {"settings": sorted(config.settings)} for config in first] + [dict(space)]
    study = opened(optuna, options, f"{first[0].method} {hashlib.sha256(as_text(about).encode()).hexdigest()[:10]}")
    study.enqueue_trial(
        {name: value for name, value in preset.items() if name in space and within(value, space[name])},
        skip_if_exists=True,
    )
    room = nodes.Cluster.joined(options.ray, options.device).places // len(first) if options.ray else 1
    ended = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    while (left := count - len(study.get_trials(deepcopy=False, states=ended))) > 0:
        batch = [asked(optuna, study, space, configs_of) for _ in range(max(1, min(left, room)))]
        found = {result.name: result for result in carried_out(optuna, study, batch, options, console)}
        for tried in batch:
            whole = [found[config.name] for config in tried.configs if config.name in found]
            for result in whole:
                tried.report(result.config, result.accuracy, len(result.accuracy))
            state = ended[len(whole) < len(tried.configs)]
            score = statistics.fmean(float(r.metrics["A"] or 0) for r in whole) if state == ended[0] else None
            study.tell(tried.trial, score, state)
            if not options.quiet:
                early = "diverged" if DIVERGED in tried.trial.user_attrs else "stopped early"
                said = early if score is None else f"A = {score:.3f} on held-out examples"
                line = f"trial {tried.trial.number + 1}: {tried.words}: {said}"
                console.print(line, highlight=False, soft_wrap=True, markup=False)
    trials = {state: study.get_trials(deepcopy=False, states=(state,)) for state in ended}
    settings = [trial.user_attrs["settings"] for trial in trials[ended[0]]]
    configs = [config for one in settings for config in configs_of({name: [value] for name, value in one.items()})]
    diverged = [trial.user_attrs[DIVERGED] for trial in trials[ended[1]] if DIVERGED in trial.user_attrs]
    notes: dict[str, Any] = {"stopped_early": len(trials[ended[1]]) - len(diverged)}
    if diverged:
        notes["diverged"] = "; ".join(dict.fromkeys(diverged))
    return list({config.name: config for config in configs}.values()), notes


def asked(
    optuna: Any,
    study: Any,
    space: Mapping[str, Sequence[Any]],
    configs_of: Callable[[Mapping[str, Sequence[Any]]], list[RunConfig]],
) -> Tried:
    """A new trial, with the settings that TPE suggests."""
    trial = study.ask()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one of the arguments is experimental
        # Every trial has numbers of its own, in whichever process.
        study.sampler = optuna.samplers.TPESampler(n_startup_trials=AT_RANDOM, seed=trial.number, constant_liar=True)
    settings = {name: suggested(trial, name, values) for name, values in space.items()}
    trial.set_user_attr("settings", settings)
    return Tried(trial, settings, configs_of({name: [value] for name, value in settings.items()}))


def carried_out(
    optuna: Any, study: Any, batch: Sequence[Tried], options: sweep.Options, console: Console
) -> list[Result]:
    """What the runs of some trials found; the study is told which of them diverged, and which are to be tried again."""
    of = {config.name: tried for tried in batch for config in tried.configs}
    configs = list({config.name: config for tried in batch for config in tried.configs}.values())
    while True:
        try:
            return sweep.carry_out(
                configs, options, console, watch=lambda config: ByTask(study, of[config.name], config)
            )
        except sweep.SomeDiverged as error:
            for tried in batch:
                notes = [path for config in tried.configs if (path := results.note_path(config, options.out)).exists()]
                if notes:
                    tried.trial.set_user_attr(DIVERGED, f"{tried.words}: {results.read_note(notes[0]).why}")
            return error.finished
        except Taken:
            time.sleep(1.0)  # another process was given the same settings: its result will do
        except BaseException:  # stopped, or the disk is full: none may stay among those that are on
            for tried in batch:
                study.tell(tried.trial, state=optuna.trial.TrialState.FAIL)
                study.enqueue_trial(tried.settings)
            raise


def suggested(trial: Any, name: str, values: Sequence[Any]) -> Any:
    """A value for a setting: a number between the least and the largest, on a logarithmic scale, or one of them."""
    if not numeric(values) or min(values) <= 0 or len(set(values)) == 1:
        return trial.suggest_categorical(name, list(dict.fromkeys(values)))
    if all(isinstance(value, int) for value in values):
        return trial.suggest_int(name, min(values), max(values), log=True)
    return float(f"{trial.suggest_float(name, min(values), max(values), log=True):.3g}")


def within(value: Any, values: Sequence[Any]) -> bool:
    """Whether a value is one that could be suggested."""
    return value in values or (numeric([value, *values]) and 0 < min(values) <= value <= max(values))


def numeric(values: Sequence[Any]) -> bool:
    return not any(isinstance(value, bool | str) for value in values)


def opened(optuna: Any, options: sweep.Options, name: str) -> Any:
    """The study of this name, in the journal of the folder; made if it is not there."""
    options.out.mkdir(parents=True, exist_ok=True)
    file = str(options.out / JOURNAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that journals are experimental, in some versions
        backend = optuna.storages.journal.JournalFileBackend(
            file, lock_obj=optuna.storages.journal.JournalFileOpenLock(file)
        )
        storage = optuna.storages.JournalStorage(backend)
        return optuna.create_study(storage=storage, study_name=name, direction="maximize", load_if_exists=True)


def library() -> Any:
    """Optuna.

    Raises:
        AlassoError: It is not installed.
    """
    try:
        import optuna
        import optuna.storages.journal
    except ImportError as error:
        raise AlassoError("Optuna is not installed: pip install 'alasso[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
