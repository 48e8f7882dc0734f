"""What a method adds to a training step, as ratios to a plain step in one interleaved run.

python benchmarks/step_overhead.py [--device cpu --threads 2 --rounds 60]     # on a GPU also: --graph
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import avalanche_steps
import torch
from common import Step, arguments, interleaved, network, parsed, ratio, recorded, report, training_step
from torch import Tensor, nn

import alasso
from alasso.regularizer import Regularizer

SIZES = (784, 2000, 2000, 10)
BATCH = 256
DEFAULT, FUSED = "plain Adam", "plain fused Adam"


class OtherAdam(torch.optim.Adam):
    """Adam as somebody else's optimizer: the hooks cannot know what it does and work around its own step."""


def after_tasks(reg: Regularizer, step: Step, batch: tuple[Tensor, Tensor], tasks: int) -> None:
    for _ in range(tasks):
        step()
        reg.consolidate([batch])


def cases(options: argparse.Namespace) -> dict[str, Step]:
    device = options.device
    torch.manual_seed(1)
    x, y = torch.rand(BATCH, SIZES[0], device=device), torch.randint(0, SIZES[-1], (BATCH,), device=device)
    extra: dict[str, Any] = {"capturable": True} if options.graph else {}

    def plain(make: Callable[..., torch.optim.Optimizer], **settings: Any) -> Step:
        model = network(*SIZES, device=device)
        return finished(training_step(model, make(model.parameters(), **settings, **extra), x, y))

    def ours(
        kind: Callable[[nn.Module], Regularizer], make: Callable[..., Any], tasks: int = 1, **settings: Any
    ) -> Step:
        model = network(*SIZES, device=device)
        reg = kind(model)
        optimizer = make(model.parameters(), **settings, **extra)
        reg.attach(optimizer)
        step = training_step(model, optimizer, x, y)
        after_tasks(reg, step, (x, y), tasks)
        return finished(step)

    def finished(step: Step) -> Step:
        return recorded(step) if options.graph else step

    fused, other = {"make": torch.optim.Adam, "fused": True}, {"make": OtherAdam, "fused": True}
    return {
        DEFAULT: plain(torch.optim.Adam),
        FUSED: plain(torch.optim.Adam, fused=True),
        "alasso.optim.Adam, no regularizer": plain(alasso.optim.Adam),
        "ALASSO, alasso.optim.Adam": ours(alasso.ALASSO, alasso.optim.Adam),
        "SI, alasso.optim.Adam": ours(alasso.SI, alasso.optim.Adam),
        "EWC, 9 tasks, alasso.optim.Adam": ours(alasso.EWC, alasso.optim.Adam, tasks=9),
        "ALASSO attached to fused Adam": ours(alasso.ALASSO, **fused),
        "SI attached to fused Adam": ours(alasso.SI, **fused),
        "online EWC attached to fused Adam": ours(alasso.OnlineEWC, **fused),
        "EWC, 9 tasks, attached to fused Adam": ours(alasso.EWC, tasks=9, **fused),
        "MAS attached to fused Adam": ours(alasso.MAS, **fused),
        "ALASSO attached to an unknown optimizer": ours(alasso.ALASSO, **other),
        "MAS attached to an unknown optimizer": ours(alasso.MAS, **other),
    }


def main() -> None:
    parser = arguments(__doc__.partition("\n")[0], rounds=60)
    parser.add_argument("--graph", action="store_true", help="on a GPU: each step recorded as a CUDA graph")
    options = parsed(parser)
    steps = cases(options)
    peers, why_not = ({}, "not with --graph") if options.graph else avalanche_steps.cases(SIZES, BATCH, options.device)
    notes = [f"Avalanche was left out: {why_not}."] if why_not else []
    times = interleaved({**steps, **peers}, options.rounds, options.device)
    rows, results = [], {}
    for name, own in times.items():
        base = {"default": ratio(times, name, DEFAULT), "fused": ratio(times, name, FUSED)}
        results[name] = {"milliseconds": round(1e3 * statistics.median(own), 4), "ratio to": base}
        spread = "{median:.3f} ({low:.3f} – {high:.3f})"
        rows.append([name, f"{1e3 * statistics.median(own):.2f}", *(spread.format(**r) for r in base.values())])
    title = f"A step of {'-'.join(map(str, SIZES))}, batch {BATCH}, on {options.device}, {options.rounds} rounds"
    columns = ["step", "ms", f"÷ {DEFAULT} (quartiles)", f"÷ {FUSED} (quartiles)"]
    name = "step_overhead-graph" if options.graph else "step_overhead"
    report(name, title, columns, rows, {"steps": results}, notes, options)


if __name__ == "__main__":
    main()
