"""How do the SI, EWC and MAS of another library compare: accuracy, time a step, memory?

    pip install 'alasso[bench,avalanche]'
    python perf/peers.py [--seeds 3 --tasks 10 --record]

scikit-learn's digits with their pixels permuted anew for each task; one network, Adam, the same tensors, the same first
weights and the same batches for all. Avalanche's plugins run in its strategy Naive, ours in a plain loop; steps are
measured against plain training of the same library. Every method is run with the default strength of ours and with a
multiple of it, the best on a seed that is not reported. A library that is not there is named, and its rows left out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _measure import keep, table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import alasso

HIDDEN, EPOCHS, BATCH, TEST = 400, 6, 64, 5  # one in TEST digits is for testing
STRENGTHS = (0.01, 0.1, 1.0, 10.0, 100.0)  # times the default of ours
CHOOSING = 1000  # the seed on which a strength is chosen

Data = tuple[Tensor, Tensor]
Batches = list[Data]


@dataclass(frozen=True)
class Found:
    """What one run comes to: accuracy over all tasks, seconds of a step's training, bytes that the method keeps."""

    accuracy: float
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Task:
    """The batches of all epochs, in their order, and what is tested on."""

    epochs: list[Batches]
    test: Data


def stream(tasks: int, seed: int) -> list[Task]:
    """Returns tasks whose pixels stand elsewhere in each, with their batches."""
    digits, draw = load_digits(), torch.Generator().manual_seed(seed)
    x, y = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    tests = torch.arange(len(y)) % TEST == 0
    found = []
    for _ in range(tasks):
        own = x[:, torch.randperm(x.shape[1], generator=draw)]
        train, labels = own[~tests], y[~tests]
        orders = [torch.randperm(len(train), generator=draw) for _ in range(EPOCHS)]
        epochs = [[(train[rows], labels[rows]) for rows in order.split(BATCH)] for order in orders]
        found.append(Task(epochs, (own[tests], y[tests])))
    return found


def network(seed: int) -> nn.Sequential:
    """Returns the network with the first weights of a seed."""
    torch.manual_seed(seed)
    layers = [nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10)]
    return nn.Sequential(*layers)


def accuracy(model: nn.Module, tasks: Iterable[Task]) -> float:
    """Returns the mean over tasks."""
    with torch.no_grad():
        return statistics.fmean((model(x).argmax(1) == y).float().mean().item() for x, y in (t.test for t in tasks))


def bytes_of(kept: Any, but: set[int]) -> int:
    """Returns the bytes of all tensors in an object, except those that are counted already: the model's, say."""
    if id(kept) in but:
        return 0
    but.add(id(kept))
    if isinstance(kept, Tensor):
        return kept.numel() * kept.element_size()
    if isinstance(kept, Mapping):
        return sum(bytes_of(value, but) for value in kept.values())
    if isinstance(kept, list | tuple | set):
        return sum(bytes_of(value, but) for value in kept)
    return bytes_of(vars(kept), but) if hasattr(kept, "__dict__") and not isinstance(kept, type) else 0


# -- ours -------------------------------------------------------------------------------------------------------


