"""What ALASSO adds to a training step: ratios to plain Adam, milliseconds on a small network, the first step's stall.

    python perf/step.py [--device cpu --threads 2 --rounds 30 --record]

The large network is the paper's, 784-2000-2000-10 with batches of 256 (5.6 million weights), the small one has 50,095
weights. Every protected network has one task behind it, so that each step pays the penalty. The bars are for a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from _measure import (
    BATCH,
    SIZES,
    Step,
    arguments,
    extra,
    interleaved,
    keep,
    milliseconds,
    network,
    parsed,
    random_batch,
    ratio,
    spread,
    table,
    training_step,
)
from torch import nn

import alasso
from alasso.regularizer import CHECK_EVERY

SMALL = (784, 63, 10)  # 50,095 weights
DEFAULT, FUSED = "default Adam", "fused Adam"
HOOKS_ON_FUSED, HOOKS_ON_DEFAULT = "fused Adam + attach()", "default Adam + attach()"
COMPILED, OWN = "attach(compile=True)", "alasso.optim.Adam"
BARS = {  # largest ratio to fused Adam, and to default Adam
    HOOKS_ON_FUSED: {FUSED: 1.25, DEFAULT: 1.10},
    HOOKS_ON_DEFAULT: {DEFAULT: 1.10},
    COMPILED: {FUSED: 1.10},
    OWN: {FUSED: 1.08},
}
SMALL_BAR = 0.15  # milliseconds that hooks add to a step
FIRST_BAR = 50.0  # milliseconds that hooks add to the first step
FIRST_REPEATS = 3
CHECK_BAR = 0.01  # of a step with hooks that looking for NaN costs, spread over the steps between two looks

Make = Callable[[nn.Module], tuple[torch.optim.Optimizer, alasso.ALASSO | None]]


def adam(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-4, **settings)


def hooked(model: nn.Module, fused: bool, **settings: Any) -> tuple[torch.optim.Optimizer, alasso.ALASSO]:
    reg, optimizer = alasso.ALASSO(model), adam(model, fused=fused)
    reg.attach(optimizer, **settings)
    return optimizer, reg


def own(model: nn.Module) -> tuple[torch.optim.Optimizer, alasso.ALASSO]:
    reg = alasso.ALASSO(model)
    return alasso.optim.Adam(model.parameters(), lr=1e-4, regularizer=reg), reg


CASES: dict[str, Make] = {
    DEFAULT: lambda model: (adam(model), None),
    FUSED: lambda model: (adam(model, fused=True), None),
    HOOKS_ON_FUSED: lambda model: hooked(model, True),
    HOOKS_ON_DEFAULT: lambda model: hooked(model, False),
    COMPILED: lambda model: hooked(model, True, compile=True),
    OWN: own,
}


def prepared(make: Make, sizes: tuple[int, ...], device: str) -> Step:
    """A training step with one task behind; whatever is compiled, is compiled by now."""
    model = network(*sizes, device=device)
    optimizer, reg = make(model)
    step = training_step(model, optimizer, *random_batch(sizes, BATCH, device))
    step()
    if reg is not None:
        reg.consolidate()
    for _ in range(2):
        step()
    return step


def all_prepared(names: list[str], sizes: tuple[int, ...], device: str) -> dict[str, Step]:
    """The steps by name; a case that this version of alasso does not have is left out, and said."""
    steps = {}
    for name in names:
        try:
            steps[name] = prepared(CASES[name], sizes, device)
        except TypeError as error:
            print(f"{name} is left out: {error}")
    return steps


def large(options: argparse.Namespace) -> dict[str, Any]:
    steps = all_prepared(list(CASES), SIZES, options.device)
    times = interleaved(steps, options.rounds, options.device)
    rows, found = [], {}
    for name in steps:
        to = {base: ratio(times, name, base) for base in (FUSED, DEFAULT)}
        found[name] = {"milliseconds": milliseconds(times, name), "ratio to": to}
        bars = {base: (to[base]["median"], bar) for base, bar in BARS.get(name, {}).items()}
        bar = ", ".join(f"{kind(base)} {verdict(value, most)}" for base, (value, most) in bars.items())
        rows.append([name, f"{found[name]['milliseconds']:.2f}", *(spread(of) for of in to.values()), bar])
    title = f"A step of {'-'.join(map(str, SIZES))}, batch {BATCH}, {options.device}, {options.rounds} rounds"
    table(title, ["step", "ms", f"÷ {FUSED} (quartiles)", f"÷ {DEFAULT} (quartiles)", "bars"], rows)
    return found


def small(options: argparse.Namespace) -> dict[str, Any]:
    pairs = {HOOKS_ON_FUSED: FUSED, HOOKS_ON_DEFAULT: DEFAULT}
    steps = all_prepared([*pairs.values(), *pairs], SMALL, options.device)
    times = interleaved(steps, 2 * options.rounds, options.device, untimed=3, timed=20)
    found = {name: extra(times, name, base) for name, base in pairs.items()}
    rows = [
        [name, f"{milliseconds(times, name):.3f}", spread(of), verdict(of["median"], SMALL_BAR)]
        for name, of in found.items()
    ]
    table("A step of 50,095 weights", ["step", "ms", "ms more than without hooks (quartiles)", "bar"], rows)
    return found


def check(options: argparse.Namespace) -> dict[str, Any]:
    """What a look for NaN costs, as a share of a step: it is taken every ``CHECK_EVERY`` steps."""
    found, rows = {}, []
    for name, sizes in (("large", SIZES), ("small", SMALL)):
        model = network(*sizes, device=options.device)
        optimizer, reg = hooked(model, True)
        step = training_step(model, optimizer, *random_batch(sizes, BATCH, options.device))
        step()
        reg.consolidate()
        step()
        cases = {"step": step, "look": lambda reg=reg: reg.protected.check_finite(1)}
        times = interleaved(cases, options.rounds, options.device, untimed=1, timed=3)
        share = {key: value / CHECK_EVERY for key, value in ratio(times, "look", "step").items()}
        found[name] = {"milliseconds": milliseconds(times, "look"), "share of a step": share}
        bar = verdict(share["median"], CHECK_BAR)
        rows.append([name, f"{found[name]['milliseconds']:.3f}", f"{share['median']:.5f}", bar])
    table(f"A look for NaN, every {CHECK_EVERY} steps", ["network", "ms", "share of a step", "bar"], rows)
    return found


def first_step(name: str, device: str) -> float:
    """Milliseconds of the longer of the first step and the first one with a penalty; the optimizer's part alone."""
    model = network(*SIZES, device=device)
    warm_up = adam(network(*SIZES, device=device), fused="fused" in name)  # what torch itself does once a process
    longest = 0.0
    optimizer, reg = CASES[name](model)
    for stepping in (warm_up, optimizer, optimizer):
        for parameter in [p for group in stepping.param_groups for p in group["params"]]:
            parameter.grad = torch.full_like(parameter, 1e-3)
        start = time.perf_counter()
        stepping.step()
        if stepping is not warm_up:
            longest = max(longest, 1e3 * (time.perf_counter() - start))
            if reg is not None and reg.tasks == 0:
                reg.consolidate()
    return longest


