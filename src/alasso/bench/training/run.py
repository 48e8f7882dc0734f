"""A run, top to bottom: stream, network, learner, tasks, epochs, steps; measured, checkpointed, written down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from alasso.bench import models, results
from alasso.bench._make_streams import make_streams
from alasso.bench.config import RunConfig
from alasso.bench.data import version as editions
from alasso.bench.io import taken
from alasso.bench.learners.base import Learner
from alasso.bench.learners.vcl import Variational
from alasso.bench.registry import METHODS, loaded
from alasso.bench.results import Result
from alasso.bench.stacking.lanes import can_share_a_stack, shape_of, stackable, that_fit
from alasso.bench.streams import Stream, with_edition
from alasso.bench.training import checkpoint
from alasso.bench.training.checkpoint import Position
from alasso.bench.training.compiling import compiles_on, keep_compiling_processes
from alasso.bench.training.progress import Observer, Quiet, Stopped, stop_on_request
from alasso.bench.training.trainer import Lane, Trainer
from alasso.bench.training.waypoints import Waypoint
from alasso.errors import AlassoError

SMALL_NETWORK = 2_000_000  # weights


def run(
    config: RunConfig,
    *,
    stream: Stream | None = None,
    model: Callable[[], nn.Module] | None = None,
    out: Path | str | None = None,
    data_dir: Path | str | None = None,
    device: str = "auto",
    resume: bool = False,
    reference: Result | None = None,
    observer: Observer | None = None,
    checkpoint_every: float = 30.0,
) -> Result:
    """Train ``config.method`` on the stream, task after task, and measure it on all tasks seen so far after each.

    With ``out``, the result is written there, and a checkpoint beside it while the run goes on; ``resume`` continues
    from it. ``stream`` and ``model`` (a function that makes one) replace those that the config names; a result of the
    same config on another stream is not written over.
    """
    (result,) = run_together(
        [config],
        streams=[stream] if stream else None,
        model=model,
        out=out,
        data_dir=data_dir,
        device=device,
        resume=resume,
        references=[reference],
        observers=[observer or Quiet()],
        checkpoint_every=checkpoint_every,
    )
    return result


def run_together(
    configs: Sequence[RunConfig],
    *,
    streams: Sequence[Stream] | None = None,
    model: Callable[[], nn.Module] | None = None,
    out: Path | str | None = None,
    data_dir: Path | str | None = None,
    device: str = "auto",
    resume: bool = False,
    references: Sequence[Result | None] | None = None,
    observers: Sequence[Observer] | None = None,
    checkpoint_every: float = 30.0,
    waypoints: Sequence[Sequence[Waypoint]] | None = None,
) -> list[Result]:
    """Several runs side by side, as lanes of one stacked network where they can be; the same results as one by one.

    ``waypoints``: for each run, shorter ones that it passes through; they are given, and written, their results then.
    """
    refuse_what_is_no_config(configs)
    refuse_doubles(configs)
    out, data_dir = (None if folder is None else Path(folder) for folder in (out, data_dir))
    place = torch_device(device)
    if compiles_on(place):
        keep_compiling_processes()
    own = bool(streams)
    streams = streams or make_streams(configs, data_dir, place)
    refuse_other_lengths(configs, streams)
    streams = [with_edition(stream) for stream in streams]
    set_precision(configs[0].precision)
    waypoints = waypoints or [()] * len(configs)
    passed = [waypoint.config for of_run in waypoints for waypoint in of_run]
    with taken(out, [config.name for config in (*configs, *passed)]) if out else nullcontext():
        lanes = []
        if own and out:
            refuse_results_of_other_streams(configs, streams, out)
        for i, (config, stream) in enumerate(zip(configs, streams, strict=True)):
            saved = results.checkpoint_path(config, out) if out else None
            observer = observers[i] if observers else Quiet()
            lanes.append(begun(config, stream, model, place, saved if resume else None, saved, observer))
            lanes[-1].waypoints = waypoints[i]
            lanes[-1].random = checkpoint.random_state(place)
        for lane in lanes:
            if lane.saved and not resume:
                # Now that device, data and network are there; lest it be gone on from later.
                lane.saved.unlink(missing_ok=True)
        against = dict(zip((c.name for c in configs), references or [None] * len(configs), strict=True))
        found = trained(lanes, against, out, checkpoint_every)
    return [found[config.name] for config in configs]


def trained(
    lanes: Sequence[Lane], against: Mapping[str, Result | None], out: Path | None, checkpoint_every: float
) -> dict[str, Result]:
    """Train lanes in as few stacks as can be and write what they find; by the runs' names, as are those ``against``
    which intransigence is measured.
    """
    place = lanes[0].learner.device

    def write_waypoints(of: Sequence[Lane]) -> None:
        reached = [(lane, waypoint) for lane in of for waypoint in lane.reached()]
        environment = results.environment(str(place)) if reached else {}
        for lane, waypoint in reached:
            result = lane.result_of(waypoint, environment)
            write(result, out)
            waypoint.result = result

    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
    with stop_on_request() as stop_requested, few_threads_for(lanes[0].learner):
        found: dict[str, Result] = {}
        groups = in_step(lanes)
        while groups:
            group = groups.pop(0)
            checkpoint.restore_random_state(group[-1].random, place)  # whatever was made or trained since then
            trainer = Trainer(group, checkpoint_every, stop_requested, write_waypoints)
            trainer.train()
            environment = results.environment(str(place))
            for i, lane in enumerate(group):
                found[lane.config.name] = result = lane.result(environment, against[lane.config.name])
                with trainer.saved_if_refused(group[i:]):
                    write(result, out)
                del lane.learner
            del trainer  # with its stack: what comes next may need the memory
            if stop_requested() and groups:
                raise Stopped("the end of a run")
    return found


# -- parts ------------------------------------------------------------------------------------------------------


def refuse_what_is_no_config(configs: Sequence[RunConfig]) -> None:
    for one in configs:
        if not isinstance(one, RunConfig):
            raise AlassoError(f"a run takes a RunConfig, not a {type(one).__name__}: RunConfig.own(…) makes one")


def refuse_doubles(configs: Sequence[RunConfig]) -> None:
    if twice := next((config.name for i, config in enumerate(configs) if config in configs[:i]), None):
        raise AlassoError(f"{twice} is given twice: a run and itself would write one result")


def refuse_other_lengths(configs: Sequence[RunConfig], streams: Sequence[Stream]) -> None:
    for config, stream in zip(configs, streams, strict=True):
        if not isinstance(stream, Stream):
            raise AlassoError(
                f"stream must be a Stream, not a {type(stream).__name__}: Stream.of makes one of your data"
            )
        if config.tasks not in (None, len(stream)):
            raise AlassoError(
                f"tasks={config.tasks}, but the stream has {len(stream)}: leave tasks out, or cut the stream"
            )


def refuse_results_of_other_streams(configs: Sequence[RunConfig], streams: Sequence[Stream], out: Path) -> None:
    for config, stream in zip(configs, streams, strict=True):
        files = [path(config, out) for path in (results.result_path, results.checkpoint_path)]
        editions.refuse_those_of_others(files, stream.editions)


def write(result: Result, out: Path | None) -> None:
    """The result's file, if there is to be one, in place of the run's checkpoint."""
    if out:
        results.write(result, out)
        results.checkpoint_path(result.config, out).unlink(missing_ok=True)


def begun(
    config: RunConfig,
    stream: Stream,
    model: Callable[[], nn.Module] | None,
    device: torch.device,
    resume_from: Path | None,
    saved: Path | None,
    observer: Observer,
) -> Lane:
    """A run at its start, or where its checkpoint left it."""
    code = results.commit()
    torch.manual_seed(config.seed)
    learner, position = make_learner(config, stream, model, device), Position()
    if resume_from and resume_from.exists():
        position, state = checkpoint.load(resume_from, config, device, stream.editions)
        learner.load_state_dict(state)
    if position.commits[-1:] != [code]:
        position.commits.append(code)
    return Lane(config, stream, learner, position, saved, observer)


def in_step(lanes: Sequence[Lane]) -> list[list[Lane]]:
    """Lanes that can be trained as one: stackable, at the same place, and no more than the memory holds.

    A stack that was killed may have left its lanes at different places.
    """
    groups: dict[Any, list[Lane]] = {}
    for lane in lanes:
        position = lane.position
        alone = len(lanes) > 1 and not stackable(lane.learner)
        place = (position.task, position.epoch, position.step)
        widths = tuple(task.head.stop - task.head.start for task in lane.stream.tasks)
        shape = repr(shape_of(lane.config))
        groups.setdefault(lane.config.name if alone else (place, widths, shape), []).append(lane)
    apart = [
        [[lane] for lane in g] if not can_share_a_stack([lane.learner for lane in g]) else [g] for g in groups.values()
    ]
    return [part for parts in apart for group in parts for part in in_parts_that_fit(group)]


def in_parts_that_fit(group: Sequence[Lane]) -> list[list[Lane]]:
    """No more lanes in a stack than the memory holds."""
    fitting = that_fit(group[0].learner) if len(group) > 1 else 1
    return [list(group[i : i + fitting]) for i in range(0, len(group), fitting)]


def make_learner(
    config: RunConfig, stream: Stream, model: Callable[[], nn.Module] | None, device: torch.device
) -> Learner:
    dropout = config.method == "sgd-dropout"

    def made() -> nn.Module:
        if model is not None:
            return models.built_by(model, stream.input_shape, stream.classes)
        return models.build(config.model, stream.input_shape, stream.classes, hidden=config.hidden, dropout=dropout)

    learner: Learner = loaded(METHODS[config.method].learner)(config, stream, made, device)
    if model is None and config.model in models.MODELS:
        gaussian = isinstance(learner, Variational)
        learner.built_as = (config.model, stream.input_shape, stream.classes, config.hidden, dropout, gaussian)
    return learner


def torch_device(name: str) -> torch.device:
    """``auto`` is a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise AlassoError(f"there is no device {name!r}; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise AlassoError(f"device {name}: use auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise AlassoError(f"device {name}: torch sees no GPU here; use --device cpu")
    number = torch.cuda.current_device() if device.index is None else device.index
    if number >= torch.cuda.device_count():
        raise AlassoError(f"device {name}: torch sees {torch.cuda.device_count()} GPU here, counted from cuda:0")
    torch.cuda.set_device(number)  # streams and recorded steps belong to the current device
    return torch.device("cuda", number)  # tensors name their device with its number


def set_precision(precision: str) -> None:
    """Of products of float32 on a GPU, convolutions included: TF32, or float32 to the last bit; summed in one order."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.deterministic = True  # or else a run on images differs from itself


@contextmanager
def few_threads_for(learner: Learner) -> Iterator[None]:
    """While inside, one thread where more gain nothing, and cost much: with cores that are busy, all wait for one."""
    before = torch.get_num_threads()
    if gains_nothing_from_threads(learner):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def gains_nothing_from_threads(learner: Learner) -> bool:
    """On a CPU a small network. On a GPU the host has but to plan epochs, unless it gathers the examples, too; and a
    core is always busy there, with waiting for the GPU or with writing a checkpoint.
    """
    if learner.device.type == "cpu":
        return sum(p.numel() for p in learner.model.parameters()) < SMALL_NETWORK
    return learner.resident
