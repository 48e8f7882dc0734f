"""What the methods do differently in the one training loop: a learner takes a step, ends a task, answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from alasso import regularizers
from alasso.bench.config import RunConfig
from alasso.bench.streams import Examples, Stream, Task
from alasso.shell import Regularizer

EVALUATION_BATCH = 2000


class Learner:
    """Plain training, one task after another: the method ``sgd``, and the base of the others."""

    def __init__(self, config: RunConfig, stream: Stream, make_model: Callable[[], nn.Module], device: torch.device):
        self.config, self.stream, self.device = config, stream, device
        self.make_model = make_model
        self.model = make_model().to(device)
        self.optimizer = self.make_optimizer()

    # -- training -----------------------------------------------------------------------------------------------

    def begin_task(self, t: int) -> None:
        if self.config.reset_optimizer and t > 0:
            self.optimizer = self.make_optimizer()

    def epoch_plan(self, t: int, epoch: int) -> Tensor:
        """Which examples in which order; from seed, task and epoch alone, so that a run can go on anywhere."""
        generator = torch.Generator().manual_seed(position_seed(self.config.seed, t, epoch))
        return torch.randperm(len(self.stream.tasks[t].train), generator=generator)

    def step(self, t: int, plan: Tensor) -> Tensor:
        """One optimizer step on a piece of the epoch's plan; the task's loss, without the penalty."""
        loss = self.loss(t, plan)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def loss(self, t: int, plan: Tensor) -> Tensor:
        task = self.stream.tasks[t]
        x, y = self.batch(task.train, plan)
        return nn.functional.cross_entropy(self.model(x)[:, task.head], y - task.head.start)

    def end_task(self, t: int) -> None:
        """After the last epoch of task t."""

    def penalty(self) -> float:
        """What the past adds to the loss at the present weights, for the log."""
        return 0.0

    # -- answering ----------------------------------------------------------------------------------------------

    def accuracies(self, t: int, earlier: list[list[float]]) -> list[float]:
        """Accuracy on every task up to t, just after learning t; ``earlier`` holds those after each task before."""
        return [self.accuracy(task) for task in self.stream.tasks[: t + 1]]

    @torch.no_grad()
    def accuracy(self, task: Task) -> float:
        """Share of the task's test examples answered rightly, among the task's own classes."""
        self.model.eval()
        right = torch.zeros((), dtype=torch.long, device=self.device)
        for index in torch.arange(len(task.test)).split(EVALUATION_BATCH):
            x, y = self.batch(task.test, index)
            right += (self.answers(x, task) == y).sum()
        self.model.train()
        return int(right) / len(task.test)

    def answers(self, x: Tensor, task: Task) -> Tensor:
        outputs: Tensor = self.model(x)
        return outputs[:, task.head].argmax(1) + int(task.head.start)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    # -- parts --------------------------------------------------------------------------------------------------

    def make_optimizer(self) -> torch.optim.Optimizer:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if self.config.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=self.config.learning_rate)
        return torch.optim.Adam(parameters, lr=self.config.learning_rate, fused=True)

    def batch(self, examples: Examples, index: Tensor) -> tuple[Tensor, Tensor]:
        x, y = examples.batch(index.to(examples.images.device))
        return x.to(self.device), y.to(self.device)


class Regularized(Learner):
    """Training under a regularizer of this library: EWC, online EWC, SI, MAS, ALASSO."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        kind = REGULARIZERS[self.config.method]
        self.regularizer: Regularizer = kind(self.model, **self.config.settings)
        self.regularizer.attach(self.optimizer)

    def begin_task(self, t: int) -> None:
        super().begin_task(t)
        self.regularizer.attach(self.optimizer)  # a new optimizer, if it was reset

    def end_task(self, t: int) -> None:
        if self.regularizer.surrogate.observes_path:
            self.regularizer.consolidate()
        else:
            head = self.stream.tasks[t].head
            self.regularizer.consolidate(self.batches(t), head=lambda output: output[:, head])  # type: ignore[call-arg]

    def batches(self, t: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The task's training examples once, labels counted from the head's first column."""
        task = self.stream.tasks[t]
        for index in torch.arange(len(task.train)).split(self.config.batch_size):
            x, y = self.batch(task.train, index)
            yield x, y - task.head.start

    def penalty(self) -> float:
        with torch.no_grad():
            return float(self.regularizer.penalty())

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "regularizer": self.regularizer.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        super().load_state_dict(saved)
        self.regularizer.load_state_dict(saved["regularizer"])


REGULARIZERS: dict[str, Callable[..., Regularizer]] = {
    "ewc": regularizers.EWC,
    "online-ewc": regularizers.OnlineEWC,
    "si": regularizers.SI,
    "mas": regularizers.MAS,
    "alasso": regularizers.ALASSO,
}

LEARNERS: dict[str, type[Learner]] = {"sgd": Learner, **dict.fromkeys(REGULARIZERS, Regularized)}


def position_seed(*numbers: int) -> int:
    """One seed for a place in a run: neighbouring places get unrelated ones."""
    import numpy as np

    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
