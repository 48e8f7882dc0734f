"""Time of a step and lane against the number of lanes, and against what memory alone would allow. Needs a GPU.

    python benchmarks/throughput.py [--lanes 1 2 4 8 16] [--precision tf32] [--method alasso] [--out FILE]

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
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from alasso.bench import loop, results, train
from alasso.bench.config import RunConfig
from alasso.bench.data import ImageSet
from alasso.bench.streams import Shelf, permuted

WARM_UP = 4.0  # seconds
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


def microseconds_a_step(images: ImageSet, lanes: int, precision: str, method: str, epochs: int, rounds: int) -> float:
    """Median over rounds of so many epochs each."""
    device = train.torch_device("cuda")
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    shelf = Shelf(device)
    group = []
    for seed in range(lanes):
        config = RunConfig.for_benchmark("permuted-mnist", method, tasks=2, seed=seed, precision=precision)
        stream = permuted(images, 2, seed, device=shelf)
        group.append(train.begun(config, stream, None, device, None, None, train.Quiet()))
    trainer = loop.Trainer(group, 1e9, lambda: False)
    for t in (0, 1):  # a second task, so that there is a past to be protected
        for lane in group:
            lane.learner.begin_task(t)
            lane.learner.prepare(t)
        trainer.steps.begin(t)
        trainer.train_epoch(t, 0)
        if t == 0:
            for lane in group:
                lane.learner.end_task(t)
    started, epoch = time.perf_counter(), 1
    while time.perf_counter() - started < WARM_UP:  # the compiler's helpers are still leaving
        trainer.train_epoch(1, epoch := epoch % 8 + 1)
        torch.cuda.synchronize()
    times = []
    for number in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for epoch in range(epochs):
            trainer.train_epoch(1, 1 + number * epochs + epoch)
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--precision", nargs="+", default=["tf32"], choices=["tf32", "float32", "bf16"])
    parser.add_argument("--method", default="alasso")
    parser.add_argument("--epochs", type=int, default=4, help="epochs in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/throughput.json"))
    words = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU here")

    bandwidth = copy_bandwidth()
    gaussian = words.method.startswith("vcl")
    floor = WEIGHTS * bytes_of_a_step(gaussian) / bandwidth * 1e6
    flops = 2 * FLOPS if gaussian else FLOPS
    images = random_images()
    rows = []
    for precision in words.precision:
        for lanes in words.lanes:
            step = microseconds_a_step(images, lanes, precision, words.method, words.epochs, words.rounds)
            rows.append({"precision": precision, "lanes": lanes, "step": step, "lane_step": step / lanes})
            print(f"{precision}, {lanes} lanes: {step / lanes:.1f} µs a lane and step", flush=True)

    table = Table(title=f"784-2000-2000-10, batch 256, {words.method}: µs", title_justify="left")
    for column in ("products", "lanes", "step", "a lane and step", "floor", "times the floor"):
        table.add_column(column, justify="right")
    for row in rows:
        shown = (f"{row['step']:.0f}", f"{row['lane_step']:.1f}", f"{floor:.1f}", f"{row['lane_step'] / floor:.2f}")
        table.add_row(row["precision"], str(row["lanes"]), *shown)
    Console().print(table)
    print(f"copying: {bandwidth / 1e12:.2f} TB/s; arithmetic of a step: {flops / 1e9:.1f} GFLOP")
    words.out.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "benchmark": "throughput",
        "method": words.method,
        "environment": results.environment("cuda"),
        "copy_bandwidth": bandwidth,
        "floor": floor,
        "flops": flops,
        "rows": rows,
    }
    words.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
