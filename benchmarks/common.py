"""What the benchmarks share: turns that are short and interleaved, ratios within a round, one table, one record."""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from alasso.bench.io import write_whole
from alasso.bench.results import compact_rows, environment

Step = Callable[[], None]
Times = dict[str, list[float]]


def arguments(description: str, rounds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; all cores if not given")
    parser.add_argument("--rounds", type=int, default=rounds, help="each case has a turn in every round")
    parser.add_argument("--out", type=Path, default=Path("records"), help="folder for the record")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.device.startswith("cuda"):
        torch.backends.cuda.matmul.allow_tf32 = True
    return options


# -- timing --------------------------------------------------------------------------------------------------


_ORDER = random.Random(0)


def interleaved(cases: Mapping[str, Step], rounds: int, device: str, untimed: int = 1, timed: int = 2) -> Times:
    """Seconds a step: in each round every case has one short turn, in random order, its first steps not counted.

    What else the machine does then falls on all cases alike, and what it does for long falls on whole rounds. The order
    goes on from call to call, so that no case comes after the same other one every time.
    """
    order = list(cases)
    times: Times = {name: [] for name in cases}
    for _ in range(rounds):
        _ORDER.shuffle(order)
        for name in order:
            for _ in range(untimed):
                cases[name]()
            times[name].append(seconds(cases[name], timed, device))
    return times


def seconds(step: Step, count: int, device: str) -> float:
    """Mean seconds of ``count`` steps in a row."""
    if hasattr(step, "seconds"):  # a peer whose step is part of something larger keeps its own time
        return float(step.seconds(count))
    synchronise(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronise(device)
    return (time.perf_counter() - start) / count


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def ratio(times: Times, name: str, base: str) -> dict[str, float]:
    """Median and quartiles over the rounds of one case's time divided by another's in the same round."""
    ratios = [mine / other for mine, other in zip(times[name], times[base], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}


# -- networks and steps --------------------------------------------------------------------------------------


def network(*sizes: int, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(sizes):
        layers += [nn.Linear(n, m), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(device)


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Step:
    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def recorded(step: Step) -> Step:
    """The step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def compare(
    name: str, title: str, columns: Sequence[str], cases: Mapping[str, Step], base: str, options: argparse.Namespace
) -> None:
    """Time all cases and report a row for each: its seconds, and its ratio to the base with the quartiles.

    The first call of each, which sets up what later ones find there, is not counted.
    """
    for step in cases.values():
        step()
    times = interleaved(cases, options.rounds, options.device, untimed=0, timed=1)
    medians = {case: statistics.median(of_case) for case, of_case in times.items()}
    ratios = {case: ratio(times, case, base) for case in times}
    rows = [
        [case, f"{medians[case]:.3f}", f"{of['median']:.2f} ({of['low']:.2f} – {of['high']:.2f})"]
        for case, of in ratios.items()
    ]
    report(name, title, columns, rows, {"seconds": medians, "ratios": ratios}, [], options)


# -- what is left --------------------------------------------------------------------------------------------


def report(
    name: str,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    record: Mapping[str, Any],
    notes: Sequence[str],
    options: argparse.Namespace,
) -> None:
    """Print the table; write it as a log, and the record as JSON beside it."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*row)
    console = Console(record=True, width=120)
    console.print(table)
    for note in notes:
        console.print(note)
    where = environment(options.device)
    console.print(f"{where['cpu'] if not where['gpu'] else where['gpu']}, torch {where['torch']}, {where['commit']}")
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    stem = unused(options.out, f"{today}-{name}-{options.device.partition(':')[0]}")
    settings = {key: value for key, value in vars(options).items() if not isinstance(value, Path)}
    text = json.dumps(
        {"benchmark": name, "settings": settings, "environment": where, "notes": notes, **record}, indent=1
    )
    options.out.mkdir(parents=True, exist_ok=True)
    write_whole(options.out / f"{stem}.json", (compact_rows(text) + "\n").encode())
    write_whole(options.out / f"{stem}.log", console.export_text().encode())
    print(f"written to {options.out / stem}.json and .log")


def unused(folder: Path, stem: str) -> str:
    """A later record of a day stands beside the earlier ones."""
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not (folder / f"{name}.json").exists())
