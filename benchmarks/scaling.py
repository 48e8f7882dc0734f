"""Cost of a step and of consolidation against the number of tasks behind and of weights; both should be flat.

    python benchmarks/scaling.py [--device cpu --threads 2 --rounds 40 --largest 1e8]

Only the optimizer's step is timed, not the forward and backward pass, in which a small change would be lost. Where in
memory the tensors of a case lie makes a difference of up to a tenth, as long as they lie there: against tasks, all
cases are laid out anew every few rounds, in random order.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import random
import statistics
from collections.abc import Callable
from typing import Any

import torch
from common import Step, Times, arguments, interleaved, parsed, ratio, report
from torch import nn

import alasso
from alasso.regularizer import Regularizer

METHODS: dict[str, Callable[[nn.Module], Regularizer]] = {"ALASSO": alasso.ALASSO, "EWC": alasso.EWC}
SIDE = 800  # of the square layer whose cost is measured against tasks
CONSOLIDATIONS = 5
ROUNDS_IN_PLACE = 5


class Case:
    """A square linear layer with gradients in place, its optimizer, and a regularizer with tasks behind."""

    def __init__(self, method: str | None, side: int, tasks: int, device: str, **options: Any) -> None:
        self.model = nn.Linear(side, side, bias=False, device=device)
        self.model.weight.grad = 1e-3 * torch.randn(side, side, device=device)
        self.importance = {"weight": torch.rand(side, side, device=device)} if method == "EWC" else {}
        self.reg = METHODS[method](self.model) if method else None
        self.optimizer = alasso.optim.Adam(self.model.parameters(), lr=1e-5, regularizer=self.reg, **options)
        for _ in range(tasks if method else 0):
            self.step()
            self.consolidate()
        self.step()

    def step(self) -> None:
        self.optimizer.step()

    def consolidate(self) -> None:
        """The end of a task without the pass over its data that EWC makes, which has no past."""
        assert self.reg is not None
        with torch.no_grad():
            self.reg._consolidate(self.importance)

    def state(self) -> dict[str, Any]:
        """Copied, and so elsewhere."""
        assert self.reg is not None
        parts = {"model": self.model, "optimizer": self.optimizer, "regularizer": self.reg}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})

    def load(self, state: dict[str, Any]) -> None:
        assert self.reg is not None
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.reg.load_state_dict(state["regularizer"])


def moved(method: str, cases: dict[str, Case], options: argparse.Namespace) -> dict[str, Case]:
    """The same cases in other places, with other gradients: under one that stays the same forever Adam's first moment
    dwindles, wherever a spring holds against it, to numbers that a CPU is slow with.
    """
    names = list(cases)
    order = random.sample(names, len(names))
    states = {name: cases[name].state() for name in order}
    cases.clear()
    found = {name: Case(method, SIDE, 0, options.device, compile=True) for name in order}
    for name in order:
        found[name].load(states[name])
    return {name: found[name] for name in names}


def against_tasks(options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for method in METHODS:
        counts = [10**k for k in range(round(math.log10(options.most_tasks)) + 1)]
        cases = {str(tasks): Case(method, SIDE, tasks, options.device, compile=True) for tasks in counts}
        steps: Times = {name: [] for name in cases}
        ends: Times = {name: [] for name in cases}
        for _ in range(-(-options.rounds // ROUNDS_IN_PLACE)):
            cases = moved(method, cases, options)
            add(steps, timed({name: case.step for name, case in cases.items()}, options, ROUNDS_IN_PLACE))
        for _ in range(CONSOLIDATIONS):
            cases = moved(method, cases, options)
            add(ends, timed({name: case.consolidate for name, case in cases.items()}, options, 1))
        for name in steps:
            found[f"{method}, {name} tasks behind"] = {
                "step, nanoseconds a weight": per_weight(steps[name], SIDE**2),
                "step, ratio to one task": ratio(steps, name, "1"),
                "consolidation, nanoseconds a weight": per_weight(ends[name], SIDE**2),
                "consolidation, ratio to one task": ratio(ends, name, "1"),
            }
    return found


def against_weights(options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for method in METHODS:
        for exponent in range(5, round(math.log10(options.largest)) + 1):
            side = round(10 ** (exponent / 2))
            rounds = min(options.rounds, max(4, 4 * 10**8 // side**2))
            empty = live_bytes()
            plain = Case(None, side, 0, options.device)
            own = live_bytes() - empty
            protected = Case(method, side, 1, options.device)
            extra = live_bytes() - empty - 2 * own - sum(t.nbytes for t in protected.importance.values())
            times = timed({"plain": plain.step, "protected": protected.step}, options, rounds)
            ends = timed({"end": protected.consolidate}, options, CONSOLIDATIONS)
            found[f"{method}, {side**2:,} weights"] = {
                "step, nanoseconds a weight": per_weight(times["protected"], side**2),
                "step, ratio to the optimizer alone": ratio(times, "protected", "plain"),
                "consolidation, nanoseconds a weight": per_weight(ends["end"], side**2),
                "extra bytes a weight": round(extra / side**2, 2),
            }
            del plain, protected
            gc.collect()
    return found


def add(times: Times, more: Times) -> None:
    for name in times:
        times[name] += more[name]


def timed(steps: dict[str, Step], options: argparse.Namespace, rounds: int) -> Times:
    return interleaved(steps, rounds, options.device, timed=1)


def per_weight(times: list[float], weights: int) -> float:
    return round(1e9 * statistics.median(times) / weights, 4)


def live_bytes() -> int:
    """Bytes of all tensors that are alive, each piece of memory counted once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter):  # not those that torch.compile only pretends to have
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None and tensor.layout is torch.strided and tensor.numel():
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def cells(name: str, values: dict[str, Any]) -> list[str]:
    def cell(value: Any) -> str:
        return "{median:.3f} ({low:.3f} – {high:.3f})".format(**value) if isinstance(value, dict) else f"{value:.3f}"

    by_start = {key.partition(",")[0] + (" ÷" if "ratio" in key else ""): cell(value) for key, value in values.items()}
    columns = ("step", "step ÷", "consolidation", "consolidation ÷", "extra bytes a weight")
    return [name, *(by_start.get(column, "") for column in columns)]


def main() -> None:
    parser = arguments(__doc__.partition("\n")[0], rounds=40)
    parser.add_argument("--most-tasks", type=float, default=1000, help="tasks behind, at the most")
    parser.add_argument("--largest", type=float, default=1e8, help="weights of the largest network")
    options = parsed(parser)
    torch.manual_seed(0)
    random.seed(0)
    record = {"tasks": against_tasks(options), "weights": against_weights(options)}
    rows = [cells(name, values) for part in record.values() for name, values in part.items()]
    columns = ["", "step, ns/weight", "÷ (quartiles)", "end of task, ns/weight", "÷ (quartiles)", "extra bytes/weight"]
    notes = [
        "÷: against tasks, to one task behind; against weights, to alasso.optim.Adam without a regularizer.",
        "The end of a task is without EWC's pass over data, which knows nothing of earlier tasks.",
    ]
    title = f"alasso.optim.Adam on {options.device}: cost against tasks ({SIDE**2:,} weights) and against weights"
    report("scaling", title, columns, rows, record, notes, options)


if __name__ == "__main__":
    main()
