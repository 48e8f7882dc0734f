"""Lanes: several runs of one shape, trained as one stacked network; step for step what each would do alone.

A lane is a learner as it would be by itself. Its weights, Adam's moments, its anchor and its path integral are views
into stacked tensors with one row a lane, so consolidating, answering and saving stay the learner's own code. Only the
step is made for all lanes at once: one gather, one forward and one backward pass of the network with a leading axis
(`torch.func.vmap`), and one pass over each tensor for penalty, Adam and ω. On a GPU the step is recorded once and
replayed for the whole run: whatever changes from task to task lies in buffers that are written anew.

Every method of this kind is a spring with a stiffness of its own on each side, so methods share a stack, too.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from alasso import kernels
from alasso.bench.config import RunConfig
from alasso.bench.learners import Learner, Regularized, StepPlan
from alasso.bench.streams import Examples, Stream
from alasso.methods.surrogate import two_sided_spring_grad
from alasso.moves import adam_direction, adam_moments, bias_corrections

#: Methods whose step is: gather, cross-entropy, backward, spring, Adam.
STACKABLE = (
    "sgd",
    "sgd-dropout",
    "ewc",
    "online-ewc",
    "si",
    "mas",
    "imm-mean",
    "imm-mode",
    "alasso",
    "alasso-memory",
    "single-task",
    "multi-task",
)
#: Fields of a config that lanes of one stack may differ in.
FREE_FIELDS = ("seed", "method", "settings", "learning_rate", "reset_optimizer", "permute_first")
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # torch's defaults, which all learners use
BYTES_A_WEIGHT = 64  # 8 float32 tensors in the step, Ω, side, and what comes and goes when a lane consolidates
MOST_LANES = 16  # more gain nothing on the GPUs it was measured on
WARM_UP = 3  # real steps, made one by one, before one is recorded


# -- which runs go together -------------------------------------------------------------------------------------


def shape_of(config: RunConfig) -> tuple[Any, ...] | None:
    """Runs with the same shape can be lanes of one stack; None: a run that has to go by itself."""
    if config.method not in STACKABLE or config.optimizer != "adam":
        return None
    if "drop" in str(config.settings.get("transfer", "")) or config.settings.get("labels") == "sampled":
        return None
    if (config.memory or config.method == "multi-task") and not config.benchmark.startswith("permuted-"):
        return None
    fixed = {name: value for name, value in config.to_json().items() if name not in FREE_FIELDS}
    return (*fixed.items(), config.method == "sgd-dropout")


def grouped(configs: Sequence[RunConfig], lanes: int) -> list[list[RunConfig]]:
    """The configs in stacks of at most ``lanes``, in the order in which each stack's first one comes."""
    groups: dict[Any, list[RunConfig]] = {}
    for config in configs:
        shape = shape_of(config) if lanes > 1 else None
        groups.setdefault(config.name if shape is None else repr(shape), []).append(config)
    stacks = []
    for group in groups.values():
        count = -(-len(group) // lanes)  # as even as can be: 17 runs are 9 + 8 and not 16 + 1
        size = -(-len(group) // count)
        stacks += [group[i : i + size] for i in range(0, len(group), size)]
    return stacks


def stackable(learner: Learner) -> bool:
    """Whether this learner can be a lane: its kind of step, its examples on the device, no state beside its weights."""
    return (
        shape_of(learner.config) is not None
        and learner.can_be_recorded
        and not any(True for _ in learner.model.buffers())
        and all(p.requires_grad for p in learner.model.parameters())
    )


def most_on(device: torch.device) -> int:
    """How many lanes are worth stacking. A CPU is kept busy by one."""
    return MOST_LANES if device.type == "cuda" else 1


def can_share_a_stack(learners: Sequence[Learner]) -> bool:
    """Batches mixed from several tasks are gathered only from images that all lanes have in common."""
    mixed = any(learner.memory is not None or learner.config.method == "multi-task" for learner in learners)
    return not mixed or SharedImages.of([learner.stream for learner in learners]) is not None


def that_fit(learner: Learner) -> int:
    """How many lanes like this one the device's memory holds."""
    device = learner.device
    if device.type != "cuda":
        return MOST_LANES
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.random.fork_rng(devices=[device]):
        learner.prepare(0)
        learner.loss(0, learner.epoch_plan(0, 0)[0])
    activations = torch.cuda.max_memory_allocated(device) - before
    weights = sum(p.numel() for p in learner.model.parameters())
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - before
    return max(1, int(0.8 * free / (BYTES_A_WEIGHT * weights + 2 * activations)))


# -- the stack --------------------------------------------------------------------------------------------------


class Slot(NamedTuple):
    """One parameter of all lanes: tensors with a leading axis, a row a lane."""

    theta: Tensor
    m: Tensor
    v: Tensor
    anchor: Tensor
    k_minus: Tensor
    k_plus: Tensor
    path: Tensor

    @staticmethod
    def like(leading: Tensor) -> Slot:
        """All in the memory layout of ``leading``."""
        return Slot(*(torch.zeros_like(leading) for _ in Slot._fields))


class Pace(NamedTuple):
    """How fast each lane goes in this step: Adam's step size and √(1 − β₂ᵗ), and whether it goes at all; (lanes, 1)."""

    step_size: Tensor
    root: Tensor
    active: Tensor


class Batch(NamedTuple):
    """What one step is made on: for each lane which examples (and, in mixed batches, of which task), and their share.

    Lanes may have fewer examples, or no step left: what is padded has the share 0.
    """

    example: Tensor  # (lanes, batch)
    task: Tensor  # (lanes, batch)
    share: Tensor  # (lanes, batch); a lane's shares add up to 1, or to 0 if it makes no step

    def at(self, i: int) -> Batch:
        """Of an epoch's steps, the i-th."""
        return Batch(*(part[i] for part in self))

    def to(self, device: torch.device) -> Batch:
        """From pinned memory, so that the host need not wait until the device is done with the epoch before."""
        on_gpu = device.type == "cuda"
        return Batch(*((part.pin_memory() if on_gpu else part).to(device, non_blocking=on_gpu) for part in self))


class Stack:
    """The stacked tensors of several learners, and the step that moves them all."""

    def __init__(self, learners: Sequence[Learner]) -> None:
        self.learners = learners
        self.device = learners[0].device
        self.network = copy.deepcopy(learners[0].model).to("meta")  # what it computes; the weights come from the slots
        self.laid_out = False
        self.beside = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.steps = torch.zeros(len(learners), 1, device=self.device)
        rates = [[learner.config.learning_rate] for learner in learners]
        dtype = next(learners[0].model.parameters()).dtype
        self.rate = torch.tensor(rates, device=self.device, dtype=dtype)
        self.slots = {
            name: Slot.like(torch.empty(len(learners), *p.shape, dtype=p.dtype, device=self.device))
            for name, p in learners[0].model.named_parameters()
        }
        self.kept: list[Tensor] = []

    # -- learners in and out of the stack -------------------------------------------------------------------

    @torch.no_grad()
    def adopt(self) -> None:
        """Take over what the learners have now, and make it views: after they were made, loaded, or ended a task."""
        for lane, learner in enumerate(self.learners):
            for name, parameter in learner.model.named_parameters():
                row = Slot(*(tensor[lane] for tensor in self.slots[name]))
                parameter.data = taken(row.theta, parameter.data)
                self._adopt_moments(learner.optimizer, parameter, row, lane)
                if isinstance(learner, Regularized):
                    self._adopt_spring(learner, name, parameter, row)

    def _adopt_moments(self, optimizer: torch.optim.Optimizer, p: nn.Parameter, row: Slot, lane: int) -> None:
        state = optimizer.state[p]
        if not state:  # no step yet
            row.m.zero_()
            row.v.zero_()
            self.steps[lane] = 0
        else:
            taken(row.m, state["exp_avg"])
            taken(row.v, state["exp_avg_sq"])
            self.steps[lane] = state["step"].clone()  # it may be this very place
        state.update(step=self.steps[lane, 0], exp_avg=row.m, exp_avg_sq=row.v)

    def _adopt_spring(self, learner: Regularized, name: str, parameter: nn.Parameter, row: Slot) -> None:
        regularizer = learner.regularizer
        if regularizer.tasks == 0 and regularizer.steps == 0:
            regularizer.reanchor()  # as the hooks do before the first step
        state = regularizer.state_of(name, parameter)
        for slot, stiffness in zip((row.k_minus, row.k_plus), regularizer.surrogate.stiffness(state), strict=True):
            # What has no past has no penalty, whatever a method's settings say.
            slot.copy_(stiffness) if regularizer.tasks else slot.zero_()
        views = {"anchor": taken(row.anchor, state.anchor)}
        if regularizer.surrogate.observes_path:
            views["path"] = taken(row.path, state.path)
        regularizer.adopt(name, state._replace(**views))

    # -- the step -------------------------------------------------------------------------------------------

    def step(self, x: Tensor, y: Tensor, share: Tensor, heads: Sequence[slice]) -> Tensor:
        """One step of every lane on inputs (lanes, batch, …); returns each lane's loss, without the penalty.

        Labels count from the first column of the lane's head.
        """
        pace = Pace(*self.kernel(pace_of_step_)(self.steps, self.rate, share))
        leaves = {name: self.leaf(slot.theta) for name, slot in self.slots.items()}
        losses = self.losses(leaves, x, y, share, heads)
        if self.laid_out:
            for name, leaf in leaves.items():
                leaf.register_hook(partial(self.move, name, pace))
        gradients = torch.autograd.grad(losses, list(leaves.values()), torch.ones_like(losses))
        if not self.laid_out:
            self.lay_out_like(dict(zip(leaves, gradients, strict=True)))
            for name, gradient in zip(leaves, gradients, strict=True):
                self.move(name, pace, gradient)
        self.join()
        return losses.detach()

    def leaf(self, theta: Tensor) -> Tensor:
        """What gradients are taken by; one lane alone needs no leading axis."""
        return (theta[0] if len(self.learners) == 1 else theta).detach().requires_grad_()

    def losses(self, leaves: dict[str, Tensor], x: Tensor, y: Tensor, share: Tensor, heads: Sequence[slice]) -> Tensor:
        outputs = self.outputs(leaves, x)
        if any(head != slice(0, outputs.shape[2]) for head in heads):
            outputs = torch.stack([lane[:, head] for lane, head in zip(outputs, heads, strict=True)])
        losses: Tensor = self.kernel(shared_cross_entropy)(outputs, y, share)
        return losses

    def outputs(self, leaves: dict[str, Tensor], x: Tensor) -> Tensor:
        bf16 = self.learners[0].config.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            if len(self.learners) == 1:
                outputs: Tensor = functional_call(self.network, leaves, x[0])[None]
            else:
                outputs = vmap(lambda w, inputs: functional_call(self.network, w, inputs), randomness="different")(
                    leaves, x
                )
        return outputs if outputs.dtype == torch.float64 else outputs.float()

    # -- moving one tensor, as soon as its gradient is there: memory is busy with it while the next products are made

    @torch.no_grad()
    def move(self, name: str, pace: Pace, gradient: Tensor) -> None:
        slot = self.slots[name]
        if gradient.dim() < slot.theta.dim():
            gradient = gradient[None]
        with self.aside(gradient):
            rows = [*(in_rows(tensor) for tensor in slot), in_rows(gradient, slot.theta)]
            self.kernel(spring_and_adam_)(*rows, *pace)

    @contextmanager
    def aside(self, *needed: Tensor) -> Iterator[None]:
        """On a stream of its own, on a GPU; what is ``needed`` there is kept until :meth:`join`."""
        if self.beside is None:
            yield
            return
        self.kept += needed
        self.beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.beside):
            yield

    def join(self) -> None:
        if self.beside is not None:
            torch.cuda.current_stream().wait_stream(self.beside)
            self.kept.clear()

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return compiled(function) if self.device.type == "cuda" else function

    @torch.no_grad()
    def lay_out_like(self, gradients: dict[str, Tensor]) -> None:
        """Bring the tensors into the memory layout their gradients come in, so that a pass reads all in one order."""
        for name, gradient in gradients.items():
            slot = self.slots[name]
            if len(self.learners) > 1 and gradient.stride() != slot.theta.stride() and is_dense(gradient):
                self.slots[name] = Slot(*(torch.empty_like(gradient).copy_(tensor) for tensor in slot))
        self.laid_out = True
        self.adopt()


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """For a GPU, where each kernel saved is a launch saved; as it is where there is no compiler."""
    if kernels.no_compiler("cuda"):
        return function
    # What the compiler decided about a softmax over ten classes is not for the user to act on.
    warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
    return torch.compile(function, dynamic=True, fullgraph=True)


def pace_of_step_(steps: Tensor, rate: Tensor, share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One step further: Adam's step size lr / (1 − β₁ᵗ) and √(1 − β₂ᵗ) of each lane, and whether it makes this step."""
    active = share.sum(1, keepdim=True) > 0
    steps += active
    correction1, correction2 = bias_corrections(steps.double(), math.log(BETA1), math.log(BETA2))
    return (rate / correction1).to(rate.dtype), correction2.sqrt().to(rate.dtype), active


def spring_and_adam_(
    theta: Tensor,
    m: Tensor,
    v: Tensor,
    anchor: Tensor,
    k_minus: Tensor,
    k_plus: Tensor,
    path: Tensor,
    grad: Tensor,
    step_size: Tensor,
    root: Tensor,
    active: Tensor,
) -> None:
    """Penalty, Adam and ω in one pass; a lane that is not active stays as it is."""
    total = grad + two_sided_spring_grad(theta - anchor, k_minus, k_plus)
    new_m, new_v = adam_moments(total, m, v, 1 - BETA1, 1 - BETA2)
    new_theta = theta - step_size * adam_direction(new_m, new_v, root, EPSILON)
    new_path = path - grad * (new_theta - theta)
    for tensor, new in ((theta, new_theta), (m, new_m), (v, new_v), (path, new_path)):
        tensor.copy_(torch.where(active, new, tensor))


def shared_cross_entropy(outputs: Tensor, y: Tensor, share: Tensor) -> Tensor:
    """For each lane the cross-entropy of its examples, each weighed with its share."""
    each = nn.functional.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="none")
    return (each.view_as(share) * share).sum(1)


def taken(slot: Tensor, content: Tensor) -> Tensor:
    """The slot with the content in it; nothing to do if it is the content's own place."""
    if slot.data_ptr() != content.data_ptr():
        slot.copy_(content)
    return slot


def is_dense(tensor: Tensor) -> bool:
    """Whether a lane's rows fill memory without gaps, lanes one after another, in whatever order of the other axes."""
    row = tensor[0].numel()
    return tensor.stride(0) == row and torch.empty_like(tensor[0]).stride() == tensor[0].stride()


def in_rows(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """(lanes, weights), in the order in which they lie in memory; a tensor laid out unlike ``like`` is copied first."""
    if like is not None and tensor.stride() != like.stride():
        tensor = torch.empty_like(like).copy_(tensor)
    lanes, count = len(tensor), tensor[0].numel()
    return tensor.as_strided((lanes, count), (count, 1))


# -- examples of all lanes --------------------------------------------------------------------------------------


@dataclass
class SharedImages:
    """Lanes that permute the same images: one gather, with an order of pixels for each lane and task."""

    examples: Examples
    pixels: Tensor  # (lanes, tasks, pixels)

    @staticmethod
    def of(streams: Sequence[Stream]) -> SharedImages | None:
        first = streams[0].tasks[0].train
        for task in (task for stream in streams for task in stream.tasks):
            one = task.train
            shared = all(same_place(getattr(one, part), getattr(first, part)) for part in ("images", "labels", "rows"))
            if not shared or one.pixels is None or task.head != streams[0].tasks[0].head:
                return None
        orders = [torch.stack([task.train.pixels for task in stream.tasks]) for stream in streams]  # type: ignore[misc]
        return SharedImages(first, torch.stack(orders))

    recorded_for: int = 0  # one recorded step serves all tasks: which one it is comes with the batch

    def begin(self, t: int) -> None:
        pass

    def gather(self, batch: Batch) -> tuple[Tensor, Tensor]:
        rows = batch.example if self.examples.rows is None else self.examples.rows[batch.example]
        gather = compiled(permuted_examples) if rows.is_cuda else permuted_examples
        x, y = gather(self.examples.images, self.examples.labels, self.pixels, rows, batch.task)
        return x / self.examples.scale, y


def permuted_examples(
    images: Tensor, labels: Tensor, pixels: Tensor, rows: Tensor, task: Tensor
) -> tuple[Tensor, Tensor]:
    lane = torch.arange(len(rows), device=rows.device)[:, None]
    return images[rows[:, :, None], pixels[lane, task]].float(), labels[rows]


@dataclass
class OwnExamples:
    """Lanes with examples of their own, gathered lane by lane."""

    streams: Sequence[Stream]
    recorded_for: int = 0  # the task: other images, other columns of the head

    def begin(self, t: int) -> None:
        self.recorded_for = t

    def gather(self, batch: Batch) -> tuple[Tensor, Tensor]:
        pairs = [
            s.tasks[self.recorded_for].train.batch(index) for s, index in zip(self.streams, batch.example, strict=True)
        ]
        heads = [stream.tasks[self.recorded_for].head.start for stream in self.streams]
        labels = [y - start for (_, y), start in zip(pairs, heads, strict=True)]
        return torch.stack([x for x, _ in pairs]), torch.stack(labels)


def same_place(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


# -- steps in the training loop ---------------------------------------------------------------------------------


class StackedSteps:
    """The steps of all lanes, made together; on a GPU replayed from a CUDA graph."""

    def __init__(self, learners: Sequence[Learner]) -> None:
        self.learners = learners
        self.device = learners[0].device
        self.stack = Stack(learners)
        self.loss_sum = torch.zeros(len(learners), dtype=torch.float64, device=self.device)
        streams = [learner.stream for learner in learners]
        self.source = SharedImages.of(streams) or OwnExamples(streams)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.recorded_for: object = None
        self.made = 0

    def begin(self, t: int) -> None:
        """Before the steps of task t."""
        self.t = t
        self.stack.adopt()
        self.source.begin(t)

    def begin_epoch(self, plans: Sequence[Sequence[StepPlan]]) -> None:
        """The epoch's plans of all lanes, brought to the device in one go."""
        lanes = zip(self.learners, plans, strict=True)
        epoch = padded([learner.pairs(self.t, steps) for learner, steps in lanes], self.stack.rate.dtype)
        self.changed = [[True, *differs(part[1:], part[:-1])] for part in epoch]
        self.epoch = epoch.to(self.device)
        self.steps_of_lane = [len(steps) for steps in plans]
        self.in_buffers = -1
        purpose = (self.source.recorded_for, epoch.example.shape[1:])
        if purpose != self.recorded_for:
            self.graph, self.recorded_for, self.made = None, purpose, 0

    def step(self, i: int) -> None:
        """Step i of the epoch, of every lane that has one."""
        for learner, count in zip(self.learners, self.steps_of_lane, strict=True):
            if i < count:
                learner.noted_steps(1)
        if self.graph is not None:
            for buffer, part, changed in zip(self.buffers, self.epoch, self.changed, strict=True):
                if changed[i] or self.in_buffers != i - 1:
                    buffer.copy_(part[i])
            self.in_buffers = i
            self.graph.replay()
        elif self.device.type == "cuda":
            self._step_before_recording(self.epoch.at(i))
        else:
            self._step(self.epoch.at(i))

    def _step(self, batch: Batch) -> None:
        x, y = self.source.gather(batch)
        heads = [learner.stream.tasks[self.t].head for learner in self.learners]
        self.loss_sum += self.stack.step(x, y, batch.share, heads)

    def _step_before_recording(self, batch: Batch) -> None:
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(batch)
        torch.cuda.current_stream().wait_stream(stream)
        self.made += 1
        if self.made >= WARM_UP:
            self.buffers = Batch(*(part.clone() for part in batch))
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # computes nothing; the first replay is the next step
                self._step(self.buffers)
            self.graph = graph


def padded(lanes: Sequence[tuple[Tensor, Sequence[int]]], dtype: torch.dtype) -> Batch:
    """Steps of all lanes as one, filled up with what has no share. A lane comes as pairs (task, example) of all its
    steps in a row, and how many each step has.

    >>> padded([(torch.tensor([[0, 7], [1, 8], [0, 9]]), [2, 1])], torch.float32).share.tolist()
    [[[0.5, 0.5]], [[1.0, 0.0]]]
    """
    count = max(len(sizes) for _, sizes in lanes)
    width = max(max(sizes) for _, sizes in lanes)
    task, example = (torch.zeros(count, len(lanes), width, dtype=torch.long) for _ in range(2))
    share = torch.zeros(count, len(lanes), width, dtype=dtype)
    for lane, (pairs, sizes) in enumerate(lanes):
        counts = torch.tensor(sizes)[:, None]
        filled = torch.arange(width) < counts
        for part, column in ((task, 0), (example, 1)):
            part[: len(sizes), lane] = torch.zeros(len(sizes), width, dtype=torch.long).masked_scatter(
                filled, pairs[:, column]
            )
        share[: len(sizes), lane] = filled.to(dtype) / counts
    return Batch(example, task, share)


def differs(one: Tensor, other: Tensor) -> list[bool]:
    """Row by row."""
    different: list[bool] = (one != other).flatten(1).any(1).tolist()
    return different
