"""What the callbacks add to a step under Lightning and under Hugging Face's Trainer, on a model of 5 million weights.

python benchmarks/integrations_overhead.py [--rounds 60 --threads 1 --out FILE.json]

All four trainings go on at the same time, each in a thread of its own that waits in its data loader for its turn. In a
round every training makes a few steps, in random order; a ratio is one of times within the same round.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from alasso import ALASSO
from alasso.bench.results import environment

SIZES = (784, 2000, 1700, 10)
BATCH = 256


class Turns(IterableDataset[Any]):
    """Batches without end, given out only when it is this training's turn; measures the time between two of them."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.granted, self.waiting = threading.Semaphore(0), threading.Semaphore(0)
        self.left = 0
        self.over = False
        self.times: list[float] = []

    def __iter__(self) -> Iterator[Any]:
        started = None
        while True:
            if started is not None:
                self.times.append(time.perf_counter() - started)
            if self.left == 0:
                self.waiting.release()
                self.granted.acquire()
            if self.over:
                return
            self.left -= 1
            started = time.perf_counter()
            yield self.batch

    def take(self, steps: int) -> list[float]:
        """Let the training make so many steps, and return how long each took."""
        self.times.clear()
        self.left = steps
        self.granted.release()
        self.waiting.acquire()
        return list(self.times)

    def end(self) -> None:
        self.over = True
        self.granted.release()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        a, b, c, d = SIZES
        self.layers = nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c), nn.ReLU(), nn.Linear(c, d))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}


def protected(model: nn.Module, batch: dict[str, Tensor]) -> ALASSO:
    """A regularizer that has one task behind it, so that every step pays a penalty and observes a path."""
    optimizer = torch.optim.Adam(model.parameters())
    with ALASSO(model).attach(optimizer) as reg:
        model(**batch)["loss"].backward()
        optimizer.step()
        reg.consolidate()
    optimizer.zero_grad()
    assert isinstance(reg, ALASSO)
    return reg


def lightning_training(turns: Turns, protect: bool) -> Callable[[], None]:
    import lightning.pytorch as pl

    from alasso.integrations.lightning import AlassoCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), fused=True)

    module = Module()
    callbacks: list[Any] = [AlassoCallback(protected(module.net, turns.batch))] if protect else []
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=callbacks, enable_model_summary=False, **quiet)
    return lambda: trainer.fit(module, torch.utils.data.DataLoader(turns, batch_size=None))


def trainer_training(turns: Turns, protect: bool) -> Callable[[], None]:
    from transformers import Trainer, TrainingArguments

    from alasso.integrations.huggingface import AlassoCallback

    class WholeBatches(Trainer):
        def get_train_dataloader(self) -> Any:
            return turns

    model = Net()
    callbacks: list[Any] = [AlassoCallback(protected(model, turns.batch))] if protect else []
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
    # The optimizer is the trainer's default, a fused AdamW.
    arguments = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, max_steps=10**9, max_grad_norm=0.0, **quiet)
    return WholeBatches(model, arguments, callbacks=callbacks).train


TRAININGS = {"Lightning": lightning_training, "Trainer": trainer_training}


def interleaved(rounds: int, steps: int) -> dict[tuple[str, bool], list[float]]:
    """Seconds a step of every training, with and without the callback, one value a round."""
    generator = torch.Generator().manual_seed(1)
    batch = {
        "x": torch.rand(BATCH, SIZES[0], generator=generator),
        "labels": torch.randint(0, SIZES[-1], (BATCH,), generator=generator),
    }
    turns = {(name, protect): Turns(batch) for name in TRAININGS for protect in (False, True)}
    threads = [
        threading.Thread(target=TRAININGS[name](own, protect), daemon=True) for (name, protect), own in turns.items()
    ]
    for thread, own in zip(threads, turns.values(), strict=True):
        thread.start()
        own.waiting.acquire()
        own.take(5)  # compiles, allocates, prefetches
    times: dict[tuple[str, bool], list[float]] = {case: [] for case in turns}
    order, chance = list(turns), random.Random(0)
    for _ in range(rounds):
        chance.shuffle(order)
        for case in order:
            # A trainer that looks one batch ahead has its first step cut in two by the wait.
            times[case].append(statistics.mean(turns[case].take(steps + 1)[1:]))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=2, help="timed steps in a turn")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; all cores if not given")
    parser.add_argument("--out", type=Path, default=None, help="a JSON file for the outcome")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    times = interleaved(options.rounds, options.steps)
    outcome: dict[str, Any] = {}
    for name in TRAININGS:
        ratios = [mine / plain for mine, plain in zip(times[name, True], times[name, False], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        plain, mine = (round(1e3 * statistics.median(times[name, protect]), 3) for protect in (False, True))
        outcome[name] = {"milliseconds": [plain, mine], "ratio": {"median": middle, "low": low, "high": high}}
        print(f"{name:10} {plain:8.2f} ms plain {mine:8.2f} ms with   ratio {middle:.3f} ({low:.3f} – {high:.3f})")
    if options.out:
        weights = sum(p.numel() for p in Net().parameters())
        settings = {"rounds": options.rounds, "steps": options.steps, "threads": torch.get_num_threads()}
        record = {"weights": weights, "batch": BATCH, **settings, "environment": environment("cpu"), "steps": outcome}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
