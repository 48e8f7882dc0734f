"""The paper's two explanatory figures, measured: how a task's loss changes to either side of single weights.

Results hold no weights, so the first task of the result's config is learned again: same config, stream and seed. No
method penalises anything during the first task; an observer beside the learner takes down each weight's path.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from alasso.bench import train
from alasso.bench.benchmarks import make_stream
from alasso.bench.catalog import METHODS
from alasso.bench.config import RunConfig
from alasso.bench.learners import Learner
from alasso.bench.streams import Stream
from alasso.errors import AlassoError
from alasso.methods.alasso import AlassoState, asymmetric_factors
from alasso.methods.surrogate import two_sided_spring
from alasso.regularizers import ALASSO
from alasso.report.groups import Array
from alasso.report.sides import Loss, Weight, losses

#: Less than this share of the loss is rounding, not a change.
FLAT = 1e-12


@dataclass(frozen=True)
class Plan:
    """What is measured: so many random weights, so many places from −span to +span, on so many examples."""

    weights: int = 200
    offsets: int = 41
    span: float = 1.0
    examples: int = 1000

    def __post_init__(self) -> None:
        if self.offsets % 2 == 0:
            raise AlassoError(f"offsets must be odd, so that the optimum itself is among them, not {self.offsets}")
        if not 0 < self.span < float("inf"):
            raise AlassoError(f"span must be a positive number, not {self.span}")


@dataclass(frozen=True)
class Measured:
    """A probe's findings in plain numbers. ``losses[k][o]``: with weight k moved by offset o."""

    config: dict[str, Any]
    plan: Plan
    seconds: float  # of the measurement, training aside
    accuracy: float  # on the first task's test examples
    offsets: list[float]
    weights: list[str]
    losses: list[list[float]]
    importance: list[float]  # Ω of each weight
    came_from: list[float]  # start of training minus end, of each weight
    surrogates: dict[str, list[list[float]]]  # method → value at each offset, of each weight

    def changes(self) -> Array:
        """(weights, offsets): loss minus loss at the optimum."""
        found = np.array(self.losses)
        return np.asarray(found - found[:, [len(self.offsets) // 2]])

    def steep_right(self) -> Array:
        """The changes with each weight's steeper side turned right; weights without any effect are left out."""
        changes = self.changes()
        changes = changes[np.abs(changes).max(axis=1) > FLAT * np.abs(self.losses).max()]
        flip = changes[:, 0] > changes[:, -1]
        return np.asarray(np.where(flip[:, None], changes[:, ::-1], changes))

    def shallow_over_steep(self) -> Array:
        """Change at the shallow end over rise at the steep end, not below −1, of weights with a side where it rises.

        1: both sides alike. 0: flat on one side. −1: falls on one side as much as it rises on the other, or more.
        """
        lines = self.steep_right()
        lines = lines[lines[:, -1] > 0]
        return np.asarray((lines[:, 0] / lines[:, -1]).clip(min=-1))

    def statement(self) -> list[str]:
        """How asymmetric the sample is, in words."""
        total, lines, plan = len(self.losses), self.steep_right(), self.plan
        evenness = self.shallow_over_steep()
        both_rise = 1 / evenness[evenness > 0]
        rises = lines[lines[:, -1] > 0, -1]
        said = [
            f"{total} random weights of {self.config['model']} after the first task of {self.config['benchmark']} "
            f"(test accuracy {self.accuracy:.4f}), each moved by up to ±{plan.span:g}, "
            f"on {plan.examples} training examples; measured in {self.seconds:.1f} s",
            f"{total - len(lines)} have no effect on the loss at all: their input is always zero, or their unit is",
            f"for {len(lines) - len(rises)} the loss rises on neither side: training ended short of their optimum",
        ]
        if len(evenness):
            said.append(
                f"{len(evenness)} have a side where the loss rises, by {np.median(rises):.2g} (median); "
                f"the other side changes by {np.median(evenness):.2f} of that (median; 1: symmetric, below 0: it falls)"
            )
        if len(both_rise):
            low, middle, high = np.quantile(both_rise, (0.25, 0.5, 0.75))
            said.append(
                f"for {len(both_rise)} the loss rises on both sides, {middle:.2f} times as much on the steep one "
                f"(median; quartiles {low:.2f} and {high:.2f})"
            )
        return said


@dataclass(frozen=True)
class Learned:
    """A learner after its first task, the observer of its path, and where each parameter started."""

    learner: Learner
    observer: ALASSO
    start: dict[str, Tensor]

    def state_of(self, weight: Weight) -> AlassoState:
        state = self.observer.state_of(weight.parameter, self.learner.model.get_parameter(weight.parameter))
        return AlassoState(*(field[weight.index] for field in state))

    def came_from(self, weight: Weight) -> float:
        now = self.learner.model.get_parameter(weight.parameter).detach()
        return float(self.start[weight.parameter][weight.index] - now[weight.index])


def probe_first_task(
    config: RunConfig, plan: Plan, *, data_dir: Path | None, device: str, say: Callable[[str], None]
) -> Measured:
    """Learn the first task again, then measure."""
    if config.method.startswith("vcl"):
        raise AlassoError("the probe moves the weights of one network, and vcl learns a distribution of them")
    place = train.torch_device(device)
    stream = make_stream(config, data_dir, place)
    torch.manual_seed(config.seed)
    learner = train.make_learner(config, stream, None, place)
    say(f"learning the first task: {config.method}, {config.epochs} epochs, seed {config.seed}")
    learned = learn_first_task(learner)
    return measure(plan, learned, stream)


def learn_first_task(learner: Learner) -> Learned:
    """Train task 0 as the bench does; ALASSO's path integral is taken beside it."""
    config = learner.config
    settings = config.settings if config.method == "alasso" else METHODS["alasso"].settings
    learner.begin_task(0)
    learner.prepare(0)
    observer = ALASSO(learner.model, **settings)
    observer.attach(learner.optimizer)
    start = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    for epoch in range(config.epochs):
        for plan in learner.epoch_plan(0, epoch):
            learner.step(0, plan)
    observer.consolidate()
    observer.detach()
    return Learned(learner, observer, start)


def measure(plan: Plan, learned: Learned, stream: Stream) -> Measured:
    learner, task = learned.learner, stream.tasks[0]
    accuracy = learner.accuracy(task)
    # A single weight among millions moves the loss by a millionth: float32 would show its own rounding.
    model = copy.deepcopy(learner.model).double().eval()
    generator = torch.Generator().manual_seed(learner.config.seed)
    x, y = learner.batch(task.train, torch.randperm(len(task.train), generator=generator)[: plan.examples])
    weights = random_weights(model, plan.weights, generator)
    offsets = torch.linspace(-plan.span, plan.span, plan.offsets, dtype=torch.float64, device=x.device)
    began = time.monotonic()
    found = losses(model, x.double(), task_loss(y, task.head), weights, offsets)
    states = [learned.state_of(weight) for weight in weights]
    own: Any = learned.observer.surrogate
    return Measured(
        config=learner.config.to_json(),
        plan=replace(plan, examples=len(y)),
        seconds=round(time.monotonic() - began, 2),
        accuracy=accuracy,
        offsets=offsets.tolist(),
        weights=[f"{weight.parameter}[{', '.join(map(str, weight.index))}]" for weight in weights],
        losses=found.tolist(),
        importance=[float(state.omega) for state in states],
        came_from=[learned.came_from(weight) for weight in weights],
        surrogates={
            "SI": [surrogate(state, offsets, 1.0, 0.0).tolist() for state in states],
            "ALASSO": [surrogate(state, offsets, own.a, own.epsilon).tolist() for state in states],
        },
    )


def task_loss(y: Tensor, head: slice) -> Loss:
    """Mean cross-entropy over examples, of one network's outputs or of a stack of them."""

    def loss(outputs: Tensor) -> Tensor:
        logits = outputs[..., head]
        of_label = (y - head.start).expand(logits.shape[:-1]).unsqueeze(-1)
        return (logits.logsumexp(-1) - logits.gather(-1, of_label).squeeze(-1)).mean(-1)

    return loss


def random_weights(model: nn.Module, count: int, generator: torch.Generator) -> list[Weight]:
    """Every number of the network is as likely as any other; none is drawn twice."""
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    total = sum(sizes.values())
    numbers = np.random.default_rng(generator.initial_seed())
    weights = []
    for place in np.sort(numbers.choice(total, min(count, total), replace=False)).tolist():
        for name, size in sizes.items():
            if place < size:
                index = np.unravel_index(place, tuple(model.get_parameter(name).shape))
                weights.append(Weight(name, tuple(int(i) for i in index)))
                break
            place -= size
    return weights


def surrogate(state: AlassoState, offsets: Tensor, a: float, epsilon: float) -> Tensor:
    """Eq. 5 along a weight's line. After one task SI's Ω and ALASSO's are the same: SI's surrogate has a = 1, ε = 0."""
    k_minus, k_plus = asymmetric_factors(state.omega, state.side, a, epsilon)
    return two_sided_spring(offsets, k_minus, k_plus)
