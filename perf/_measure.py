"""What the commands here share: interleaved timing, ratios within a round, a table, a record.

Every case has one short turn in each round, and the order changes from round to round. What else the machine does
falls on all cases alike, and a ratio is the median over rounds of two times of the same round.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[], None]
Times = dict[str, list[float]]

RECORDS = Path(__file__).resolve().parent / "records.jsonl"
SIZES = (784, 2000, 2000, 10)  # the paper's network
BATCH = 256


def arguments(description: str, rounds: int) -> argparse.ArgumentParser:
    """Makes a parser with the options that every command has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; torch's choice if not given")
    parser.add_argument("--rounds", type=int, default=rounds, help="every case has one turn in each round")
    parser.add_argument("--record", action="store_true", help="append a line to perf/records.jsonl")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses the command line and sets the number of threads."""
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.device.startswith("cuda"):
        torch.backends.cuda.matmul.allow_tf32 = True
    return options


# -- timing --------------------------------------------------------------------------------------------------


def interleaved(cases: Mapping[str, Step], rounds: int, device: str, untimed: int = 1, timed: int = 2) -> Times:
    """Times every case once a round, in an order that is shuffled anew.

    Returns:
        Seconds a call of each case, one number a round.
    """
    order, shuffle = list(cases), random.Random(0).shuffle
    times: Times = {name: [] for name in cases}
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            for _ in range(untimed):
                cases[name]()
            times[name].append(seconds(cases[name], timed, device))
    return times


def seconds(step: Step, count: int, device: str) -> float:
    """Returns the mean seconds of ``count`` calls in a row."""
    synchronise(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronise(device)
    return (time.perf_counter() - start) / count


def synchronise(device: str) -> None:
    """Waits for a GPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def milliseconds(times: Times, name: str) -> float:
    """Returns the median over the rounds."""
    return round(1e3 * statistics.median(times[name]), 4)


def ratio(times: Times, name: str, base: str) -> dict[str, float]:
    """Returns median and quartiles of one case's time over another's in the same round."""
    return _spread([mine / other for mine, other in zip(times[name], times[base], strict=True)])


def extra(times: Times, name: str, base: str) -> dict[str, float]:
    """Returns median and quartiles of one case's milliseconds less another's in the same round."""
    return _spread([1e3 * (mine - other) for mine, other in zip(times[name], times[base], strict=True)])


def _spread(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}


# -- networks and steps --------------------------------------------------------------------------------------


def network(*sizes: int, device: str) -> nn.Sequential:
    """Makes the same ReLU network each time."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(sizes):
        layers += [nn.Linear(n, m), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(device)


def random_batch(sizes: Sequence[int], count: int, device: str) -> tuple[Tensor, Tensor]:
    """Makes inputs (count, sizes[0]) and labels (count,) below sizes[-1]."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(count, sizes[0], generator=generator)
    y = torch.randint(sizes[-1], (count,), generator=generator)
    return x.to(device), y.to(device)


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Step:
    """Makes a function that takes one whole step on the same batch."""

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


# -- what is left --------------------------------------------------------------------------------------------


def spread(values: Mapping[str, float]) -> str:
    """Writes a median with its quartiles."""
    return "{median:.3f} ({low:.3f} to {high:.3f})".format(**values)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a plain table: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    print(f"\n{title}")
    for row in [columns, *rows]:
        first, *others = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *others]).rstrip())


def keep(command: str, options: argparse.Namespace, found: Mapping[str, Any]) -> None:
    """Appends a line to records.jsonl if ``--record`` was given."""
    print(f"\n{_machine(options.device)}, {torch.get_num_threads()} threads, torch {torch.__version__}, {_commit()}")
    if not options.record:
        return
    line = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": command,
        "settings": {key: value for key, value in vars(options).items() if key != "record"},
        "machine": {"name": _machine(options.device), "cpus": _cpus(), "threads": torch.get_num_threads()},
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
        "commit": _commit(),
        **found,
    }
    with RECORDS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(f"written to {RECORDS.name}")


def _machine(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    about = Path("/proc/cpuinfo")
    lines = about.read_text(encoding="utf-8").splitlines() if about.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cpus() -> int | None:
    return torch.multiprocessing.cpu_count()


def _commit() -> str:
    """The commit, with a + if anything in src differs from it; ALASSO_COMMIT stands in where there is no history."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=RECORDS.parent, capture_output=True, text=True).stdout.strip()

    here = git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "../src") else "")
    return os.environ.get("ALASSO_COMMIT", here)
