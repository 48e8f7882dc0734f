"""The paper's two explanatory figures, measured: how a task's loss changes to either side of single weights.

Results hold no weights, so the first task of the result's config is learned again: same config, stream and seed. No
method penalises anything during the first task; an observer beside the learner takes down each weight's path.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from alasso.bench import results
from alasso.bench.config import RunConfig
from alasso.bench.labels import count_of
from alasso.bench.learners.base import Learner, Regularized
from alasso.bench.probe.findings import Measured, Plan
from alasso.bench.probe.progress import Watch, unwatched
from alasso.bench.probe.weight_lines import Loss, Weight, losses
from alasso.bench.registry import METHODS
from alasso.bench.streams import Stream, make_stream
from alasso.bench.training import run as train
from alasso.errors import AlassoError
from alasso.methods._classes import ALASSO
from alasso.methods.alasso import AlassoState, asymmetric_factors


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
    config: RunConfig,
    plan: Plan,
    *,
    data_dir: Path | None,
    device: str,
    say: Callable[[str], None],
    watch: Watch = unwatched,
) -> Measured:
    """Learn the first task again, then measure."""
    if config.method.startswith("vcl"):
        raise AlassoError("the probe moves the weights of one network, and vcl learns a distribution of them")
    place = train.torch_device(device)
    environment = results.environment(str(place))  # of the code that is about to train
    stream = make_stream(config, data_dir, place)
    torch.manual_seed(config.seed)
    learner = train.make_learner(config, stream, None, place)
    say(f"learning the first task: {config.method}, {count_of(config.epochs, 'epoch')}, seed {config.seed}")
    learned = learn_first_task(learner, watch)
    weights = min(plan.weights, sum(p.numel() for p in learner.model.parameters() if p.requires_grad))
    examples = min(plan.examples, len(stream.tasks[0].train))
    for there, asked, thing in ((weights, plan.weights, "weight"), (examples, plan.examples, "training example")):
        if there < asked:
            say(f"limited to the {count_of(there, thing)} that there are, not {asked}")
    say(f"moving {count_of(weights, 'weight')} to {plan.offsets} places each, on {count_of(examples, 'example')}")
    return measure(plan, learned, stream, environment, watch)


def learn_first_task(learner: Learner, watch: Watch = unwatched) -> Learned:
    """Train task 0 as the bench does; ALASSO's path integral is taken beside it."""
    config = learner.config
    settings = config.settings if config.method == "alasso" else METHODS["alasso"].settings
    learner.begin_task(0)
    learner.prepare(0)
    observer = ALASSO(learner.model, **settings)
    if isinstance(learner, Regularized):
        learner.regularizer.detach()  # in the first task it adds nothing
    observer.attach(learner.optimizer)
    start = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    for epoch in range(config.epochs):
        steps = learner.epoch_plan(0, epoch)
        for number, plan in enumerate(steps, 1):
            learner.step(0, plan)
            watch("learning the first task", epoch + number / len(steps), config.epochs)
    observer.consolidate()
    observer.detach()
    return Learned(learner, observer, start)


def measure(
    plan: Plan, learned: Learned, stream: Stream, environment: dict[str, Any], watch: Watch = unwatched
) -> Measured:
    learner, task = learned.learner, stream.tasks[0]
    (accuracy,) = learner.accuracies_on([task])
    # A single weight among millions moves the loss by a millionth: float32 would show its own rounding.
    model = copy.deepcopy(learner.model).double().eval()
    generator = torch.Generator().manual_seed(learner.config.seed)
    x, y = learner.batch(task.train, torch.randperm(len(task.train), generator=generator)[: plan.examples])
    weights = random_weights(model, plan.weights, generator)
    offsets = torch.linspace(-plan.span, plan.span, plan.offsets, dtype=torch.float64, device=x.device)
    began = time.monotonic()
    found = losses(model, x.double(), task_loss(y, task.head), weights, offsets, partial(watch, "moving weights"))
    states = [learned.state_of(weight) for weight in weights]
    own: Any = learned.observer.surrogate
    return Measured(
        config=learner.config.to_json(),
        plan=plan,
        seconds=round(time.monotonic() - began, 2),
        accuracy=accuracy,
        offsets=offsets.tolist(),
        weights=[f"{weight.parameter}[{', '.join(map(str, weight.index))}]" for weight in weights],
        losses=found.tolist(),
        importance=[float(state.omega) for state in states],
        came_from=[learned.came_from(weight) for weight in weights],
        springs=[[float(k) for k in asymmetric_factors(s.omega, s.side, own.a, own.epsilon)] for s in states],
        environment=environment,
        examples=len(y),
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
