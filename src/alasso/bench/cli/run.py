"""The commands that train: run, demo, search and probe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from alasso.bench import metrics as references
from alasso.bench import results
from alasso.bench.cli.console import AllowModel, DataDir, Device, Quiet, Ray, Shard, Terminal, end_stopped, say, table
from alasso.bench.cli.main import STOPPED
from alasso.bench.cli.report import report
from alasso.bench.config import count_of, from_toml, varying_settings
from alasso.bench.io import check_writable
from alasso.bench.models import check_allowed
from alasso.bench.probe import Plan
from alasso.bench.probe import read as read_probe
from alasso.bench.probe.figures import write_probe
from alasso.bench.probe.measure import probe_first_task, progress_bar
from alasso.bench.registry import METHODS
from alasso.bench.streams import left_over
from alasso.bench.training import sweep as runs
from alasso.bench.training.search import chosen_line, chosen_settings, grid
from alasso.bench.training.search import search as search_settings
from alasso.errors import AlassoError

OutFolder = Annotated[Path, typer.Option("--out", help="Folder for result files and checkpoints.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue interrupted runs.")]
Restart = Annotated[bool, typer.Option("--restart", help="Run again from the start.")]
Seeds = Annotated[list[int] | None, typer.Option("--seed", help="One or several: --seed 0 1")]
Tasks = Annotated[int | None, typer.Option(help="Number of tasks.")]
Epochs = Annotated[int | None, typer.Option(help="Passes over each task.")]
Seed = Annotated[int, typer.Option(help="Of the tasks and the training.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Settings of a method or run: --set a=1,2,3 batch_size=128")
]
Tried = Annotated[
    list[str] | None,
    typer.Option("--set", help="Values to try instead of the method's own: --set lam=1,3,10"),
]
Model = Annotated[
    str | None,
    typer.Option(help="A network by name, or your own as module:factory; gets (input_shape, classes)."),
]


class Log(str, Enum):
    """Where the numbers of each epoch go."""

    csv = "csv"
    tensorboard = "tensorboard"
    wandb = "wandb"
    mlflow = "mlflow"


Interval = Annotated[float, typer.Option(metavar="<seconds>", help="Time between checkpoints.", min=0)]
Logs = Annotated[
    list[Log] | None, typer.Option(metavar="<where>", help="Each epoch's numbers: csv, tensorboard, wandb, mlflow.")
]


def run(
    benchmark: Annotated[str, typer.Argument(help="See: alasso list")],
    path: Annotated[Path | None, typer.Argument(help="For split-folder: your images, a folder a class.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="One or several: --method sgd si")] = None,
    tasks: Tasks = None,
    epochs: Epochs = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples a step.")] = None,
    seed: Seeds = None,
    set_: Settings = None,
    found: Annotated[
        Path | None, typer.Option("--settings", help="What alasso search chose: the file it wrote.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with fields of the run.")] = None,
    model: Model = None,
    classes_per_task: Annotated[int | None, typer.Option(help="Split benchmarks: classes in a task.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Bring images to this many pixels a side.")] = None,
    permute_first: Annotated[bool, typer.Option("--permute-first", help="Permute the first task too.")] = False,
    reference: Annotated[Path | None, typer.Option(help="A single-task result, for intransigence (I).")] = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    out: OutFolder = Path("runs"),
    resume: Resume = False,
    restart: Restart = False,
    shard: Shard = None,
    ray: Ray = None,
    checkpoint_every: Interval = 30.0,
    log: Logs = None,
    quiet: Quiet = False,
) -> None:
    """Train methods on a benchmark and measure what they forget."""
    if resume and restart:
        raise AlassoError("--resume continues unfinished runs, --restart discards them: give one of the two")
    fields = {
        "tasks": tasks,
        "epochs": epochs,
        "learning_rate": lr,
        "batch_size": batch_size,
        "model": model,
        "classes_per_task": classes_per_task,
        "image_size": image_size,
        "permute_first": permute_first or None,
        "path": str(path) if path else None,
    }
    options = runs.Options(
        out=out,
        data_dir=data_dir,
        device=device,
        resume=resume,
        restart=restart,
        quiet=quiet,
        logs=tuple(one.value for one in log or []),
        checkpoint_every=checkpoint_every,
        ray=ray,
    )
    settings = parsed_settings(set_ or [])
    refuse_given_twice({**fields, "seed": seed}, settings)
    chosen = chosen_settings(found, benchmark) if found else {}
    planned = asked_for(benchmark, config, method, seed, fields, settings, chosen)
    configs = runs.shard_of(planned, shard)
    if not configs:
        return say(f"shard {shard} has none of the {count_of(len(planned), 'run')}")
    check_allowed((one.model for one in configs), [model, *settings.get("model", [])], config or found, "--model")
    against = results.read(reference) if reference else None
    if against:
        references.check_reference(against, configs)
    lines = [*notices(configs, options, against), *not_for_all(configs, settings), *not_chosen(configs, found, chosen)]
    for notice in () if quiet else lines:
        say(notice)
    return show_runs(configs, options, against)


def notices(configs: Sequence[Any], options: Any, reference: Any) -> list[str]:
    """Lines to say before anything runs; a run that cannot resume is refused."""
    lines = [runs.check_resumed(configs, options.out)] if options.resume else []
    if reference:
        lines.append(references.other_seed(reference, configs))
    lines += dict.fromkeys(map(left_over, configs))
    return [line for line in lines if line]


def demo(out: OutFolder = Path("runs/demo"), seed: Seed = 0, restart: Restart = False, quiet: Quiet = False) -> None:
    """Train five methods on ten small tasks: a minute on a CPU.

    The tasks are permuted versions of scikit-learn's digits; nothing is downloaded. Continues an interrupted demo;
    shows a finished one.
    """
    methods = ["sgd", "ewc", "si", "alasso", "kron-alasso"]
    configs = runs.combinations("permuted-digits", methods, [seed], {}, {})
    options = runs.Options(out=out, device="cpu", quiet=quiet, resume=not restart, restart=restart)
    show_runs(configs, options, None, to_go_on=())
    report([out], output=out / "report.html")
    plain, kept = (results.read(results.result_path(configs[i], out)).metrics["A"] for i in (0, -1))
    say(f"After {configs[0].tasks} tasks plain training has {plain:.0%} of the answers right, KronALASSO {kept:.0%}.")
    say("Ten small tasks do not tell SI and ALASSO apart; more seeds do. Next:")
    say("  alasso run permuted-digits --method si alasso --seed 0 1 2 3 4")


def search(
    benchmark: Annotated[str, typer.Argument(help="See: alasso list")],
    file: Annotated[Path, typer.Option(help="Where to write what was tried and chosen; adds to it.")],
    method: Annotated[list[str] | None, typer.Option(help="One or several. Default: all with settings.")] = None,
    tasks: Tasks = None,
    epochs: Epochs = None,
    seed: Seeds = None,
    set_: Tried = None,
    climb: Annotated[
        int | None, typer.Option(min=1, help="Try so many strengths, c or lam, uphill, in place of a grid.")
    ] = None,
    tpe: Annotated[
        int | None, typer.Option(min=1, help="Let Optuna's TPE try so many settings between the values of a grid.")
    ] = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    out: OutFolder = Path("runs/search"),
    shard: Shard = None,
    ray: Ray = None,
    quiet: Quiet = False,
) -> None:
    """Find settings for each method on held-out training examples.

    The test examples stay unused.
    """
    fields = {"tasks": tasks, "epochs": epochs}
    values = parsed_settings(set_ or [])
    if values and not method:
        raise AlassoError(f"--set needs --method, to say which method's {' and '.join(values)} to try")
    if values and climb:
        raise AlassoError("--climb chooses the values to try itself; leave out --set")
    if climb and tpe:
        raise AlassoError("--climb and --tpe are two ways to search: give one of them")
    if shard is not None and (climb or tpe):
        raise AlassoError("--shard is for a grid: --climb and --tpe decide on each run after those before it")
    again = "delete it to run it again"
    options = runs.Options(out, data_dir, device, resume=True, quiet=quiet, to_run_again=again, ray=ray)
    methods = method or [
        name for name, known in METHODS.items() if (known.settings.keys() & {"c", "lam"} if climb else known.search)
    ]
    asked = benchmark, methods, seed or [0], fields
    if shard is not None:
        with suppress(runs.SomeDiverged):  # a search leaves those settings out
            show_runs(runs.shard_of(grid(*asked, values), shard), options, None, to_go_on=())
        return say("When all shards are there, the same command without --shard chooses.")
    try:
        outcome = search_settings(*asked, options, file, Terminal(), values, climb, tpe)
    except runs.Stopped as stopped:
        raise end_stopped(stopped, sys.argv[1:]) from None
    for name in dict.fromkeys(methods):
        if lacking := [setting for setting in values if setting not in METHODS[name].settings]:
            say(f"{', '.join(lacking)} is not a setting of {name}: searched without it")
        say(chosen_line(outcome, name))
    return None


def show_runs(configs: Sequence[Any], options: Any, against: Any, to_go_on: Sequence[str] = ("--resume",)) -> None:
    """Trains, prints the table, says where the files are. ``to_go_on``: what a stopped command needs to continue."""
    try:
        show_results(runs.carry_out(configs, options, Terminal(), lambda config: against), configs, options.out)
    except runs.Stopped as stopped:
        words = [word for word in sys.argv[1:] if word not in ("--restart", "--resume")]
        raise end_stopped(stopped, [*words, *to_go_on]) from None
    except runs.SomeDiverged as error:
        show_results(error.finished, configs, options.out)
        raise


def show_results(found: Sequence[Any], asked: Sequence[Any], folder: Path) -> None:
    """Prints the table, with a column for everything in which the runs that were asked for differ."""
    if found:
        console = Terminal()
        console.print(table(found, console.width, varying_settings(asked)))
        say(f"{count_of(len(found), 'result file')} in {folder}")


def asked_for(
    benchmark: str,
    file: Path | None,
    methods: list[str] | None,
    seeds: list[int] | None,
    fields: dict[str, Any],
    settings: dict[str, list[str]],
    chosen: dict[str, dict[str, Any]],
) -> list[Any]:
    """The configs of a command line; what it leaves open comes from the file, from what a search chose, then from the
    benchmark's preset.
    """
    from_file, file_settings = from_toml(file) if file else ({}, {})
    if from_file.pop("benchmark", benchmark) != benchmark:
        raise AlassoError(f"{file} is for another benchmark, not {benchmark}")
    file_methods = [str(name) for name in listed(from_file.pop("method", "alasso"))]
    file_seeds = listed(from_file.pop("seed", 0))
    settings = {name: listed(value) for name, value in file_settings.items()} | settings
    for name, values in {**settings, "method": file_methods, "seed": file_seeds}.items():
        if not values:
            raise AlassoError(f"{file}: {name} is an empty list")
    given = {name: value for name, value in fields.items() if value is not None}
    methods, seeds = methods or file_methods, seeds or file_seeds
    return runs.combinations(benchmark, methods, seeds, from_file | given, settings, chosen)


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def parsed_settings(words: Sequence[str]) -> dict[str, list[str]]:
    """``["a=1,2", "c=1"]`` → ``{"a": ["1", "2"], "c": ["1"]}``"""
    settings: dict[str, list[str]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        if not equals or not name or not values:
            raise AlassoError(f"--set takes name=value or name=value,value, not {word!r}")
        if name in settings:
            raise AlassoError(f"--set has {name} twice; several values go in one: {name}=1,2")
        settings[name] = values.split(",")
    return settings


def refuse_given_twice(options: dict[str, Any], settings: dict[str, list[str]]) -> None:
    """One of two values would be dropped without a word."""
    for name in settings:
        if options.get(name) is not None:
            option = {"path": "PATH", "learning_rate": "--lr"}.get(name, f"--{name.replace('_', '-')}")
            raise AlassoError(f"{option} and --set both give {name}: give it once")


def not_for_all(configs: Sequence[Any], settings: dict[str, list[str]]) -> list[str]:
    """Lines on settings that only some of the methods have; the others are run without them."""
    lines = []
    for name in settings:
        lacking = dict.fromkeys(c.method for c in configs if name not in c.settings and not hasattr(c, name))
        if lacking:
            lines.append(f"{name} is not a setting of {', '.join(lacking)}: run without it")
    return lines


def not_chosen(configs: Sequence[Any], file: Path | None, chosen: dict[str, dict[str, Any]]) -> list[str]:
    """Lines on methods of which the file of a search says nothing."""
    left = dict.fromkeys(c.method for c in configs if file and c.settings and c.method not in chosen)
    return [f"{file} has no settings of {method}: runs it with its preset" for method in left]


def probe(
    result: Annotated[Path, typer.Argument(help="A result file; learns its first task again.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for figures and measurement.")] = Path("probe"),
    weights: Annotated[int, typer.Option(help="Weights drawn at random.", min=1)] = 200,
    offsets: Annotated[int, typer.Option(help="Places on each weight's line.", min=3)] = 41,
    span: Annotated[float, typer.Option(help="How far a weight moves to either side.")] = 1.0,
    examples: Annotated[int, typer.Option(help="Training examples, drawn at random.", min=1)] = 1000,
    allow_model: AllowModel = None,
    device: Device = "auto",
    data_dir: DataDir = None,
) -> None:
    """Measure a task's loss around its optimum, weight by weight.

    And what SI and ALASSO make of it.
    """
    check_writable(out)
    config = results.read(result).config
    check_allowed([config.model], allow_model or [], result, "--allow-model")
    if (there := out / "probe.json").exists() and read_probe(there).config != config.to_json():
        raise AlassoError(f"{there} holds the probe of another run: choose another --out, or delete it")
    plan = Plan(weights=weights, offsets=offsets, span=span, examples=examples)
    try:
        with progress_bar(Terminal()) as watch:
            measured = probe_first_task(config, plan, data_dir=data_dir, device=device, say=say, watch=watch)
    except KeyboardInterrupt:
        say("\nStopped; nothing was saved.")
        raise typer.Exit(STOPPED) from None
    for path in write_probe(measured, out):
        say(str(path))
    for line in measured.statement():
        say(line)
