"""The command line. Heavy imports wait until a command needs them, so that ``--help`` answers at once."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import alasso
from alasso import usage
from alasso.errors import AlassoError
from alasso.report import commands as reporting
from alasso.reproduce import commands as reproducing
from alasso.wording import count_of

app = typer.Typer(
    help="Continual learning by asymmetric loss approximation: run, compare, reproduce.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Data sets: download, check, locate.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.command()(reporting.report)
app.command()(reporting.compare)
app.command()(reporting.probe)
app.command()(reproducing.reproduce)

STOPPED = 130  # as shells report a program ended by Ctrl-C
#: Options that take several values after one flag: --seed 0 1 2
SEVERAL = ("--method", "--seed", "--set", "--log", "--only", "--skip")

OutFolder = Annotated[Path, typer.Option("--out", help="Folder for result files and checkpoints.")]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder with the data sets; also ALASSO_DATA. Default: a cache.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with runs that were interrupted.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the table.")]
Names = Annotated[list[str] | None, typer.Argument(help="Data sets; all of them if none is named.")]


@app.command()
def run(
    benchmark: Annotated[str, typer.Argument(help="See: alasso list")],
    path: Annotated[Path | None, typer.Argument(help="split-folder: your images, a folder a class.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="One or several: --method sgd si alasso")] = None,
    tasks: Annotated[int | None, typer.Option(help="Number of tasks.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over each task.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="One or several: --seed 0 1 2")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Settings of a method or run: --set a=1,2,3 batch_size=128")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with fields of the run.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A network by name, or module:factory of your own, called with (input_shape, classes)."),
    ] = None,
    classes_per_task: Annotated[int | None, typer.Option(help="Split benchmarks: classes in a task.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Bring images to this many pixels a side.")] = None,
    permute_first: Annotated[bool, typer.Option("--permute-first", help="Permute the first task too.")] = False,
    reference: Annotated[Path | None, typer.Option(help="Result of a single-task run, for intransigence (I).")] = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    out: OutFolder = Path("runs"),
    resume: Resume = False,
    restart: Annotated[bool, typer.Option("--restart", help="Run again what is finished or was interrupted.")] = False,
    checkpoint_every: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 30.0,
    lanes: Annotated[
        str,
        typer.Option(help="Runs trained at once, as one stacked network: a number, or auto (1 on a CPU)."),
    ] = "auto",
    log: Annotated[list[str] | None, typer.Option(help="Log epochs to: csv, tensorboard")] = None,
    quiet: Quiet = False,
) -> None:
    """Train methods on a benchmark and measure what they forget."""
    from alasso.bench import runs

    if resume and restart:
        raise AlassoError("--resume goes on with what was begun, --restart throws it away: give one of the two")
    fields = {
        "tasks": tasks,
        "epochs": epochs,
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
        logs=checked_logs(log or []),
        checkpoint_every=checked_interval(checkpoint_every),
        lanes=checked_lanes(lanes),
    )
    settings = parsed_settings(set_ or [])
    refuse_given_twice({**fields, "seed": seed}, settings)
    configs = asked_for(benchmark, config, method, seed, fields, settings)
    against = read_reference(reference, configs) if reference else None
    for notice in notices(configs, options):
        if notice and not quiet:
            Console().print(notice, highlight=False, soft_wrap=True, markup=False)
    show_runs(configs, options, against)


def read_reference(path: Path, configs: Sequence[Any]) -> Any:
    """A result that intransigence of all these runs can be measured against."""
    from alasso.bench import results, runs

    reference = results.read(path)
    runs.check_reference(reference, configs)
    return reference


def notices(configs: Sequence[Any], options: Any) -> list[str | None]:
    """What is to be said before anything is run; None where there is nothing to say."""
    from alasso.bench import resuming

    resumed = [resuming.check(configs, options.out)] if options.resume else []
    return [*resumed, *left_over_classes(configs)]


def left_over_classes(configs: Sequence[Any]) -> list[str | None]:
    """Lines on classes of one's own images that do not come out even; None where they do."""
    if not any(config.benchmark == "split-folder" for config in configs):
        return []
    from alasso.bench.benchmarks import left_over  # torch: only for those who bring images

    return list(dict.fromkeys(map(left_over, configs)))


