"""The two upper bounds of the paper: a network for each task, and one network that sees all tasks' data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alasso.bench.learners import Learner, StepPlan, position_seed
from alasso.bench.memory import Mixture, only_own_head

FRESH_NETWORK = 1 << 22  # where in the seeds' space the fresh networks lie: beyond any epoch


class SingleTask(Learner):
    """A fresh network for each task: nothing can be forgotten, nothing is shared."""

    def begin_task(self, t: int) -> None:
        if t > 0:
            # From seed and task alone, so that it starts the same whatever else draws random numbers meanwhile.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(position_seed(self.config.seed, t, FRESH_NETWORK))
                self.model = self.new_model()
            self.optimizer = self.new_optimizer()

    def accuracies(self, t: int, earlier: list[list[float]]) -> list[float]:
        """Each earlier task keeps its own network, and so its accuracy."""
        return [*(earlier[-1] if earlier else []), *self.accuracies_on([self.stream.tasks[t]])]


class MultiTask(Learner):
    """Mini-batches mixed evenly from all tasks so far; as many steps a task as every other method."""

    @property
    def can_be_recorded(self) -> bool:
        return self.resident and Mixture(self.stream.tasks).in_one_go

    def prepare(self, t: int) -> None:
        self.mixture = Mixture(self.stream.tasks[: t + 1])

    def epoch_plan(self, t: int, epoch: int) -> list[StepPlan]:
        generator = torch.Generator().manual_seed(position_seed(self.config.seed, t, epoch))
        pairs = even_mixture([len(task.train) for task in self.stream.tasks[: t + 1]], generator)
        return [StepPlan(piece[:, 1], piece) for piece in pairs.split(self.config.batch_size)]

    def pairs(self, t: int, plans: Sequence[StepPlan]) -> tuple[Tensor, list[int]]:
        steps = [plan.others for plan in plans if plan.others is not None]
        return torch.cat(steps), [len(step) for step in steps]

    def loss(self, t: int, plan: StepPlan) -> Tensor:
        assert self.mixture is not None and plan.others is not None
        x, y, first, last = self.mixture.batch(plan.others, self.device)
        return self.cross_entropy(only_own_head(self.outputs(x), first, last), y)


def even_mixture(sizes: list[int], generator: torch.Generator) -> Tensor:
    """As many pairs (task, example) as the last task has examples, each task's turn in an endless round.

    Any run of consecutive pairs, so any batch, holds as many examples of one task as of another, give or take one.

    >>> even_mixture([4, 4], torch.Generator())[:, 0].tolist()
    [0, 1, 0, 1]
    """
    tasks = torch.arange(sizes[-1]) % len(sizes)
    examples = torch.empty_like(tasks)
    for t, size in enumerate(sizes):
        turns = tasks == t
        count = int(turns.sum())
        rounds = [torch.randperm(size, generator=generator) for _ in range(-(-count // size))]
        if rounds:
            examples[turns] = torch.cat(rounds)[:count]
    return torch.stack([tasks, examples], 1)
