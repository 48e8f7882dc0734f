"""What the methods do differently in the one training loop: a learner takes a step, ends a task, answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import alasso.optim
from alasso import IMM
from alasso._summary import is_looked_at
from alasso.bench.config import RunConfig
from alasso.bench.learners import fits
from alasso.bench.learners.replay import EpisodicMemory, Mixture, even_mixture, mixed_in_one_go, only_own_head
from alasso.bench.registry import METHODS, loaded
from alasso.bench.streams import Examples, Stream, Task
from alasso.errors import DivergedError
from alasso.methods.base import Springs
from alasso.methods.imm import DropTransfer
from alasso.regularizer import Regularizer

EVALUATED_AT_ONCE = 2**23  # input values: the whole of MNIST's test set
ASSESSED_AT_ONCE = 2**21  # input values of a GPU's pass over a task at its end, else bound by launches
LARGE_IMAGE = 128 * 128  # pixels
MOST_ASSESSED_AT_ONCE = 2**13  # examples: few input values may have many activations behind them


class StepPlan(NamedTuple):
    """Which examples one step is made on."""

    own: Tensor  # indices into the running task's training examples
    others: Tensor | None = None  # pairs (task, example): rehearsed, or all of a mixed batch


class Learner:
    """Plain training, one task after another: the method ``sgd``, and the base of the others."""

    def __init__(self, config: RunConfig, stream: Stream, make_model: Callable[[], nn.Module], device: torch.device):
        self.config, self.stream, self.device, self.make_model = config, stream, device, make_model
        self.model = self.new_model()
        self.optimizer = self.new_optimizer()
        self.memory = EpisodicMemory(config.memory, config.memory_share) if config.memory else None
        self.mixture: Mixture | None = None
        self.examples = stream.tasks[0].train  # of the running task

    @property
    def resident(self) -> bool:
        """Whether all examples are on the training device."""
        return all(task.train.images.device == self.device for task in self.stream.tasks)

    @property
    def can_be_recorded(self) -> bool:
        """Whether a step runs on the device alone, so that a CUDA graph can hold it."""
        return self.resident and (self.memory is None or mixed_in_one_go(self.stream.tasks, self.memory.size))

    # -- training -----------------------------------------------------------------------------------------------

    def begin_task(self, t: int) -> None:
        """Before task t, once."""
        if self.config.reset_optimizer and t > 0:
            self.reset_optimizer()

    def prepare(self, t: int) -> None:
        """Before the steps of task t, also when a run resumes in the middle of it."""
        self.examples = self.stream.tasks[t].train
        if self.device.type == "cuda" and self.resident:
            self.examples = laid_out(self.examples, self.stream.input_shape)
        if self.memory and t > 0:
            self.mixture = None  # whose pool makes room
            self.mixture = Mixture(self.stream.tasks[:t], self.memory.kept)

    def epoch_plan(self, t: int, epoch: int) -> list[StepPlan]:
        """The steps of an epoch; from seed, task and epoch alone, so that a run can resume anywhere."""
        generator = torch.Generator().manual_seed(position_seed(self.config.seed, t, epoch))
        order = torch.randperm(len(self.stream.tasks[t].train), generator=generator)
        return [StepPlan(own, self.rehearsed(len(own), generator)) for own in order.split(self.config.batch_size)]

    def rehearsed(self, batch_size: int, generator: torch.Generator) -> Tensor | None:
        if not self.memory or not self.memory.kept:
            return None
        return self.memory.draw(self.memory.beside(batch_size), generator)

    def step(self, t: int, plan: StepPlan) -> Tensor:
        """One optimizer step; returns the task's loss, without the penalty."""
        loss = self.loss(t, plan)
        self.descend(loss)
        return loss.detach()

    def descend(self, objective: Tensor) -> None:
        self.optimizer.zero_grad()
        objective.backward()
        self.optimizer.step()

    def loss(self, t: int, plan: StepPlan) -> Tensor:
        task = self.stream.tasks[t]
        x, y = self.batch(self.examples, plan.own)
        if plan.others is None or self.mixture is None:
            return self.cross_entropy(*own_columns(self.outputs(x), y, task.head))
        old_x, old_y, first, last = self.mixture.batch(plan.others, self.device)
        columns = [torch.full_like(y, column) for column in (task.head.start, task.head.stop)]
        outputs = self.outputs(torch.cat([x, old_x]))
        outputs = only_own_head(outputs, torch.cat([columns[0], first]), torch.cat([columns[1], last]))
        return self.cross_entropy(outputs, torch.cat([y, old_y]))

    def cross_entropy(self, outputs: Tensor, y: Tensor) -> Tensor:
        return mean_cross_entropy(outputs, y, self.config.loss_clip)

    def outputs(self, x: Tensor) -> Tensor:
        with self.autocast():
            outputs: Tensor = self.model(x)
        return outputs if outputs.dtype == torch.float64 else outputs.float()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16")

    def end_task(self, t: int) -> None:
        """After the last epoch of task t."""
        check_weights(self.model)
        if self.memory:
            generator = torch.Generator().manual_seed(position_seed(self.config.seed, t, MEMORY))
            self.memory.remember(self.stream.tasks[t], generator)

    def penalty(self) -> Tensor:
        """What the past adds to the loss at the present weights, for the log."""
        return torch.zeros((), device=self.device)

    @property
    def step_kind(self) -> int:
        """Which kind of step comes next; a graph records one."""
        return 0

    @property
    def looks(self) -> bool:
        """Whether Python has to see the step that comes next."""
        return False

    def noted_steps(self, count: int) -> None:
        """``count`` steps were replayed from a graph, unseen by Python."""

    # -- answering ----------------------------------------------------------------------------------------------

    def accuracies(self, t: int, earlier: list[list[float]]) -> list[float]:
        """Accuracy on every task up to t, just after learning t; ``earlier`` holds those after each task before."""
        return self.accuracies_on(self.stream.tasks[: t + 1])

    def accuracies_on(self, tasks: Sequence[Task]) -> list[float]:
        """Share of each task's test examples answered rightly, among the task's own classes."""
        self.model.eval()
        right = torch.stack([self.right_answers(task) for task in tasks]).tolist()  # brought to the host in one go
        self.model.train()
        return [count / len(task.test) for count, task in zip(right, tasks, strict=True)]

    @torch.no_grad()
    def right_answers(self, task: Task) -> Tensor:
        right = torch.zeros((), dtype=torch.long, device=self.device)
        size = max(500, EVALUATED_AT_ONCE // max(1, torch.Size(self.stream.input_shape).numel()))
        for index in torch.arange(len(task.test), device=task.test.images.device).split(size):
            x, y = self.batch(task.test, index)
            right += (self.answers(x, task) == y).sum()
        return right

    def answers(self, x: Tensor, task: Task) -> Tensor:
        return self.outputs(x)[:, task.head].argmax(1) + int(task.head.start)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**state, "memory": self.memory.kept} if self.memory else state

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        fits.check_tensors(saved["model"], self.model.state_dict())
        state = fits.optimizer_state(saved["optimizer"], self.optimizer)
        kept = self.indices(saved["memory"]) if self.memory else []
        self.model.load_state_dict(saved["model"])
        # Settings follow from the config, and from the device, which may be another than before.
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        if self.memory:
            self.memory.kept = kept

    def indices(self, saved: object) -> list[Tensor]:
        """Of each task so far, which training examples a checkpoint says were kept."""
        return fits.indices(saved, [len(task.train) for task in self.stream.tasks])

    # -- parts --------------------------------------------------------------------------------------------------

    def new_model(self) -> nn.Module:
        """A network before training."""
        return self.make_model().to(self.device)

    def new_optimizer(self) -> torch.optim.Optimizer:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if self.config.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=self.config.learning_rate)
        return self.new_adam(parameters)

    def new_adam(self, parameters: list[nn.Parameter]) -> torch.optim.Adam:
        on_gpu = self.device.type == "cuda"  # there, steps are replayed from a graph
        rate, eps = self.config.learning_rate, self.config.adam_eps
        optimizer = torch.optim.Adam(parameters, rate, eps=eps, fused=True, capturable=on_gpu)
        # Torch warns of steps before the graph; there are three a task.
        optimizer._warned_capturable_if_run_uncaptured = True
        return optimizer

    def reset_optimizer(self) -> None:
        self.optimizer = self.new_optimizer()

    def batch(self, examples: Examples, index: Tensor) -> tuple[Tensor, Tensor]:
        x, y = examples.batch(index.to(examples.images.device))
        return x.to(self.device), y.to(self.device)


