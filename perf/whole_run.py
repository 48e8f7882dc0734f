"""How long a whole run takes: data, steps, evaluation on all tasks and checkpoints, by the clock.

    python perf/whole_run.py [--data-dir DIR --benchmark permuted-mnist --method alasso --tasks 30 --record]

A run of two tasks of one epoch goes first and compiles; its time is the cold start. A, the mean accuracy, shows that
the run was real. Each run must equal the one before it bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from _measure import arguments, keep, parsed, synchronise, table

from alasso.bench.config import RunConfig
from alasso.bench.results import Result
from alasso.bench.training.run import run


def timed(options: argparse.Namespace, tasks: int, epochs: int) -> tuple[float, Result]:
    """Seconds of a run, and its result; the file is thrown away."""
    config = RunConfig.for_benchmark(options.benchmark, options.method, tasks=tasks, epochs=epochs)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        result = run(config, out=folder, data_dir=options.data_dir, device=options.device)
        synchronise(options.device)
        return time.perf_counter() - began, result


def main() -> None:
    parser = arguments(__doc__.partition("\n")[0], rounds=2)
    parser.add_argument("--data-dir", type=Path, default=None, help="where the data are; else where alasso keeps them")
    parser.add_argument("--benchmark", default="permuted-mnist")
    parser.add_argument("--method", default="alasso")
    parser.add_argument("--tasks", type=int, default=30)
    parser.add_argument("--epochs", type=int, default=20)
    options = parsed(parser)
    cold, _ = timed(options, tasks=2, epochs=1)
    times, runs = zip(*(timed(options, options.tasks, options.epochs) for _ in range(options.rounds)), strict=True)
    equal = all(one.accuracy == runs[0].accuracy for one in runs)
    accuracy = float(runs[0].metrics["A"] or 0)
    title = f"{options.benchmark}, {options.method}, {options.tasks} tasks of {options.epochs} epochs, {options.device}"
    columns = ["", "cold start 2 × 1: s", "whole: s", "A", "all runs equal"]
    table(title, columns, [["a run", f"{cold:.1f}", f"{statistics.median(times):.2f}", f"{accuracy:.4f}", str(equal)]])
    options.data_dir = None  # a folder of this machine
    keep(
        "whole_run",
        options,
        {"cold": round(cold, 2), "seconds": [round(t, 2) for t in times], "A": accuracy, "equal": equal},
    )


if __name__ == "__main__":
    main()
