"""How long whole runs take from a warm start: data, steps, evaluation on all tasks and checkpoints, by the clock.

    python benchmarks/whole_run.py [--data-dir DIR] [--tasks 30 --epochs 20 --lanes 1 --method alasso] [--keep DIR]

Several lanes are seeds from 0 on, trained as one stack. A run of two tasks and one epoch goes before, which compiles
what is compiled once a process; it is timed too, as the cold start. What counts here is the time, and A is shown to see
that it was the real thing; the results themselves are thrown away, or kept in a folder.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from common import arguments, parsed, report, synchronise
from rich.console import Console

from alasso.bench import results
from alasso.bench.config import RunConfig
from alasso.bench.labels import count_of
from alasso.bench.reproduce.timing import steps_of
from alasso.bench.results import Result
from alasso.bench.training import sweep as runs


def configs(benchmark: str, method: str, lanes: int, tasks: int, epochs: int) -> list[RunConfig]:
    length = {"tasks": tasks, "epochs": epochs}
    return [RunConfig.for_benchmark(benchmark, method, seed=seed, **length) for seed in range(lanes)]


def timed(wanted: list[RunConfig], data_dir: Path | None, device: str) -> tuple[float, list[Result]]:
    """In a folder that is thrown away: what is there already would not be run."""
    with tempfile.TemporaryDirectory() as folder:
        options = runs.Options(Path(folder), data_dir, device, quiet=True, lanes=len(wanted))
        began = time.perf_counter()
        found = runs.carry_out(wanted, options, Console(quiet=True))
        synchronise(device)
        return time.perf_counter() - began, found


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], rounds=1)
    parser.add_argument("--data-dir", type=Path, default=None, help="where the data are; else where alasso keeps them")
    parser.add_argument("--keep", type=Path, default=None, help="folder to write the last round's results to")
    parser.add_argument("--benchmark", default="permuted-mnist")
    parser.add_argument("--method", default="alasso")
    parser.add_argument("--tasks", type=int, default=30)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lanes", type=int, default=1)
    options = parsed(parser)
    what = (options.benchmark, options.method, options.lanes)
    cold, _ = timed(configs(*what, tasks=2, epochs=1), options.data_dir, options.device)
    times, found = [], []
    wanted = configs(*what, options.tasks, options.epochs)
    for _ in range(options.rounds):
        seconds, found = timed(wanted, options.data_dir, options.device)
        times.append(seconds)
    warm = statistics.median(times)
    steps = sum(map(steps_of, wanted))
    accuracy = statistics.mean(float(result.metrics["A"] or 0) for result in found)
    row = [f"{cold:.1f}", f"{warm:.2f}", f"{warm / options.lanes:.2f}", f"{warm / steps * 1e6:.1f}", f"{accuracy:.4f}"]
    length = f"{count_of(options.tasks, 'task')} of {count_of(options.epochs, 'epoch')}"
    report(
        "whole_run",
        f"{options.benchmark}, {options.method}, {length}, {count_of(options.lanes, 'lane')}, on {options.device}",
        ["cold start, 2 × 1: s", "whole: s", "a run: s", "a lane and step: µs", "A"],
        [row],
        {"cold": cold, "seconds": times, "lanes": options.lanes, "steps": steps, "A": accuracy},
        [],
        options,
    )
    for result in found if options.keep else ():
        results.write(result, options.keep)


if __name__ == "__main__":
    main()
