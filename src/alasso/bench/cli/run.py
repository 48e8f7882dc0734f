"""The commands run, demo and search, as the command line registers them. Heavy imports wait for their turn."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from alasso.bench.cli import arguments
from alasso.bench.cli.console import Terminal, end_stopped, say
from alasso.bench.cli.options import DataDir, Device, Epochs, OutFolder, Quiet, Restart, Resume, Seeds, Tasks
from alasso.bench.labels import count_of
from alasso.errors import AlassoError

Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Settings of a method or run: --set a=1,2,3 batch_size=128")
]
Tried = Annotated[
    list[str] | None,
    typer.Option("--set", help="Values to try in place of the method's own: --set lam=1,3,10"),
]
Model = Annotated[
    str | None,
    typer.Option(help="A network by name, or module:factory of your own, called with (input_shape, classes)."),
]


def run(
    benchmark: Annotated[str, typer.Argument(help="See: alasso list")],
    path: Annotated[Path | None, typer.Argument(help="split-folder: your images, a folder a class.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="One or several: --method sgd si alasso")] = None,
    tasks: Tasks = None,
    epochs: Epochs = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples a step.")] = None,
    seed: Seeds = None,
    set_: Settings = None,
    found: Annotated[
        Path | None, typer.Option("--settings", help="Settings that alasso search chose: the file it wrote.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with fields of the run.")] = None,
    model: Model = None,
    classes_per_task: Annotated[int | None, typer.Option(help="Split benchmarks: classes in a task.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Bring images to this many pixels a side.")] = None,
    permute_first: Annotated[bool, typer.Option("--permute-first", help="Permute the first task too.")] = False,
    reference: Annotated[Path | None, typer.Option(help="Result of a single-task run, for intransigence (I).")] = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    out: OutFolder = Path("runs"),
    resume: Resume = False,
    restart: Restart = False,
    checkpoint_every: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 30.0,
    log: Annotated[list[str] | None, typer.Option(help="Log epochs to: csv, tensorboard")] = None,
    quiet: Quiet = False,
) -> None:
    """Train methods on a benchmark and measure what they forget."""
    from alasso.bench.training import sweep as runs
    from alasso.bench.training.search import chosen_settings

    if resume and restart:
        raise AlassoError("--resume goes on with what was begun, --restart throws it away: give one of the two")
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
        logs=arguments.checked_logs(log or []),
        checkpoint_every=arguments.checked_interval(checkpoint_every),
    )
    settings = arguments.parsed_settings(set_ or [])
    arguments.refuse_given_twice({**fields, "seed": seed}, settings)
    if benchmark != "split-folder":
        arguments.refuse_value_of_flag(sys.argv[1:], path)
    chosen = chosen_settings(found, benchmark) if found else {}
    configs = arguments.asked_for(benchmark, config, method, seed, fields, settings, chosen)
    against = read_reference(reference, configs) if reference else None
    for notice in [*notices(configs, options, against), *arguments.not_for_all(configs, settings)]:
        if notice and not quiet:
            say(notice)
    show_runs(configs, options, against)


def read_reference(path: Path, configs: Sequence[Any]) -> Any:
    """A result that intransigence of all these runs can be measured against."""
    from alasso.bench import metrics as references
    from alasso.bench import results

    reference = results.read(path)
    references.check_reference(reference, configs)
    return reference


def notices(configs: Sequence[Any], options: Any, reference: Any) -> list[str | None]:
    """What is to be said before anything is run; None where there is nothing to say."""
    from alasso.bench import metrics as references
    from alasso.bench.training.sweep import check_resumed

    resumed = [check_resumed(configs, options.out)] if options.resume else []
    other_seed = [references.other_seed(reference, configs)] if reference else []
    return [*resumed, *other_seed, *left_over_classes(configs)]


def left_over_classes(configs: Sequence[Any]) -> list[str | None]:
    """Lines on classes of one's own images that do not come out even; None where they do."""
    if not any(config.benchmark == "split-folder" for config in configs):
        return []
    from alasso.bench.streams import left_over  # torch: only for those who bring images

    return list(dict.fromkeys(map(left_over, configs)))


