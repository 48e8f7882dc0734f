"""How much of the first task's forgetting each method prevents, by its defaults, in many small set-ups; with the bars.

    python perf/everywhere.py [--seeds 1 --jobs 2 --only LSTM --methods SI,EWC --strengths 1,100 --record --out FILE]

A set-up is a model, an optimizer, a way of training, and two tasks (see _setups.py). The model learns the first, the
method consolidates, the model learns the second. Beside it, the same plainly. What reg.summary() said between the tasks
is compared with what happened. A package that is missing is named and its set-ups are left out.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from _measure import Step, extra, interleaved, keep, milliseconds, ratio, table
from _setups import SETUPS, SetUp, Task
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import alasso

Row = dict[str, Any]
Figures = dict[str, dict[str, dict[str, float]]]  # set-up, method, figure

PLAIN = "plain"
TIMED_ROUNDS = 25
METHODS: dict[str, Callable[[nn.Module], alasso.Regularizer]] = {
    "KronALASSO": lambda model: alasso.KronALASSO(model),
    "ALASSO": lambda model: alasso.ALASSO(model),
    "SI": lambda model: alasso.SI(model),
    "EWC": lambda model: alasso.EWC(model),
    "OnlineEWC": lambda model: alasso.OnlineEWC(model),
    "MAS": lambda model: alasso.MAS(model),
}
TIMES = " x "  # between a method's name and the factor of its default strength
VERDICTS = ("too weak to matter", "balanced", "nearly frozen")


def regularizer(case: str, model: nn.Module) -> alasso.Regularizer:
    """Makes a method with its defaults, but for a factor of its strength."""
    name, _, factor = case.partition(TIMES)
    reg = METHODS[name](model)
    strength = "c" if "c" in reg.settings() else "lam"
    setattr(reg, strength, float(factor or 1) * getattr(reg, strength))
    return reg


# -- one run -------------------------------------------------------------------------------------------------


def run(setup: SetUp, method: str, seed: int) -> tuple[Row, Step]:
    """Trains a model on both tasks, plainly or with a method; returns the figures, and one more step to be timed."""
    torch.manual_seed(seed)
    first, second = setup.tasks(seed)
    model = setup.model()
    optimizers = setup.optimizers(model)
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(setup.ema)) if setup.ema else None
    tested = mean or model
    reg = None if method == PLAIN else regularizer(method, model)
    if reg is not None and first.y.dim() > 1 and hasattr(reg, "loss"):
        reg.loss = loss_of_each
    attach(reg, optimizers)

    torch.manual_seed(seed)  # the same batches for every method, whatever random numbers it draws itself
    train(setup, model, mean, optimizers, first)
    before, diverged = accuracy(tested, first), False
    if reg is not None:
        batches = zip(first.x.split(setup.batch), first.y.split(setup.batch), strict=True)
        try:
            reg.consolidate(list(batches), head=first.head)
        except alasso.DivergedError:
            diverged = True
    verdict = "" if reg is None else reg.summary().verdict
    if setup.fresh:
        optimizers = setup.optimizers(model)
        attach(reg, optimizers)
    torch.manual_seed(seed)
    train(setup, model, mean, optimizers, second)
    row = {
        "setup": setup.name,
        "method": method,
        "seed": seed,
        "before": before,
        "after": accuracy(tested, first),
        "second": accuracy(tested, second),
        "verdict": verdict,
        "nan": diverged or not all(bool(p.isfinite().all()) for p in model.parameters()),
    }
    begin(model, optimizers)

    def one_more() -> None:
        step(setup, model, optimizers, second, torch.randperm(len(second.x))[: setup.batch * setup.accumulate])

    return row, one_more


def attach(reg: alasso.Regularizer | None, optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        if reg is not None:
            reg.attach(optimizer)


def train(
    setup: SetUp, model: nn.Module, mean: AveragedModel | None, optimizers: Sequence[Optimizer], task: Task
) -> None:
    """Trains on a task."""
    together = setup.batch * setup.accumulate
    schedulers = []
    if setup.cosine:
        steps = setup.epochs * -(-len(task.x) // together)
        schedulers = [CosineAnnealingLR(optimizer, steps) for optimizer in optimizers]
    begin(model, optimizers)
    for _ in range(setup.epochs):
        for rows in torch.randperm(len(task.x)).split(together):
            step(setup, model, optimizers, task, rows)
            for scheduler in schedulers:
                scheduler.step()
            if mean is not None:
                mean.update_parameters(model)
    end(model, optimizers)


def begin(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Prepares to train; a schedule-free optimizer puts the weights that it trains into the model."""
    model.train()
    for optimizer in optimizers:
        getattr(optimizer, "train", lambda: None)()


