"""Lanes: several runs of one shape, trained as one stacked network; step for step what each would do alone.

A lane is a learner as it would be by itself. Its weights, Adam's moments, its anchor and its path integral are views
into stacked tensors with one row a lane, so consolidating, answering and saving stay the learner's own code. Only the
step is made for all lanes at once: one gather, one forward and one backward pass of the network with a leading axis
(`torch.func.vmap`), and one pass over each tensor for penalty, Adam and ω. On a GPU the step is recorded once and
replayed for the whole run: whatever changes from task to task lies in buffers that are written anew.

Every method of this kind is a spring with a stiffness of its own on each side, so methods share a stack, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alasso.bench.config import RunConfig
from alasso.bench.lane_batches import Batch, OwnExamples, SharedImages, padded
from alasso.bench.learners import Learner, StepPlan
from alasso.bench.stack import Stack

WARM_UP = 3  # real steps, made one by one, before one is recorded
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
BYTES_A_WEIGHT = 64  # 8 float32 tensors in the step, Ω, side, and what comes and goes when a lane consolidates
MOST_LANES = 16  # more gain nothing on the GPUs it was measured on


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


def differs(one: Tensor, other: Tensor) -> list[bool]:
    """Row by row."""
    different: list[bool] = (one != other).flatten(1).any(1).tolist()
    return different
