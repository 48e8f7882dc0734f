"""Variational continual learning in the harness: a Gaussian for each weight, with and without coresets."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alasso import vcl
from alasso.bench.learners.base import MEMORY, Learner, StepPlan, own_columns, position_seed
from alasso.bench.learners.replay import Mixture, only_own_head
from alasso.bench.learners.steps import steps_for
from alasso.bench.streams import Task
from alasso.errors import AlassoError
from alasso.vcl.coresets import k_center_coreset, random_coreset

CORESET_EPOCHS = 1 << 21  # where in the seeds' space the training on coresets lies


class Variational(Learner):
    """VCL: the posterior of the last task is the prior of the next; answers are averaged over samples of weights.

    As its authors do, the first task starts from a point estimate, trained before, and Adam starts anew at each task.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.data_size = len(self.stream.tasks[0].train)  # of the running task: N, which the KL term is divided by
        # Made at once, so that its first weights depend on the run's seed alone.
        plain = self.config.settings["point_epochs"] > 0
        self.point_estimate = Learner(self.config, self.stream, self.make_model, self.device) if plain else None

    def new_model(self) -> nn.Module:
        return self.converted(super().new_model())

    def converted(self, point_estimate: nn.Module) -> nn.Module:
        settings = self.config.settings
        logvar, prior_var = settings["initial_logvar"], settings["prior_var"]
        return vcl.convert(point_estimate, initial_logvar=logvar, prior_var=prior_var)

    def begin_task(self, t: int) -> None:
        if self.point_estimate is not None:
            self.start_from(self.point_estimate)
            self.point_estimate = None
        self.optimizer = self.new_optimizer()

    def start_from(self, plain: Learner) -> None:
        """Train a plain network on the first task for a while; its weights become the means.

        A first Ctrl-C stops the run after it, at the first step of the task; a second one stops at once.
        """
        plain.prepare(0)
        steps = steps_for(plain)
        steps.begin_task(0)
        for epoch in range(self.config.settings["point_epochs"]):
            steps.begin_epoch(plans := plain.epoch_plan(0, epoch))
            for i in range(len(plans)):
                steps.step(i)
        self.model = self.converted(plain.model)

    def prepare(self, t: int) -> None:
        super().prepare(t)
        self.data_size = self.examples_trained_on(t)

    def step(self, t: int, plan: StepPlan) -> Tensor:
        loss = self.loss(t, plan)
        self.descend(loss + self.cost_of_leaving_the_prior())
        return loss.detach()

    def loss(self, t: int, plan: StepPlan) -> Tensor:
        head = self.stream.tasks[t].head
        x, y = self.batch(self.examples, plan.own)

        def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
            return self.cross_entropy(*own_columns(outputs, y, head))

        return vcl.expected_loss(self.outputs, x, y, cross_entropy, samples=self.config.settings["train_samples"])

    def cost_of_leaving_the_prior(self) -> Tensor:
        return vcl.kl(self.model) / self.data_size

    @torch.no_grad()
    def penalty(self) -> Tensor:
        return self.cost_of_leaving_the_prior()

    def examples_trained_on(self, t: int) -> int:
        return len(self.stream.tasks[t].train)

    def end_task(self, t: int) -> None:
        super().end_task(t)
        vcl.update_prior(self.model)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        super().load_state_dict(saved)
        self.point_estimate = None  # a run that is saved has begun, and is beyond it

    def accuracies_on(self, tasks: Sequence[Task]) -> list[float]:
        # Answering must leave no trace, not even in the random numbers of training: else a run would depend on how many
        # tasks it is asked about.
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            return super().accuracies_on(tasks)

    def answers(self, x: Tensor, task: Task) -> Tensor:
        return self.probabilities(x, task.head).argmax(1) + int(task.head.start)

    def probabilities(self, x: Tensor, head: slice) -> Tensor:
        samples = self.config.settings["test_samples"]
        with self.autocast():
            return vcl.predict(self.model, x, samples, head=lambda outputs: outputs[:, head])


class VariationalWithCoreset(Variational):
    """VCL with a coreset of each task, left out of training and trained on only before answering, in a copy."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.coresets: list[Tensor] = []
        size, least = self.config.settings["coreset"], min(len(task.train) for task in self.stream.tasks)
        if size >= least:
            raise AlassoError(f"coreset must be smaller than a task, of which one has {least} examples, not {size}")

    def begin_task(self, t: int) -> None:
        super().begin_task(t)
        self.coresets.append(self.choose(self.stream.tasks[t], t))

    def choose(self, task: Task, t: int) -> Tensor:
        generator = torch.Generator().manual_seed(position_seed(self.config.seed, t, MEMORY))
        size = self.config.settings["coreset"]
        if self.config.settings["choose"] == "random":
            return random_coreset(len(task.train), size, generator)
        x, _ = task.train.batch(torch.arange(len(task.train), device=task.train.images.device))
        return k_center_coreset(x.flatten(1), size, generator=generator).cpu()

    def epoch_plan(self, t: int, epoch: int) -> list[StepPlan]:
        """The task's examples without its coreset."""
        generator = torch.Generator().manual_seed(position_seed(self.config.seed, t, epoch))
        keep = torch.ones(len(self.stream.tasks[t].train), dtype=torch.bool)
        keep[self.coresets[t]] = False
        kept = keep.nonzero().flatten()
        order = kept[torch.randperm(len(kept), generator=generator)]
        return [StepPlan(own) for own in order.split(self.config.batch_size)]

    def examples_trained_on(self, t: int) -> int:
        return super().examples_trained_on(t) - len(self.coresets[t])

    def accuracies(self, t: int, earlier: list[list[float]]) -> list[float]:
        posterior, optimizer = self.model, self.optimizer
        # As in accuracies_on: no trace, here not in the posterior either.
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            self.model = copy.deepcopy(posterior)
            self.optimizer = self.new_optimizer()
            self.train_on_coresets(t)
            found = super().accuracies(t, earlier)
        self.model, self.optimizer = posterior, optimizer
        return found

    def train_on_coresets(self, t: int) -> None:
        """Train on all coresets; as in ``start_from``, a first Ctrl-C stops the run only after it."""
        mixture = Mixture(self.stream.tasks[: t + 1], self.coresets)
        pairs = torch.cat([torch.stack([torch.full_like(kept, j), kept], 1) for j, kept in enumerate(self.coresets)])
        generator = torch.Generator().manual_seed(position_seed(self.config.seed, t, CORESET_EPOCHS))
        settings = self.config.settings
        for _ in range(settings["coreset_epochs"]):
            for piece in pairs[torch.randperm(len(pairs), generator=generator)].split(self.config.batch_size):
                x, y, first, last = mixture.batch(piece, self.device)

                def cross_entropy(outputs: Tensor, y: Tensor, first: Tensor = first, last: Tensor = last) -> Tensor:
                    repeats = len(outputs) // len(first)
                    masked = only_own_head(outputs, first.repeat(repeats), last.repeat(repeats))
                    return self.cross_entropy(masked, y)

                loss = vcl.expected_loss(self.outputs, x, y, cross_entropy, samples=settings["train_samples"])
                self.descend(loss + vcl.kl(self.model) / len(pairs))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "coresets": self.coresets}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        super().load_state_dict(saved)
        self.coresets = self.indices(saved["coresets"])