def first(options: argparse.Namespace) -> dict[str, Any]:
    """In a fresh process each time, for what is compiled or imported once would hide in a second one."""
    pairs = {HOOKS_ON_FUSED: FUSED, HOOKS_ON_DEFAULT: DEFAULT}
    threads = [] if options.threads is None else ["--threads", str(options.threads)]

    def alone(name: str) -> float:
        command = [sys.executable, __file__, "--first-step", name, "--device", options.device, *threads]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    names = [*pairs, *pairs.values()]
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(FIRST_REPEATS):
        for name in names:
            times[name].append(alone(name))
    median = {name: round(statistics.median(of), 2) for name, of in times.items()}
    found = {
        name: {"milliseconds": median[name], "more": round(median[name] - median[base], 2)}
        for name, base in pairs.items()
    }
    rows = [
        [name, f"{of['milliseconds']:.1f}", f"{of['more']:.1f}", verdict(of["more"], FIRST_BAR)]
        for name, of in found.items()
    ]
    table(
        "The first step in a new process, the optimizer's part",
        ["step", "ms", "ms more than without hooks", "bar"],
        rows,
    )
    return found


def kind(base: str) -> str:
    return base.partition(" ")[0]


def verdict(value: float, bar: float) -> str:
    return f"{'ok' if value <= bar else 'MISSED'} (≤ {bar:g})"


def main() -> None:
    parser = arguments(__doc__.partition("\n")[0], rounds=30)
    parser.add_argument("--first-step", choices=list(CASES), help=argparse.SUPPRESS)
    options = parsed(parser)
    if options.first_step:
        print(first_step(options.first_step, options.device))
        return
    found = {
        "step": large(options),
        "small": small(options),
        "check": check(options),
        "first step": first(options),
    }
    keep("step", options, found)


if __name__ == "__main__":
    main()
