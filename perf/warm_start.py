"""warm_start(loader) on pretrained models: how much forgetting it prevents, beside a method that watched the training.

    python perf/warm_start.py [--seeds 0 --jobs 2 --only MLP --record --out FILE]

A model learns the first task of a set-up plainly (see _setups.py). A method then measures on 400 of its samples, by the
Fisher or by MAS, what to keep, and the model learns the second task with a new optimizer. The scale is "auto".
"""

from __future__ import annotations

import copy
import re
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from _measure import arguments, keep, parsed, table
from _setups import SETUPS, SetUp, Task
from everywhere import METHODS, accuracy, attach, loss_of_each, train
from torch import nn

import alasso

CHOSEN = (
    "MLP, Adam",
    "deep MLP, AdamW",
    "MLP, SGD 0.1, momentum",
    "CNN with GroupNorm, AdamW",
    "GRU, Adam, clipped",
    "transformer encoder, AdamW, cosine",
    "GPT, AdamW",
    "graph network, Adam",
)
KINDS = ("ALASSO", "SI", "KronALASSO")
WAYS = ("watched", "fisher", "mas")
SAMPLES, BATCH = 400, 100


def learn(setup: SetUp, model: nn.Module, reg: alasso.Regularizer | None, task: Task, seed: int) -> None:
    """Trains on a task with a new optimizer."""
    optimizers = setup.optimizers(model)
    attach(reg, optimizers)
    torch.manual_seed(seed)
    train(setup, model, None, optimizers, task)


def outcomes(name: str, seed: int) -> dict[str, tuple[float, float]]:
    """Returns the share of the forgetting that each method prevents, and what the second task pays for it."""
    torch.set_num_threads(1)
    setup = next(one for one in SETUPS if one.name == name)
    torch.manual_seed(seed)
    first, second = setup.tasks(seed)
    fresh = setup.model()
    start = copy.deepcopy(fresh)
    learn(setup, start, None, first, seed)
    plain = copy.deepcopy(start)
    learn(setup, plain, None, second, seed)
    before, after = accuracy(start, first), accuracy(plain, first)
    batches = list(zip(first.x[:SAMPLES].split(BATCH), first.y[:SAMPLES].split(BATCH), strict=True))
    found = {}
    for kind in KINDS:
        for way in WAYS:
            model = copy.deepcopy(fresh if way == "watched" else start)
            reg = METHODS[kind](model)
            if way == "watched":
                learn(setup, model, reg, first, seed)
                reg.consolidate()
                reg.detach()
            elif way == "fisher":
                reg.warm_start(batches, head=first.head, loss=loss_of_each if first.y.dim() > 1 else None)
            else:
                reg.warm_start(batches, "mas", head=first.head)
            learn(setup, model, reg, second, seed)
            share = (accuracy(model, first) - after) / (before - after)
            found[f"{kind}, {way}"] = min(1.0, share), accuracy(plain, second) - accuracy(model, second)
    return found


def means(of_seeds: Sequence[dict[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """Returns the means over the seeds."""
    return {
        case: (statistics.mean(one[case][0] for one in of_seeds), statistics.mean(one[case][1] for one in of_seeds))
        for case in of_seeds[0]
    }


def main() -> None:
    parser = arguments(__doc__.partition("\n")[0], rounds=1)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default=".", help="set-ups whose names match")
    options = parsed(parser)
    names = [name for name in CHOSEN if re.search(options.only, name)]
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        runs = {name: [pool.submit(outcomes, name, int(s)) for s in options.seeds.split(",")] for name in names}
        found = {name: means([one.result() for one in of]) for name, of in runs.items()}
    for kind in KINDS:
        rows = [[name, *("{:.2f} {:+.3f}".format(*found[name][f"{kind}, {way}"]) for way in WAYS)] for name in names]
        table(f"{kind}: share of the forgetting prevented, and the price on task 2", ["set-up", *WAYS], rows)
        for way in WAYS:
            shares, prices = zip(*(found[name][f"{kind}, {way}"] for name in names), strict=True)
            half = sum(share >= 0.5 and price < 0.1 for share, price in zip(shares, prices, strict=True))
            mean = f"share {statistics.mean(shares):.2f}, price {statistics.mean(prices):.3f}"
            print(f"{kind}, {way}: {mean}; half of it below a price of 0.1 in {half} of {len(names)}")
    keep("warm_start", options, {n: {c: [round(v, 4) for v in of] for c, of in f.items()} for n, f in found.items()})


if __name__ == "__main__":
    main()
