"""Time of a step and lane against the number of lanes, and against what memory alone would allow. Needs a GPU.

    python benchmarks/throughput.py [--lanes 1 2 4 8 16] [--precision tf32] [--method alasso] [--set KEY=VALUE]

The network is the paper's, 784-2000-2000-10 with batches of 256; the images are random, for no step depends on what
they show. Epochs follow one another as in a run, plans and copies to the device included; the first ones, which
compile and record, are not timed.

The floor: every step has to read eight tensors of the size of the weights (θ, both moments of Adam, anchor, stiffness,
ω; and θ again for each product) and the side, a byte a weight, and write four, at the bandwidth that copying reaches
here. VCL has a mean and a log-variance for each weight: of each, five tensors are read, and three and four written, and
mean and variance are read again for each product.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

import numpy as np
import torch
from common import arguments, parsed, report

from alasso.bench.config import RunConfig
from alasso.bench.data import ImageSet
from alasso.bench.streams import Shelf, permuted
from alasso.bench.training import run as train
from alasso.bench.training import trainer as loop

WARM_UP = 4.0  # seconds
FIRST_TIMED = 10  # epoch of the second task
STEPS = 235  # of an epoch of 60,000 images
WEIGHTS = 784 * 2000 + 2000 + 2000 * 2000 + 2000 + 2000 * 10 + 10
BYTES_OF_THE_UPDATE = 4 * (6 + 4) + 1  # θ, m, v, anchor, stiffness, ω and the side read; θ, m, v, ω written
BYTES_OF_THE_PRODUCTS = 4 * 2  # θ read in the forward and in the backward pass
BYTES_OF_THE_UPDATE_OF_GAUSSIANS = 4 * (5 + 3) + 4 * (5 + 4)  # means have a stiffness, log-variances a variance
BYTES_OF_THE_PRODUCTS_OF_GAUSSIANS = 4 * (2 + 2)
FLOPS = 2 * 256 * (3 * WEIGHTS - 784 * 2000)  # twice as many where means and variances have products of their own


def random_images() -> ImageSet:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (60_000, 1, 28, 28), dtype=np.uint8)
    labels = generator.integers(0, 10, 60_000)
    classes = tuple("0123456789")
    return ImageSet("mnist", "random", images, labels, images[:1000], labels[:1000], classes)


def microseconds_a_step(images: ImageSet, lanes: int, precision: str, options: argparse.Namespace) -> float:
    """Median over rounds of so many epochs each."""
    device = train.torch_device(options.device)
    train.set_precision(precision)
    length = {"tasks": 2, "epochs": FIRST_TIMED + options.rounds * options.epochs}
    changes = dict(pair.split("=", 1) for pair in options.set)
    shelf = Shelf(device)
    group = []
    for seed in range(lanes):
        how = {**length, **changes, "seed": seed, "precision": precision}
        config = RunConfig.for_benchmark("permuted-mnist", options.method, **how)
        stream = permuted(images, 2, seed, device=shelf)
        group.append(train.begun(config, stream, None, device, None, None, train.Quiet()))
    with train.few_threads_for(group[0].learner):  # as in a run
        return timed_rounds(loop.Trainer(group, 1e9, lambda: False), options.epochs, options.rounds)


def timed_rounds(trainer: loop.Trainer, epochs: int, rounds: int) -> float:
    for t in (0, 1):  # a second task, so that there is a past to be protected
        for lane in trainer.lanes:
            lane.learner.begin_task(t)
            lane.learner.prepare(t)
        trainer.steps.begin(t)
        trainer.train_epoch(t, 0)
        if t == 0:
            for lane in trainer.lanes:
                lane.learner.end_task(t)
    started, epoch = time.perf_counter(), 1
    while time.perf_counter() - started < WARM_UP:  # the compiler's helpers are still leaving
        trainer.train_epoch(1, epoch := epoch % (FIRST_TIMED - 2) + 1)
        torch.cuda.synchronize()
    times = []
    for number in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for epoch in range(epochs):
            trainer.train_epoch(1, FIRST_TIMED + number * epochs + epoch)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) / (epochs * STEPS) * 1e6)
    return statistics.median(times)


def bytes_of_a_step(gaussian: bool) -> int:
    """For each weight."""
    if gaussian:
        return BYTES_OF_THE_UPDATE_OF_GAUSSIANS + BYTES_OF_THE_PRODUCTS_OF_GAUSSIANS
    return BYTES_OF_THE_UPDATE + BYTES_OF_THE_PRODUCTS


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of copying a gigabyte on the device."""
    source = torch.empty(2**28, device="cuda")
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(20):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(10):
            target.copy_(source)
        torch.cuda.synchronize()
        best = max(best, 10 * 2 * source.nbytes / (time.perf_counter() - started))
    return best


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], rounds=3)
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--precision", nargs="+", default=["tf32"], choices=["tf32", "float32", "bf16"])
    parser.add_argument("--method", default="alasso")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the method")
    parser.add_argument("--epochs", type=int, default=4, help="epochs in a round")
    options = parsed(parser)
    if not (torch.cuda.is_available() and options.device.startswith("cuda")):
        parser.error("this is a benchmark of GPUs" if torch.cuda.is_available() else "torch sees no GPU here")
    torch.cuda.set_device(torch.device(options.device).index or 0)

    bandwidth = copy_bandwidth()
    gaussian = options.method.startswith("vcl")
    floor = WEIGHTS * bytes_of_a_step(gaussian) / bandwidth * 1e6
    flops = 2 * FLOPS if gaussian else FLOPS
    images = random_images()
    found = []
    for precision, lanes in itertools.product(options.precision, options.lanes):
        step = microseconds_a_step(images, lanes, precision, options)
        found.append({"precision": precision, "lanes": lanes, "step": step, "lane_step": step / lanes})
        print(f"{precision}, {lanes} lanes: {step / lanes:.1f} µs a lane and step", flush=True)
    report(
        f"throughput-{options.method}",
        f"784-2000-2000-10, batch 256, {options.method}: µs",
        ["products", "lanes", "step", "a lane and step", "floor", "times the floor"],
        [shown(row, floor) for row in found],
        {"copy_bandwidth": bandwidth, "floor": floor, "flops": flops, "rows": found},
        [f"copying: {bandwidth / 1e12:.2f} TB/s; arithmetic of a step: {flops / 1e9:.1f} GFLOP"],
        options,
    )


def shown(row: dict[str, Any], floor: float) -> list[str]:
    step, lane_step = row["step"], row["lane_step"]
    return [
        row["precision"],
        str(row["lanes"]),
        f"{step:.0f}",
        f"{lane_step:.1f}",
        f"{floor:.1f}",
        f"{lane_step / floor:.2f}",
    ]


if __name__ == "__main__":
    main()