class Regularized(Learner):
    """Training under a regularizer of this library: EWC, online EWC, SI, MAS, ALASSO."""

    regularizer: Regularizer

    def new_model(self) -> nn.Module:
        model = super().new_model()
        self.regularizer = self.new_regularizer(model)
        return model

    def new_regularizer(self, model: nn.Module) -> Regularizer:
        method = METHODS[self.config.method]
        assert method.library is not None
        regularizer: Regularizer = loaded(method.library)(model, **method.fixed, **self.config.settings)
        return regularizer

    def new_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().new_optimizer()
        self.regularizer.attach(optimizer)
        return optimizer

    def new_adam(self, parameters: list[nn.Parameter]) -> torch.optim.Adam:
        if self.device.type != "cuda" or not isinstance(self.regularizer.surrogate, Springs):
            return super().new_adam(parameters)
        # Adam, penalty and path integral in one compiled pass over each tensor.
        return alasso.optim.Adam(parameters, self.config.learning_rate, eps=self.config.adam_eps, capturable=True)

    def reset_optimizer(self) -> None:
        self.regularizer.detach()
        super().reset_optimizer()

    def end_task(self, t: int) -> None:
        super().end_task(t)
        head = self.stream.tasks[t].head
        self.regularizer.consolidate(self.batches(t), head=lambda output: output[:, head])

    def batches(self, t: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The task's training examples once, labels counted from the head's first column."""
        task = self.stream.tasks[t]
        for index in torch.arange(len(task.train)).split(self.assessed_at_once):
            x, y = self.batch(task.train, index)
            yield x, y - task.head.start

    @property
    def assessed_at_once(self) -> int:
        """Examples in a piece of the pass over a task at its end: a batch; on a GPU more, if they are small."""
        if self.device.type != "cuda":
            return self.config.batch_size
        many = ASSESSED_AT_ONCE // max(1, torch.Size(self.stream.input_shape).numel())
        return max(self.config.batch_size, min(many, MOST_ASSESSED_AT_ONCE))

    @torch.no_grad()
    def penalty(self) -> Tensor:
        return self.regularizer.penalty()

    @property
    def step_kind(self) -> int:
        return self.regularizer.step_kind

    @property
    def looks(self) -> bool:
        return is_looked_at(self.regularizer.steps)

    def noted_steps(self, count: int) -> None:
        self.regularizer.steps += count

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "regularizer": self.regularizer.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        super().load_state_dict(saved)
        self.regularizer.load_state_dict(saved["regularizer"])


class Merged(Regularized):
    """IMM: weights are merged after each task, so the optimizer's moments, which belong to others, are dropped."""

    drop: DropTransfer | None = None  # while nodes are dropped

    def new_regularizer(self, model: nn.Module) -> Regularizer:
        settings = dict(self.config.settings)
        settings["last_weight"] = settings["last_weight"] or None
        self.drop_share = float(settings.pop("drop"))
        return IMM(model, **METHODS[self.config.method].fixed, **settings)

    def begin_task(self, t: int) -> None:
        assert isinstance(self.regularizer, IMM)
        self.regularizer.begin_task()
        if t > 0:
            self.reset_optimizer()

    def prepare(self, t: int) -> None:
        super().prepare(t)
        if t > 0 and "drop" in self.config.settings["transfer"]:
            self.drop = self.drop_to_the_anchor()

    def drop_to_the_anchor(self) -> DropTransfer:
        """Drops nodes to where the task began, which may be many steps ago when a run resumes."""
        anchor = self.regularizer.anchor()
        weights = {name: p.detach().clone() for name, p in self.model.named_parameters() if name in anchor}
        self.put(anchor)
        drop = DropTransfer(self.model, self.drop_share)
        self.put(weights)
        return drop

    def end_task(self, t: int) -> None:
        if self.drop:
            self.drop.remove()
            self.drop = None
        super().end_task(t)

    @torch.no_grad()
    def put(self, weights: Mapping[str, Tensor]) -> None:
        for name, value in weights.items():
            self.model.get_parameter(name).copy_(value)


FRESH_NETWORK = 1 << 22  # where in the seeds' space the fresh networks lie: beyond any epoch


class SingleTask(Learner):
    """The paper's first upper bound, a fresh network for each task: nothing can be forgotten, nothing is shared."""

    def begin_task(self, t: int) -> None:
        if t > 0:
            # From seed and task alone, so that it starts the same whatever else draws random numbers meanwhile.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(position_seed(self.config.seed, t, FRESH_NETWORK))
                self.model = self.new_model()
            self.reset_optimizer()

    def accuracies(self, t: int, earlier: list[list[float]]) -> list[float]:
        """Each earlier task keeps its own network, and so its accuracy."""
        return [*(earlier[-1] if earlier else []), *self.accuracies_on([self.stream.tasks[t]])]


class MultiTask(Learner):
    """The second one: mini-batches mixed evenly from all tasks so far; as many steps a task as every other method."""

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

    def loss(self, t: int, plan: StepPlan) -> Tensor:
        assert self.mixture is not None and plan.others is not None
        x, y, first, last = self.mixture.batch(plan.others, self.device)
        return self.cross_entropy(only_own_head(self.outputs(x), first, last), y)


def own_columns(outputs: Tensor, y: Tensor, head: slice) -> tuple[Tensor, Tensor]:
    """Outputs and labels of a task's own columns; no work for a GPU where these are all."""
    if outputs.shape[1] == head.stop - head.start:
        return outputs, y
    return outputs[:, head], y - head.start


def mean_cross_entropy(outputs: Tensor, y: Tensor, clip: float) -> Tensor:
    """With a clip, the probability of the right class counts as no less than ``clip`` and no more than 1 − ``clip``,
    and beyond these an example has no gradient, as in Keras.
    """
    if not clip:
        return nn.functional.cross_entropy(outputs, y)
    each = nn.functional.cross_entropy(outputs, y, reduction="none")
    return each.clamp(-math.log1p(-clip), -math.log(clip)).mean()


def laid_out(examples: Examples, input_shape: tuple[int, ...]) -> Examples:
    """The same examples as a GPU's steps want them, where there is room: a batch is then one gather of floats.

    Large images have their channels last, with which convolutions are faster.
    """
    device = examples.images.device
    needed = 4 * len(examples) * torch.Size(input_shape).numel()
    # By the size of the machine, not by what is free at the moment: a result may not depend on that.
    if device.type == "cuda" and needed > torch.cuda.get_device_properties(device).total_memory // 8:
        return examples
    x, y = examples.batch(torch.arange(len(examples), device=device))
    if x.dim() == 4 and x[0, 0].numel() >= LARGE_IMAGE:
        x = x.contiguous(memory_format=torch.channels_last)
    return Examples(x, y)


def check_weights(model: nn.Module) -> None:
    """Before they are measured, or become what the next task is held to."""
    finite = {name: torch.isfinite(parameter).all() for name, parameter in model.named_parameters()}
    if not torch.stack(list(finite.values())).all():  # a GPU is waited for once
        name = next(name for name, sound in finite.items() if not sound)
        advice = "are the inputs finite? A smaller learning rate, c or lam helps"
        raise DivergedError(f"{name} is no longer finite: the training diverged ({advice})")


MEMORY = 1 << 20  # where in the seeds' space the choice of memories lies: beyond any epoch


def position_seed(*numbers: int) -> int:
    """One seed for a place in a run: neighbouring places get unrelated ones."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1
