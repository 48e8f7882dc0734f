"""What each method keeps when tasks come with their name, without it, or with new classes for one shared head.

    python perf/scenarios.py [--seeds 3 --methods KronALASSO,EWC --record]

scikit-learn's digits as five tasks of two classes, a small network, Adam; methods at their defaults. Three settings:

- task-incremental: a test digit comes with the number of its task, and the network chooses between its two classes;
- domain-incremental: the network says whether a digit is its task's first or second class, and does not know the task;
- class-incremental: the network chooses among all ten classes, and does not know the task.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from _measure import keep, table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import alasso

PLAIN = "plain"
METHODS: dict[str, Callable[[nn.Module], alasso.Regularizer]] = {
    "KronALASSO": alasso.KronALASSO,
    "ALASSO": alasso.ALASSO,
    "SI": alasso.SI,
    "EWC": alasso.EWC,
    "EWC, reversed labels": partial(alasso.EWC, labels="reversed"),
    "MAS": alasso.MAS,
}
TASKS, CLASSES, EPOCHS, BATCH = 5, 2, 30, 64
TEST = 5  # one in so many digits is for testing

Head = Callable[[Tensor], Tensor]


class Scenario:
    """A way to put the tasks.

    Args:
        outputs: Of the network.
        knows_task: Whether a sample comes with its task.
    """

    def __init__(self, outputs: int, knows_task: bool) -> None:
        self.outputs, self.knows_task = outputs, knows_task

    def label(self, y: Tensor) -> Tensor:
        """Returns the output that is right for a digit."""
        return y if self.outputs > CLASSES and not self.knows_task else y % CLASSES

    def head(self, task: int) -> Head:
        """Returns what chooses a task's outputs."""
        if not self.knows_task:
            return lambda output: output
        return lambda output: output[:, task * CLASSES : (task + 1) * CLASSES]


SCENARIOS = {
    "task-incremental": Scenario(TASKS * CLASSES, knows_task=True),
    "domain-incremental": Scenario(CLASSES, knows_task=False),
    "class-incremental": Scenario(TASKS * CLASSES, knows_task=False),
}


def data(task: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns a task's digits, those to train on and those to test on."""
    digits = load_digits()
    x, y = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    of_task, tests = y // CLASSES == task, torch.arange(len(y)) % TEST == 0
    return x[of_task & ~tests], y[of_task & ~tests], x[of_task & tests], y[of_task & tests]


def run(scenario: Scenario, method: str, seed: int) -> tuple[float, float]:
    """Trains on all tasks; returns the mean accuracy over them at the end, and just after each was learned."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, scenario.outputs)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    reg = None if method == PLAIN else METHODS[method](model).attach(optimizer)
    tasks, learned = [data(task) for task in range(TASKS)], []

    def accuracy(task: int) -> float:
        x, y = tasks[task][2:]
        with torch.no_grad():
            return (scenario.head(task)(model(x)).argmax(1) == scenario.label(y)).float().mean().item()

    for task, (x, y, _, _) in enumerate(tasks):
        head, y = scenario.head(task), scenario.label(y)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).split(BATCH):
                optimizer.zero_grad()
                cross_entropy(head(model(x[rows])), y[rows]).backward()
                optimizer.step()
        learned.append(accuracy(task))
        if reg is not None:
            reg.consolidate(list(zip(x.split(BATCH), y.split(BATCH), strict=True)), head=head)
    return statistics.fmean(map(accuracy, range(TASKS))), statistics.fmean(learned)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each")
    parser.add_argument("--methods", default=";".join(METHODS), help="names with semicolons between them")
    parser.add_argument("--record", action="store_true", help="append a line to perf/records.jsonl")
    parser.set_defaults(device="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if unknown := set(options.methods.split(";")) - METHODS.keys():
        parser.error(f"no such method: {', '.join(sorted(unknown))}; there are {'; '.join(METHODS)}")
    found: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in SCENARIOS}
    for name, scenario in SCENARIOS.items():
        for method in (PLAIN, *options.methods.split(";")):
            found[name][method] = [run(scenario, method, seed) for seed in range(options.seeds)]
    rows = [
        [method, *(f"{mean(of[method], 0):.3f} ({mean(of[method], 1):.3f})" for of in found.values())]
        for method in found["task-incremental"]
    ]
    table("Mean accuracy at the end (just after each task)", ["", *SCENARIOS], rows)
    keep("scenarios", options, {"runs": found})


def mean(runs: list[tuple[float, float]], which: int) -> float:
    return statistics.fmean(one[which] for one in runs)


if __name__ == "__main__":
    main()
