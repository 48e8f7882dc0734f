"""What the callbacks add to a step under Lightning and under Hugging Face's Trainer, on a model of 5 million weights.

    python perf/integrations.py [--rounds 60 --threads 1 --record]

All four trainings run at the same time, each in a thread that waits in its data loader for its turn. In a round every
training takes a few steps, in random order; a ratio compares times of the same round.
"""

from __future__ import annotations

import logging
import random
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _measure import BATCH, Times, arguments, keep, milliseconds, parsed, random_batch, ratio, spread, table
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from alasso import ALASSO

SIZES = (784, 2000, 1700, 10)


class Turns(IterableDataset[Any]):
    """Batches without end, given out only when it is this training's turn; measures the time between two of them."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.granted, self.waiting = threading.Semaphore(0), threading.Semaphore(0)
        self.left = 0
        self.times: list[float] = []

    def __iter__(self) -> Iterator[Any]:
        started = None
        while True:
            if started is not None:
                self.times.append(time.perf_counter() - started)
            if self.left == 0:
                self.waiting.release()
                self.granted.acquire()
            self.left -= 1
            started = time.perf_counter()
            yield self.batch

    def take(self, steps: int) -> list[float]:
        """Lets the training take so many steps, and returns how long each took."""
        self.times.clear()
        self.left = steps
        self.granted.release()
        self.waiting.acquire()
        return list(self.times)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        a, b, c, d = SIZES
        self.layers = nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c), nn.ReLU(), nn.Linear(c, d))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}


def protected(model: nn.Module, batch: dict[str, Tensor]) -> ALASSO:
    """A regularizer with one task behind it, so that every step pays a penalty and observes a path."""
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


def interleaved(rounds: int, steps: int) -> Times:
    """Seconds a step of every training, with and without the callback, one value a round."""
    x, labels = random_batch(SIZES, BATCH, "cpu")
    batch = {"x": x, "labels": labels}
    turns: dict[str, Turns] = {}
    for name, training in TRAININGS.items():
        for protect in (False, True):
            own = turns[case(name, protect)] = Turns(batch)
            threading.Thread(target=training(own, protect), daemon=True).start()
            own.waiting.acquire()
            own.take(5)  # compiles, allocates, prefetches
    times: Times = {name: [] for name in turns}
    order, chance = list(turns), random.Random(0)
    for _ in range(rounds):
        chance.shuffle(order)
        for name in order:
            # A trainer that looks one batch ahead has its first step cut in two by the wait.
            times[name].append(statistics.mean(turns[name].take(steps + 1)[1:]))
    return times


def case(name: str, protect: bool) -> str:
    return f"{name} with the callback" if protect else name


def main() -> None:
    parser = arguments(__doc__.partition("\n")[0], rounds=60)
    parser.add_argument("--steps", type=int, default=2, help="timed steps in a turn")
    options = parsed(parser)
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    times = interleaved(options.rounds, options.steps)
    found = {
        name: {
            "milliseconds": [milliseconds(times, name), milliseconds(times, case(name, True))],
            "ratio": ratio(times, case(name, True), name),
        }
        for name in TRAININGS
    }
    rows = [[name, *(f"{ms:.2f}" for ms in of["milliseconds"]), spread(of["ratio"])] for name, of in found.items()]
    table("A step", ["trainer", "ms plain", "ms with the callback", "ratio (quartiles)"], rows)
    options.device = "cpu"
    keep("integrations", options, {"steps": found})


if __name__ == "__main__":
    main()
