"""The two upper bounds of the paper: a network for each task, and one network that sees all tasks' data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from alasso.bench.learners.base import Learner, StepPlan, position_seed
from alasso.bench.learners.replay import Mixture, mixed_in_one_go, only_own_head

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
        return self.resident and mixed_in_one_go(self.stream.tasks)

    def prepare(self, t: int) -> None:
        self.mixture = None  # whose pool makes room
        self.mixture = Mixture(self.stream.tasks[: t + 1])

    def epoch_plan(self, t: int, epoch: int) -> list[StepPlan]:
        sizes = [len(task.train) for task in self.stream.tasks[: t + 1]]
        pairs = even_mixture(sizes, position_seed(self.config.seed, t, epoch))
        return [StepPlan(piece[:, 1], piece) for piece in pairs.split(self.config.batch_size)]

    def pairs(self, t: int, plans: Sequence[StepPlan]) -> tuple[Tensor, list[int]]:
        steps = [plan.others for plan in plans if plan.others is not None]
        return torch.cat(steps), [len(step) for step in steps]

    def loss(self, t: int, plan: StepPlan) -> Tensor:
        assert self.mixture is not None and plan.others is not None
        x, y, first, last = self.mixture.batch(plan.others, self.device)
        return self.cross_entropy(only_own_head(self.outputs(x), first, last), y)


def even_mixture(sizes: list[int], seed: int) -> Tensor:
    """As many pairs (task, example) as the last task has examples, each task's turn in an endless round.

    Any run of consecutive pairs, so any batch, holds as many examples of one task as of another, give or take one.

    >>> even_mixture([4, 4], seed=0)[:, 0].tolist()
    [0, 1, 0, 1]
    """
    random = np.random.default_rng(seed)
    tasks = np.arange(sizes[-1]) % len(sizes)
    examples = np.empty_like(tasks)
    for t, size in enumerate(sizes):
        turns = examples[t :: len(sizes)]
        turns[:] = in_rounds(size, len(turns), random)
    return torch.from_numpy(np.stack([tasks, examples], 1))


def in_rounds(size: int, count: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
    """So many of the numbers below ``size``, none a second time before all have been there.

    Of a last, unfinished round only that part is drawn: of a hundred tasks, an epoch takes a hundredth of each.
    """
    whole, rest = divmod(count, size)
    rounds = [random.permutation(size) for _ in range(whole)]
    return np.concatenate([*rounds, random.choice(size, rest, replace=False)])
