"""A stream without tasks: does attach(optimizer, every=N) keep what the stream has left behind?

    python perf/drift.py [--seeds 0,1,2,3,4 --every 200 --gamma 1,0.8 --methods KronALASSO,SI --record --figure FOLDER]

The pixels of the digits drift: every 25 steps two of them, drawn at random, change places, until nothing is where it
was. Every 250 steps the network is tested on the pixels' order of now and of each such moment before.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _measure import arguments, keep, parsed, table
from _setups import digits, divided, mlp
from torch import Tensor
from torch.nn import functional as F

import alasso
from alasso.bench.report.figures import save
from alasso.bench.report.style import Line, draw_lines, look_of, new_figure, style, titled

STEPS, BATCH, SWAP_EVERY, TEST_EVERY = 4000, 64, 25, 250
LOOKS = {"plain": "sgd", "SI": "si", "ALASSO": "alasso", "KronALASSO": "kron-alasso"}


def orders(seed: int) -> list[Tensor]:
    """The pixels' order after each swap."""
    generator = torch.Generator().manual_seed(1000 + seed)
    found = [torch.arange(64)]
    for _ in range(STEPS // SWAP_EVERY):
        swapped = torch.randperm(64, generator=generator)[:2]
        order = found[-1].clone()
        order[swapped] = order[swapped.flip(0)]
        found.append(order)
    return found


def accuracies(method: str, every: int, gamma: float, seed: int) -> list[list[float]]:
    """Learns the stream; returns the accuracies at each moment, on the order of each moment so far."""
    torch.manual_seed(seed)
    task, drift, model = divided(*digits(), seed), orders(seed), mlp(64, 256, 256, 10)
    optimizer = torch.optim.Adam(model.parameters())
    if method != "plain":
        settings = {} if gamma == 1 else {"gamma": gamma}
        getattr(alasso, method)(model, **settings).attach(optimizer, every=every)
    moments: list[Tensor] = []
    rows: list[list[float]] = []
    for step in range(STEPS):
        order = drift[step // SWAP_EVERY]
        chosen = torch.randint(len(task.x), (BATCH,))
        optimizer.zero_grad()
        F.cross_entropy(model(task.x[chosen][:, order]), task.y[chosen]).backward()
        optimizer.step()
        if (step + 1) % TEST_EVERY == 0:
            moments.append(order)
            with torch.no_grad():
                right = [(model(task.test_x[:, one]).argmax(1) == task.test_y).float().mean() for one in moments]
            rows.append([float(one) for one in right])
    return rows


@style()
def draw(found: dict[str, list[list[float]]], every: int, folder: Path) -> list[Path]:
    """Draws the mean accuracy over all moments so far, by steps."""
    figure, (axes,) = new_figure()
    x = np.arange(1, STEPS // TEST_EVERY + 1) * TEST_EVERY
    lines, seen = [], dict.fromkeys(LOOKS, 0)
    for label, curves in found.items():
        method, values = label.partition(",")[0], np.array(curves)
        deviation = values.std(0, ddof=1) if len(values) > 1 else 0 * values[0]
        look = look_of(LOOKS[method], place=seen[method], of=3)
        lines.append(Line(label, x, values.mean(0), deviation, look))
        seen[method] += 1
    draw_lines(axes, lines)
    axes.set(xlabel="steps", ylabel="mean accuracy on all pixel orders so far")
    note = f"attach(optimizer, every={every}); mean ± deviation over {len(curves)} seeds"
    titled(axes, "Digits whose pixels drift", note)
    return save(figure, folder, "drift", ("svg",))


def main() -> None:
    parser = arguments(__doc__.partition("\n")[0], rounds=1)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--every", type=int, default=200)
    parser.add_argument("--gamma", default="1", help="values of γ, for KronALASSO")
    parser.add_argument("--methods", default=",".join(LOOKS))
    parser.add_argument("--figure", type=Path, help="folder to draw into")
    options = parsed(parser)
    seeds, methods = [int(seed) for seed in options.seeds.split(",")], options.methods.split(",")
    gammas = [float(gamma) for gamma in options.gamma.split(",")]
    cases = [(method, gamma) for method in methods for gamma in (gammas if method == "KronALASSO" else [1.0])]
    found: dict[str, list[list[float]]] = {}
    shown: list[Sequence[str]] = []
    kept: dict[str, Any] = {}
    for method, gamma in cases:
        label = method if gamma == 1 else f"{method}, γ = {gamma:g}"
        runs = [accuracies(method, options.every, gamma, seed) for seed in seeds]
        found[label] = [[statistics.mean(row) for row in run] for run in runs]
        figures = {
            "all": [curve[-1] for curve in found[label]],
            "first": [run[-1][0] for run in runs],
            "now": [run[-1][-1] for run in runs],
        }
        kept[label] = {name: round(statistics.mean(values), 4) for name, values in figures.items()}
        deviation = statistics.stdev(figures["all"]) if len(seeds) > 1 else 0.0
        shown.append([label, *(f"{value:.3f}" for value in kept[label].values()), f"{deviation:.3f}"])
        print(shown[-1], flush=True)
    columns = ["method", "all orders so far", "the first", "the last", "±, of all"]
    table(f"Accuracy after {STEPS} steps, every={options.every}", columns, shown)
    if options.figure:
        print(*draw(found, options.every, options.figure))
    options.figure = str(options.figure)
    keep("drift", options, kept)


if __name__ == "__main__":
    main()