def demo(out: OutFolder = Path("runs/demo"), seed: int = 0, restart: Restart = False, quiet: Quiet = False) -> None:
    """Four methods on ten permuted versions of scikit-learn's digits: a minute, nothing downloaded.

    Continues an interrupted demo; shows a finished one.
    """
    from alasso.bench.training import sweep as runs

    methods = ["sgd", "ewc", "si", "alasso"]
    configs = runs.combinations("permuted-digits", methods, [seed], {"epochs": 5}, {})  # under a minute
    options = runs.Options(out=out, device="cpu", quiet=quiet, resume=not restart, restart=restart)
    show_runs(configs, options, None, to_go_on=())
    print("Ten small tasks do not tell SI and ALASSO apart: more seeds, or more and larger tasks, do.")


def search(
    benchmark: Annotated[str, typer.Argument(help="See: alasso list")],
    file: Annotated[Path, typer.Option(help="Outcome: what was tried and chosen; added to if it is there.")],
    method: Annotated[list[str] | None, typer.Option(help="One or several; all that have settings if none.")] = None,
    tasks: Tasks = None,
    epochs: Epochs = None,
    seed: Seeds = None,
    set_: Tried = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    out: OutFolder = Path("runs/search"),
    quiet: Quiet = False,
) -> None:
    """Find settings for each method on held-out training examples; the test examples are not used."""
    from alasso.bench.registry import METHODS
    from alasso.bench.training import sweep as runs
    from alasso.bench.training.search import chosen_line
    from alasso.bench.training.search import search as search_settings

    fields = {"tasks": tasks, "epochs": epochs}
    values = arguments.parsed_settings(set_ or [])
    if values and not method:
        raise AlassoError(f"--set needs --method: whose {' and '.join(values)} is to have these values?")
    options = runs.Options(out, data_dir, device, resume=True, quiet=quiet, to_run_again="delete it to run it again")
    methods = method or [name for name, known in METHODS.items() if known.search]
    somewhere = {setting for name in methods if name in METHODS for setting in METHODS[name].settings}
    for name in methods if not quiet and set(values) <= somewhere else ():  # what no method has is refused
        if name in METHODS and (lacking := [setting for setting in values if setting not in METHODS[name].settings]):
            say(f"{', '.join(lacking)} is no setting of {name}: searched without it")
    try:
        outcome = search_settings(benchmark, methods, seed or [0], fields, options, file, Terminal(), values)
    except runs.Stopped as stopped:
        raise end_stopped(stopped, sys.argv[1:]) from None
    for name in dict.fromkeys(methods):
        say(chosen_line(outcome, name))


def show_runs(configs: Sequence[Any], options: Any, against: Any, to_go_on: Sequence[str] = ("--resume",)) -> None:
    """Carry runs out, print the table, say where the files are. ``to_go_on``: what a stopped command needs to do so."""
    from alasso.bench.training import sweep as runs

    try:
        show_results(runs.carry_out(configs, options, Terminal(), lambda config: against), configs, options.out)
    except runs.Stopped as stopped:
        words = [word for word in sys.argv[1:] if word not in ("--restart", "--resume")]
        raise end_stopped(stopped, [*words, *to_go_on]) from None
    except runs.SomeDiverged as error:
        show_results(error.finished, configs, options.out)
        raise


def show_results(found: Sequence[Any], asked: Sequence[Any], folder: Path) -> None:
    """The table of what was found, with a column for all in which the runs that were asked for differ."""
    from alasso.bench.cli.tables import table
    from alasso.bench.labels import varying_settings

    if found:
        console = Terminal()
        console.print(table(found, console.width, varying_settings(asked)))
        say(f"{count_of(len(found), 'result file')} in {folder}")
