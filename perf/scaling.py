"""Cost of a step and of a task's end against the number of tasks behind, and against the number of weights.

    python perf/scaling.py [--device cpu --threads 2 --rounds 40 --largest 1e8 --record]

Both costs should not grow with tasks. Only the optimizer's step is timed, for in a forward and backward pass a small
change would be lost. Where in memory a case lies makes a difference of up to a tenth: against tasks, all cases move
every few rounds.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import statistics
from typing import Any

import torch
from _measure import Times, arguments, interleaved, keep, parsed, ratio, spread, table
from torch import nn

import alasso

METHODS = {"ALASSO": alasso.ALASSO, "EWC": alasso.EWC}
SIDE = 800  # of the square layer whose cost is measured against tasks
ROUNDS_IN_PLACE = 5


class Case:
    """A square linear layer with a gradient in place, Adam, and a regularizer that is attached."""

    def __init__(self, method: str | None, side: int, device: str) -> None:
        self.model = nn.Linear(side, side, bias=False, device=device)
        self.model.weight.grad = 1e-3 * torch.randn(side, side, device=device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5)
        self.reg = METHODS[method](self.model) if method else None
        if self.reg is not None:
            self.reg.attach(self.optimizer)
        one = torch.rand(1, side, device=device)
        self.loader = [(one, torch.zeros(1, dtype=torch.long, device=device))]
        self.step()

    def step(self) -> None:
        self.optimizer.step()

    def end_of_task(self) -> None:
        """A step, for a path method wants to see one, and the end; EWC's data are one sample."""
        self.step()
        assert self.reg is not None
        self.reg.consolidate(self.loader)

    def after(self, tasks: int) -> Case:
        for _ in range(tasks):
            self.end_of_task()
        return self

    def moved(self, method: str, device: str) -> Case:
        """A copy that lies elsewhere, with another gradient."""
        other = Case(method, SIDE, device)
        assert self.reg is not None and other.reg is not None
        for mine, its in ((self.model, other.model), (self.optimizer, other.optimizer), (self.reg, other.reg)):
            its.load_state_dict(copy.deepcopy(mine.state_dict()))
        return other


def against_tasks(options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    counts = [str(10**k) for k in range(round(math.log10(options.most_tasks)) + 1)]
    for method in METHODS:
        cases = {tasks: Case(method, SIDE, options.device).after(int(tasks)) for tasks in counts}
        steps: Times = {tasks: [] for tasks in counts}
        ends: Times = {tasks: [] for tasks in counts}
        for _ in range(-(-options.rounds // ROUNDS_IN_PLACE)):
            cases = {tasks: case.moved(method, options.device) for tasks, case in cases.items()}
            run = interleaved({tasks: case.step for tasks, case in cases.items()}, ROUNDS_IN_PLACE, options.device)
            end = interleaved(
                {tasks: case.end_of_task for tasks, case in cases.items()}, 1, options.device, untimed=0, timed=1
            )
            for tasks in counts:
                steps[tasks] += run[tasks]
                ends[tasks] += end[tasks]
        for tasks in counts:
            found[f"{method}, {tasks} tasks behind"] = {
                "ns a weight": nanoseconds(steps[tasks], SIDE),
                "to one task": ratio(steps, tasks, "1"),
                "end: ns a weight": nanoseconds(ends[tasks], SIDE),
                "end: to one task": ratio(ends, tasks, "1"),
            }
    return found


def against_weights(options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for method in METHODS:
        for exponent in range(5, round(math.log10(options.largest)) + 1):
            side = round(10 ** (exponent / 2))
            rounds = min(options.rounds, max(4, 4 * 10**8 // side**2))
            empty = live_bytes()
            plain = Case(None, side, options.device)
            own = live_bytes() - empty
            ours = Case(method, side, options.device).after(1)
            extra = live_bytes() - empty - 2 * own
            times = interleaved({"plain": plain.step, "ours": ours.step}, rounds, options.device)
            ends = interleaved({"end": ours.end_of_task}, 5, options.device, untimed=0, timed=1)
            found[f"{method}, {side**2:,} weights"] = {
                "ns a weight": nanoseconds(times["ours"], side),
                "to Adam alone": ratio(times, "ours", "plain"),
                "end: ns a weight": nanoseconds(ends["end"], side),
                "extra bytes a weight": round(extra / side**2, 2),
            }
            del plain, ours
    return found


def nanoseconds(times: list[float], side: int) -> float:
    """Median for each weight."""
    return round(1e9 * statistics.median(times) / side**2, 4)


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


def shown(title: str, found: dict[str, Any]) -> None:
    """Prints one part as a table."""
    columns = list(next(iter(found.values())))
    rows = [
        [name, *(spread(of[key]) if isinstance(of[key], dict) else f"{of[key]:.3f}" for key in columns)]
        for name, of in found.items()
    ]
    table(title, ["", *columns], rows)


def main() -> None:
    parser = arguments(__doc__.partition("\n")[0], rounds=40)
    parser.add_argument("--most-tasks", type=float, default=1000, help="tasks behind, at the most")
    parser.add_argument("--largest", type=float, default=1e8, help="weights of the largest network")
    options = parsed(parser)
    torch.manual_seed(0)
    tasks, weights = against_tasks(options), against_weights(options)
    shown(f"A step against tasks behind, {SIDE**2:,} weights; an end takes a step, too", tasks)
    shown("A step against weights", weights)
    keep("scaling", options, {"tasks": tasks, "weights": weights})


if __name__ == "__main__":
    main()