def end(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Prepares to test; a schedule-free optimizer puts its mean of the weights into the model."""
    model.eval()
    for optimizer in optimizers:
        getattr(optimizer, "eval", lambda: None)()


def step(setup: SetUp, model: nn.Module, optimizers: Sequence[Optimizer], task: Task, rows: Tensor) -> None:
    """Takes one step of all optimizers."""

    def backward() -> float:
        loss = 0.0
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in rows.split(setup.batch):
            with torch.autocast("cpu", torch.bfloat16, enabled=setup.bf16):
                output = task.head(model(task.x[part]))
            of_part = loss_of_each(output.float(), task.y[part]).sum() / len(rows)
            of_part.backward()
            loss += of_part.item()
        if setup.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), setup.clip)
        return loss

    if setup.closure:
        for optimizer in optimizers:
            optimizer.step(backward)
    else:
        backward()
        for optimizer in optimizers:
            optimizer.step()


def loss_of_each(output: Tensor, y: Tensor) -> Tensor:
    """Returns the cross-entropy of each sample, (N,), the mean over a sequence."""
    values = nn.functional.cross_entropy(output.movedim(-1, 1), y, reduction="none")
    return values.flatten(1).mean(1) if values.dim() > 1 else values


@torch.no_grad()
def accuracy(model: nn.Module, task: Task) -> float:
    """Returns the share of right answers on the test samples."""
    model.eval()
    return float((task.head(model(task.test_x)).argmax(-1) == task.test_y).float().mean())


# -- all runs ------------------------------------------------------------------------------------------------


def runs(name: str, methods: Sequence[str], seed: int) -> list[Row]:
    """Runs a set-up plainly and with each method, one after the other; then times their steps in turns."""
    torch.set_num_threads(1)
    setup = next(one for one in SETUPS if one.name == name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = {method: run(setup, method, seed) for method in (PLAIN, *methods)}
        times = interleaved({method: more for method, (_, more) in done.items()}, TIMED_ROUNDS, "cpu")
    return [
        {
            **row,
            "milliseconds": milliseconds(times, method),
            "added": extra(times, method, PLAIN)["median"],
            "ratio": ratio(times, method, PLAIN)["median"],
        }
        for method, (row, _) in done.items()
    ]


def all_runs(names: Sequence[str], methods: Sequence[str], seeds: Sequence[int], jobs: int) -> list[Row]:
    """Runs the set-ups in processes of one thread each."""
    rows = []
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        futures = {pool.submit(runs, name, methods, seed): name for seed in seeds for name in names}
        for done, future in enumerate(as_completed(futures), 1):
            if future.exception() is not None:
                print(f"\nfailed: {futures[future]}", file=sys.stderr)
            rows += future.result()
            print(f"\r{done} of {len(futures)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    order = {name: i for i, name in enumerate(names)}
    return sorted(rows, key=lambda row: order[row["setup"]])


def is_missing(package: str) -> bool:
    """Returns whether a package is not installed, or older than its ">=" asks for."""
    name, _, least = package.partition(">=")
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        return True
    return release(installed) < release(least)


def release(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


# -- figures -------------------------------------------------------------------------------------------------


def figures(rows: Sequence[Row]) -> Figures:
    """Returns what the seeds of each set-up and method give together, and what that is against plain training."""
    runs_of: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        runs_of.setdefault(row["setup"], {}).setdefault(row["method"], []).append(row)
    return {setup: against_plain({m: middle(of) for m, of in methods.items()}) for setup, methods in runs_of.items()}


def middle(rows: Sequence[Row]) -> dict[str, float]:
    """Returns the mean of each accuracy, the median of each time, and the number of runs with NaN."""
    return {
        **{key: statistics.mean(row[key] for row in rows) for key in ("before", "after", "second")},
        **{key: statistics.median(row[key] for row in rows) for key in ("milliseconds", "added", "ratio")},
        "nan": sum(row["nan"] for row in rows),
    }


def against_plain(methods: Mapping[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Adds what plain training loses, each method's share of it that is prevented, and its price on the second task."""
    plain = methods[PLAIN]
    lost = plain["before"] - plain["after"]
    found = {PLAIN: {**plain, "lost": lost}}
    for name, own in methods.items():
        if name != PLAIN:
            found[name] = {
                **own,
                "share": min(1.0, (own["after"] - plain["after"]) / lost) if lost > 0 else 1.0,
                "price": plain["second"] - own["second"],
            }
    return {name: {key: round(value, 4) for key, value in of.items()} for name, of in found.items()}


def summary(found: Figures, method: str) -> dict[str, float]:
    """Returns a method's figures over all set-ups."""
    own = [methods[method] for methods in found.values()]
    return {
        "share": round(statistics.mean(of["share"] for of in own), 4),
        "half": sum(of["share"] >= 0.5 for of in own),
        "setups": len(own),
        "price": round(statistics.mean(of["price"] for of in own), 4),
        "worst price": max(of["price"] for of in own),
        "nan": sum(of["nan"] for of in own),
        "ratio": round(statistics.mean(of["ratio"] for of in own), 4),
    }


def happened(of: Mapping[str, float]) -> str:
    """Returns the verdict that reg.summary() should have given, from what it could not know."""
    if of["price"] > 0.1:
        return "nearly frozen"
    return "too weak to matter" if of["share"] < 0.25 else "balanced"


def confusion(rows: Sequence[Row], found: Figures) -> dict[str, dict[str, int]]:
    """Counts each run's verdict against what happened to its set-up and method; without set-ups that forget little."""
    counts = {said: dict.fromkeys(VERDICTS, 0) for said in VERDICTS}
    for row in rows:
        methods = found[row["setup"]]
        if row["method"] != PLAIN and methods[PLAIN]["lost"] >= 0.1:
            others = counts.setdefault(row["verdict"], dict.fromkeys(VERDICTS, 0))
            others[happened(methods[row["method"]])] += 1
    return counts


def show_verdicts(counts: Mapping[str, Mapping[str, int]]) -> None:
    """Prints what reg.summary() said before the second task against what happened in it."""
    rows = [[said, *(str(count) for count in of.values())] for said, of in counts.items()]
    table("Verdict of reg.summary(): said (lines), happened (columns)", ["said", *VERDICTS], rows)
    right, all_of = sum(counts[one][one] for one in VERDICTS), sum(sum(of.values()) for of in counts.values())
    print(f"right: {right} of {all_of}" + (f", {right / all_of:.3f}" if all_of else ""))


def show(found: Figures, summaries: Mapping[str, Mapping[str, float]]) -> None:
    """Prints the tables."""
    accuracies, added = [], []
    for setup, methods in found.items():
        plain = methods[PLAIN]
        cells = [f"{plain['before']:.2f} > {plain['after']:.2f}, {plain['second']:.2f}"]
        cells += [
            f"{methods[m]['share']:.2f} {-methods[m]['price']:+.2f}" + "!" * bool(methods[m]["nan"]) for m in summaries
        ]
        accuracies.append([setup, *cells])
        added.append([setup, f"{plain['milliseconds']:.2f}", *(f"{methods[m]['added']:+.2f}" for m in summaries)])
    title = "Plain: task 1 before > after, task 2. Methods: share prevented, task 2 against plain; ! is NaN"
    table(title, ["set-up", PLAIN, *summaries], accuracies)
    table("Milliseconds of a plain step, and those added", ["set-up", PLAIN, *summaries], added)
    columns = ["method", "share", "half in", "price", "worst", "NaN", "step time"]
    rows = [
        [
            name,
            f"{of['share']:.3f}",
            f"{of['half']} of {of['setups']}",
            f"{of['price']:.3f}",
            f"{of['worst price']:.3f}",
            str(of["nan"]),
            f"{of['ratio']:.2f} x",
        ]
        for name, of in summaries.items()
    ]
    table("Over all set-ups", columns, rows)


def show_bars(of: Mapping[str, float]) -> None:
    """Prints what KronALASSO has to reach, and whether it does."""
    bars = [
        ("share prevented, mean", of["share"], ">=", 0.80),
        ("at least half prevented, share of the set-ups", of["half"] / of["setups"], ">=", 0.90),
        ("price on task 2, mean", of["price"], "<=", 0.03),
        ("price on task 2, worst", of["worst price"], "<=", 0.12),
        ("runs with NaN", of["nan"], "<=", 0),
    ]
    rows = [
        [
            what,
            f"{value:.3f}",
            f"{sign} {bar:g}",
            "met" if (value >= bar if sign == ">=" else value <= bar) else "missed",
        ]
        for what, value, sign, bar in bars
    ]
    table("KronALASSO's bars", ["bar", "found", "wanted", ""], rows)


# -- the command ---------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1, help="runs of each set-up and method")
    parser.add_argument("--first-seed", type=int, default=0, help="of these runs")
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--only", default="", metavar="PATTERN", help="regular expression found in a set-up's name")
    parser.add_argument("--methods", default=",".join(METHODS), help="names with commas between them")
    parser.add_argument("--strengths", default="1", help="factors of the default c or lam, with commas between them")
    parser.add_argument("--record", action="store_true", help="append a line to perf/records.jsonl")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write every run's figures as JSON")
    parser.set_defaults(device="cpu")
    options = parser.parse_args()
    out = vars(options).pop("out")
    methods = options.methods.split(",")
    if unknown := set(methods) - METHODS.keys():
        parser.error(f"no such method: {', '.join(sorted(unknown))}; there are {', '.join(METHODS)}")
    factors = [float(factor) for factor in options.strengths.split(",")]
    methods = [name if factor == 1 else f"{name}{TIMES}{factor:g}" for name in methods for factor in factors]
    torch.set_num_threads(1)

    chosen = [setup for setup in SETUPS if re.search(options.only, setup.name)]
    missing = {setup.name: setup.needs for setup in chosen if setup.needs and is_missing(setup.needs)}
    names = [setup.name for setup in chosen if setup.name not in missing]
    if not names:
        parser.error(
            f"no set-up can run: {len(chosen)} have a name that matches, {len(missing)} of them lack a package"
        )
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    rows = all_runs(names, methods, seeds, options.jobs)
    if out is not None:
        out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    found = figures(rows)
    summaries = {method: summary(found, method) for method in methods}
    show(found, summaries)
    if "KronALASSO" in summaries:
        show_bars(summaries["KronALASSO"])
    counts = confusion(rows, found)
    show_verdicts(counts)
    for name, package in missing.items():
        print(f"skipped: {name} (pip install '{package}')")
    for name, of in found.items():
        if of[PLAIN]["lost"] < 0.1:
            print(f"shows little: {name}, where plain training forgets only {of[PLAIN]['lost']:.2f}")
    keep("everywhere", options, {"skipped": missing, "summary": summaries, "verdicts": counts, "setups": found})


if __name__ == "__main__":
    main()