@app.command()
def demo(out: OutFolder = Path("runs/demo"), seed: int = 0, resume: Resume = False, quiet: Quiet = False) -> None:
    """Four methods on ten permuted versions of scikit-learn's digits: a minute, nothing downloaded."""
    from alasso.bench import runs

    methods = ["sgd", "ewc", "si", "alasso"]
    configs = runs.combinations("permuted-digits", methods, [seed], {"epochs": 5}, {})  # under a minute
    show_runs(configs, runs.Options(out=out, device="cpu", quiet=quiet, resume=resume, restart=not resume), None)
    print("Ten small tasks do not tell SI and ALASSO apart: more seeds, or more and larger tasks, do.")


@app.command()
def search(
    benchmark: Annotated[str, typer.Argument(help="See: alasso list")],
    file: Annotated[Path, typer.Option(help="Outcome: what was tried and chosen; added to if it is there.")],
    method: Annotated[list[str] | None, typer.Option(help="One or several; all that have settings if none.")] = None,
    tasks: Annotated[int | None, typer.Option(help="Number of tasks.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over each task.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="One or several: --seed 0 1 2")] = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    out: OutFolder = Path("runs/search"),
    quiet: Quiet = False,
) -> None:
    """Find settings for each method on held-out training examples; the test examples are not used."""
    from alasso.bench import runs
    from alasso.bench.catalog import METHODS
    from alasso.bench.search import search as search_settings

    fields = {"tasks": tasks, "epochs": epochs}
    options = runs.Options(out=out, data_dir=data_dir, device=device, quiet=quiet, resume=True)
    methods = method or [name for name, known in METHODS.items() if known.search]
    console = Console()
    try:
        outcome = search_settings(benchmark, methods, seed or [0], fields, options, file, console)
    except runs.Stopped as stopped:
        say_how_to_go_on(stopped, sys.argv[1:])
        raise typer.Exit(STOPPED) from None
    for name in methods:
        console.print(f"{name}: {outcome['chosen'][name]}", highlight=False)


@app.command("list")
def list_() -> None:
    """Benchmarks, methods and their settings, and the paper's experiments."""
    from rich.table import Table

    from alasso.bench.catalog import BENCHMARKS, METHODS
    from alasso.reproduce.experiments import read_experiments
    from alasso.reproduce.show import experiments_table

    benchmarks = Table(title="Benchmarks", title_justify="left")
    for column in ("name", "what it is", "as it is run"):
        benchmarks.add_column(column, no_wrap=column == "name")  # names have to be typed
    for name, benchmark in BENCHMARKS.items():
        p = benchmark.preset
        count = "all classes" if p["tasks"] is None else count_of(p["tasks"], "task")
        run = f"{count} × {count_of(p['epochs'], 'epoch')}, batches of {p['batch_size']}, {p['model']}"
        benchmarks.add_row(name, benchmark.title, run)
    methods = Table(title="Methods", title_justify="left")
    for column in ("name", "what it is", "settings and defaults"):
        methods.add_column(column, no_wrap=column == "name")
    for name, method in METHODS.items():
        methods.add_row(name, method.title, "  ".join(f"{k}={v}" for k, v in method.settings.items()) or "–")
    own = Table(
        title="Where a benchmark sets them otherwise (found by alasso search, or the paper's)", title_justify="left"
    )
    own.add_column("benchmark", no_wrap=True)
    own.add_column("settings")
    for name, benchmark in BENCHMARKS.items():
        if benchmark.settings:
            each = (f"{m}: {' '.join(f'{k}={v}' for k, v in s.items())}" for m, s in benchmark.settings.items())
            own.add_row(name, "; ".join(each))
    console = Console()
    console.print(benchmarks, methods, own, experiments_table(read_experiments()))


@data_app.command()
def fetch(names: Names = None, data_dir: DataDir = None, quiet: Quiet = False) -> None:
    """Download data sets from their publishers, and check them."""
    from alasso.bench import data

    for name in names or data.CATALOG:
        where = data.fetch(name, data_dir, progress=not quiet)
        print(f"{name}: ready in {where}")


@data_app.command()
def check(names: Names = None, data_dir: DataDir = None) -> None:
    """Compare the files on the disk with what was published."""
    from rich.table import Table

    from alasso.bench import data

    table = Table()
    for column in ("data set", "file", "state", "edition", ""):
        table.add_column(column, overflow="fold")
    good = True
    for name in names or data.CATALOG:
        for report in data.check(name, data_dir):
            style = {"ok": "green", "missing": "yellow", "wrong": "red"}[report.status]
            table.add_row(name, report.file, f"[{style}]{report.status}", report.edition, report.detail)
            good = good and report.status == "ok"
    Console().print(table)
    if not good:
        raise typer.Exit(2)


@data_app.command()
def where(names: Names = None, data_dir: DataDir = None) -> None:
    """Say where data sets are looked for."""
    from alasso.bench import data

    for name in names or data.CATALOG:
        print(f"{name}: {data.where(name, data_dir)}")


# -- parts ------------------------------------------------------------------------------------------------------


def asked_for(
    benchmark: str,
    file: Path | None,
    methods: list[str] | None,
    seeds: list[int] | None,
    fields: dict[str, Any],
    settings: dict[str, list[str]],
) -> list[Any]:
    """The configs of a command line; what it leaves open comes from the file, then from the benchmark's preset."""
    from alasso.bench import runs
    from alasso.bench.config import from_toml

    from_file, file_settings = from_toml(file) if file else ({}, {})
    if from_file.pop("benchmark", benchmark) != benchmark:
        raise AlassoError(f"{file} is for another benchmark than {benchmark}")
    file_methods = [str(name) for name in listed(from_file.pop("method", "alasso"))]
    file_seeds = listed(from_file.pop("seed", 0))
    settings = {name: listed(value) for name, value in file_settings.items()} | settings
    for name, values in {**settings, "method": file_methods, "seed": file_seeds}.items():
        if not values:
            raise AlassoError(f"{file}: {name} is an empty list")
    fields = from_file | {name: value for name, value in fields.items() if value is not None}
    return runs.combinations(benchmark, methods or file_methods, seeds or file_seeds, fields, settings)


def show_runs(configs: Sequence[Any], options: Any, against: Any) -> None:
    """Carry runs out, print the table, say where the files are."""
    from alasso.bench import runs

    console = Console()
    try:
        found = runs.carry_out(configs, options, console, lambda config: against)
    except runs.Stopped as stopped:
        say_how_to_go_on(stopped, [*(w for w in sys.argv[1:] if w not in ("--restart", "--resume")), "--resume"])
        raise typer.Exit(STOPPED) from None
    console.print(runs.table(found, console.width))
    console.print(f"{count_of(len(found), 'result file')} in {options.out}", highlight=False, soft_wrap=True)


def say_how_to_go_on(stopped: Exception, words: Sequence[str]) -> None:
    command = shlex.join(["alasso", *words])
    Console().print(f"\nStopped; saved up to {stopped}. Go on with:\n  {command}", soft_wrap=True, highlight=False)


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
            option = "PATH" if name == "path" else f"--{name.replace('_', '-')}"
            raise AlassoError(f"{name} is given by {option} and by --set: give it once")


def checked_interval(seconds: float) -> float:
    if not seconds > 0:
        raise AlassoError(f"--checkpoint-every takes a number of seconds above 0, not {seconds:g}")
    return seconds


def checked_lanes(word: str) -> int | None:
    if word == "auto":
        return None
    if not word.isdecimal() or int(word) < 1:
        raise AlassoError(f"--lanes takes auto or a number from 1 on, not {word!r}")
    return int(word)


def checked_logs(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in ("csv", "tensorboard"):
            raise AlassoError(f"--log takes csv or tensorboard, not {name!r}")
    return tuple(names)


def spread_values(words: Sequence[str]) -> list[str]:
    """``--seed 0 1 2`` → ``--seed 0 --seed 1 --seed 2``: what people type, in the form the parser takes.

    >>> spread_values(["run", "x", "--seed", "0", "1", "-q"])
    ['run', 'x', '--seed', '0', '--seed', '1', '-q']

    A flag without any value stays as it is, for the parser to refuse.

    >>> spread_values(["run", "x", "--seed"])
    ['run', 'x', '--seed']
    """
    spread: list[str] = []
    flag = None
    for word in words:
        if word.startswith("-") and not word[1:2].isdigit():  # --seed -1 is a mistake of another kind
            flag = word if word in SEVERAL else None
            spread.append(word)
        elif flag is not None:
            spread += [word] if spread[-1] == flag else [flag, word]
        else:
            spread.append(word)
    return spread


def version(show: bool) -> None:
    if show:
        print(f"alasso {alasso.__version__}")
        raise typer.Exit


@app.callback()
def common(
    _: Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Say the version.")] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: a mistake of the user's is one line and exit code 2."""
    try:
        sys.exit(app(spread_values(sys.argv[1:]), prog_name="alasso", standalone_mode=False) or 0)
    except AlassoError as error:
        print(f"alasso: {error}", file=sys.stderr)
        sys.exit(2)
    except usage.ParserError as error:
        if not usage.is_help(error):
            print(f"alasso: {usage.in_one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except typer.Abort:  # what older versions of the parser make of Ctrl-C
        sys.exit(STOPPED)
    except BrokenPipeError:  # `alasso … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