def ours(
    make: Callable[[nn.Module, float], alasso.Regularizer] | None, strength: float, seed: int, tasks: int
) -> Found:
    """Trains a plain loop with one of our methods, or with none."""
    model, stream_of = network(seed), stream(tasks, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    reg = None if make is None else make(model, strength).attach(optimizer)
    spent = 0.0
    for task in stream_of:
        start = time.perf_counter()
        for x, y in (batch for epoch in task.epochs for batch in epoch):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        spent += time.perf_counter() - start
        if reg is not None:
            reg.consolidate(task.epochs[-1])
    state = 0 if reg is None else bytes_of(reg.state_dict(), set())
    return Found(accuracy(model, stream_of), spent / steps(stream_of), state)


def steps(tasks: Iterable[Task]) -> int:
    return sum(len(epoch) for task in tasks for epoch in task.epochs)


OURS: dict[str, tuple[Callable[[nn.Module, float], alasso.Regularizer], float]] = {
    "KronALASSO": (lambda model, c: alasso.KronALASSO(model, c=c), 1.0),
    "ALASSO": (lambda model, c: alasso.ALASSO(model, c=c), 1.0),
    "SI": (lambda model, c: alasso.SI(model, c=c), 1.0),
    "EWC": (lambda model, lam: alasso.EWC(model, lam=lam), 100.0),
    "MAS": (lambda model, lam: alasso.MAS(model, lam=lam), 1.0),
}


# -- Avalanche's ------------------------------------------------------------------------------------------------


def avalanche_cases() -> dict[str, tuple[Callable[..., Found], float]]:
    """Its methods by name, each with the strength that is multiplied.

    Raises:
        ImportError: Avalanche, or what it needs, is not there.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what other libraries say when they are imported
        from avalanche.benchmarks import benchmark_from_datasets
        from avalanche.benchmarks.utils import AvalancheDataset
        from avalanche.benchmarks.utils.data_attribute import DataAttribute
        from avalanche.training.plugins import EWCPlugin, MASPlugin, SupervisedPlugin, SynapticIntelligencePlugin
        from avalanche.training.supervised import Naive

    class OurBatches(SupervisedPlugin):
        """Gives the strategy the batches of a task in our order, and times its epochs."""

        def __init__(self) -> None:
            super().__init__()
            self.task: Task | None = None
            self.spent = 0.0

        def before_training_epoch(self, strategy: Any, **_: Any) -> None:
            assert self.task is not None
            zeros = torch.zeros(BATCH, dtype=torch.long)  # task labels
            epoch = self.task.epochs[strategy.clock.train_exp_epochs]
            strategy.dataloader = [(x, y, zeros[: len(y)]) for x, y in epoch]
            self.start = time.perf_counter()

        def after_training_epoch(self, strategy: Any, **_: Any) -> None:
            self.spent += time.perf_counter() - self.start

    def run(make: Callable[[float], Any] | None, strength: float, seed: int, tasks: int) -> Found:
        model, stream_of, batches = network(seed), stream(tasks, seed), OurBatches()
        plugin = None if make is None else make(strength)
        strategy = Naive(
            model=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
            criterion=nn.CrossEntropyLoss(),
            train_mb_size=BATCH,
            train_epochs=EPOCHS,
            device="cpu",
            plugins=[batches, *([] if plugin is None else [plugin])],
            evaluator=None,
        )
        datasets = []
        for task in stream_of:
            x, y = (torch.cat(parts) for parts in zip(*task.epochs[-1], strict=True))
            labels = DataAttribute([0] * len(y), name="targets_task_labels", use_in_getitem=True)
            targets = DataAttribute(y.tolist(), name="targets")
            datasets.append(AvalancheDataset([TensorDataset(x, y)], data_attributes=[targets, labels]))
        for batches.task, experience in zip(
            stream_of, benchmark_from_datasets(train=datasets).train_stream, strict=True
        ):
            strategy.train(experience)
        kept = 0 if plugin is None else bytes_of(vars(plugin), {id(p) for p in model.parameters()})
        return Found(accuracy(model, stream_of), batches.spent / steps(stream_of), kept)

    return {
        "plain": (partial(run, None), 1.0),
        "SI": (partial(run, lambda strength: SynapticIntelligencePlugin(si_lambda=strength)), 1.0),
        "EWC": (partial(run, lambda strength: EWCPlugin(ewc_lambda=strength)), 100.0),
        "MAS": (partial(run, lambda strength: MASPlugin(lambda_reg=strength)), 1.0),
    }


# -- the table --------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each, from seed 0 on")
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--record", action="store_true", help="append a line to perf/records.jsonl")
    parser.set_defaults(device="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = {("alasso", "plain"): (partial(ours, None), 1.0)}
    cases |= {("alasso", name): (partial(ours, make), usual) for name, (make, usual) in OURS.items()}
    versions = {"alasso": alasso.__version__}
    try:
        cases |= {("Avalanche", name): case for name, case in avalanche_cases().items()}
        versions["Avalanche"] = importlib.metadata.version("avalanche-lib")
    except ImportError as error:
        print(f"Avalanche is left out: {error} (pip install 'alasso[avalanche]', and torchvision)")
    strengths = {case: chosen(*cases[case], options.tasks) for case in cases}
    found: dict[str, dict[str, Any]] = {}
    runs: dict[tuple[str, str], list[tuple[Found, Found]]] = {case: [] for case in cases}
    for seed in range(options.seeds):  # in turns, so that what else the machine does falls on all alike
        for case, (run, usual) in cases.items():
            runs[case].append((run(usual, seed, options.tasks), run(strengths[case] * usual, seed, options.tasks)))
    rows = []
    for (library, name), of in runs.items():
        plain = [by_default.seconds for by_default, _ in runs[library, "plain"]]
        ratio = statistics.median(one.seconds / base for (one, _), base in zip(of, plain, strict=True))
        means = [statistics.fmean(pair[which].accuracy for pair in of) for which in (0, 1)]
        rows.append([
            f"{name}, {library}", f"{means[0]:.3f}", f"{means[1]:.3f} (× {strengths[library, name]:g})", f"{ratio:.2f}",
            f"{of[0][0].bytes / bytes_of(list(network(0).parameters()), set()):.1f}",
        ])  # fmt: skip
        found.setdefault(library, {})[name] = {
            "A": [one.accuracy for one, _ in of],
            "A_chosen": [one.accuracy for _, one in of],
            "strength": strengths[library, name],
            "step_ratio": round(ratio, 4),
            "bytes": of[0][0].bytes,
        }
    table(
        f"Permuted digits, {options.tasks} tasks; {', '.join(f'{name} {of}' for name, of in versions.items())}",
        ["", "A, default", "A, strength chosen", "step / plain step", "state / weights"],
        rows,
    )
    keep("peers", options, {"libraries": versions, "runs": found})


def chosen(run: Callable[..., Found], usual: float, tasks: int) -> float:
    """Returns the multiple of the default strength with the best accuracy on a seed that is not reported."""
    if isinstance(run, partial) and run.args == (None,):  # plain training has none
        return 1.0
    return max(STRENGTHS, key=lambda times: run(times * usual, CHOOSING, tasks).accuracy)


if __name__ == "__main__":
    main()
