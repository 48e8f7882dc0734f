"""Lanes: several runs of one shape, trained as one stacked network; step for step what each would do alone.

A lane is a learner as it would be by itself. Its weights, Adam's moments, its anchor and its path integral are views
into stacked tensors with one row a lane, so consolidating, answering and saving stay the learner's own code. Only the
step is made for all lanes at once: one gather, one forward and one backward pass of the network with a leading axis
(`torch.func.vmap`), and one pass over each tensor for penalty, Adam and ω. On a GPU steps are recorded, some in a row,
and replayed: recorded once for the whole run where all tasks permute the same images, else once a task. What changes
from step to step lies in buffers that are written anew.

Every method of this kind is a spring, with a stiffness of its own on each side or none at all, so methods share a
stack, too. VCL's networks are others, with a mean and a log-variance for each weight: its lanes share a stack with one
another. So do those of IMM with drop-transfer, whose networks are given, beside their weights, those at the beginning
of the task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alasso.bench.config import RunConfig
from alasso.bench.learners.base import Learner, StepPlan, drops_nodes
from alasso.bench.stacking.lane_batches import Batch, OwnExamples, SharedImages, padded
from alasso.bench.stacking.lane_drops import can_drop
from alasso.bench.stacking.lane_gradients import LARGE_IMAGE
from alasso.bench.stacking.resizing import bytes_at_size, lanes_in, room_on
from alasso.bench.stacking.stack import Stack
from alasso.vcl.layers import BayesLayer

WARM_UP = 3  # real steps, made one by one, before some are recorded
TOGETHER = 5  # steps in one recording: what a replay costs the host, and the gap before the next one, is paid once
#: Methods whose step is: gather, cross-entropy, backward, spring, Adam. By what a pass over their weights has to read
#: and write: no spring at all, one that is the same on both sides, or sides and a path, too.
SPRINGLESS = ("sgd", "sgd-dropout", "single-task", "multi-task")
EVEN_SPRINGS = ("ewc", "online-ewc", "mas", "imm-mean", "imm-mode")
SPRINGS_AND_PATHS = ("si", "alasso", "alasso-memory")
STACKABLE = SPRINGLESS + EVEN_SPRINGS + SPRINGS_AND_PATHS
#: Those whose weights are Gaussians: gather, sampled cross-entropy, backward, KL term, Adam.
VARIATIONAL = ("vcl", "vcl-coreset")
#: Fields of a config that lanes of one stack may differ in.
FREE_FIELDS = ("seed", "method", "settings", "learning_rate", "adam_eps", "reset_optimizer", "permute_first")
BYTES_A_WEIGHT = 64  # 7 float32 tensors and the side in the step, Ω, and what comes and goes when a lane consolidates
MOST_LANES = 16  # more gain nothing on the GPUs it was measured on


def shape_of(config: RunConfig) -> tuple[Any, ...] | None:
    """Runs with the same shape can be lanes of one stack; None: a run that has to go by itself."""
    if config.method not in STACKABLE + VARIATIONAL or config.optimizer != "adam":
        return None
    if config.settings.get("labels") == "sampled":
        return None
    if (config.memory or config.method == "multi-task") and not config.benchmark.startswith("permuted-"):
        return None
    fixed = {name: value for name, value in config.to_json().items() if name not in FREE_FIELDS}
    samples = config.settings["train_samples"] if config.method in VARIATIONAL else None
    return (*fixed.items(), config.method == "sgd-dropout", samples, drops_nodes(config))


def grouped(configs: Sequence[RunConfig], lanes: int) -> list[list[RunConfig]]:
    """The configs in stacks of at most ``lanes``, shapes in the order in which their first ones come.

    Where those of one shape are more than one stack holds, methods with like passes go together, the lightest first.
    """
    groups: dict[Any, list[RunConfig]] = {}
    for config in configs:
        shape = shape_of(config) if lanes > 1 and not has_large_images(config) else None
        groups.setdefault(config.name if shape is None else repr(shape), []).append(config)
    stacks = []
    for group in groups.values():
        if len(group) > lanes:
            group.sort(key=pass_of)
        count = -(-len(group) // lanes)  # as even as can be: 17 runs are 9 + 8 and not 16 + 1
        size = -(-len(group) // count)
        stacks += [group[i : i + size] for i in range(0, len(group), size)]
    return stacks


def has_large_images(config: RunConfig) -> bool:
    """Whether one run fills the GPU. Alone it has its images with the channels last, which a stack cannot have."""
    return config.image_size is not None and config.image_size**2 >= LARGE_IMAGE


def pass_of(config: RunConfig) -> int:
    """How much the pass over its weights reads and writes, as a rank."""
    kinds = (SPRINGLESS, EVEN_SPRINGS, SPRINGS_AND_PATHS, VARIATIONAL)
    return next(rank for rank, methods in enumerate(kinds) if config.method in methods)


def stackable(learner: Learner) -> bool:
    """Whether this learner can be a lane: its kind of step, its examples on the device, no state beside its weights."""
    return (
        shape_of(learner.config) is not None
        and learner.can_be_recorded
        and not has_state_of_its_own(learner.model)
        and all(p.requires_grad for p in learner.model.parameters())
        and not has_tied_weights(learner.model)
        and (not drops_nodes(learner.config) or can_drop(learner.model))
    )


def has_state_of_its_own(model: nn.Module) -> bool:
    """Whether a forward pass may read or write something beside the weights. It does not ask for priors."""
    layers = (module for module in model.modules() if not isinstance(module, BayesLayer))
    return any(True for layer in layers for _ in layer.buffers(recurse=False))


def has_tied_weights(model: nn.Module) -> bool:
    """Whether one parameter goes by several names."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return len(names) > sum(1 for _ in model.parameters())


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
        learner.trial_loss()
    activations = torch.cuda.max_memory_allocated(device) - before
    weights = sum(p.numel() for p in learner.model.parameters())
    images = max(bytes_at_size(task.train) for task in learner.stream.tasks)
    # Forward and backward, and each once more: what is recorded has memory of its own.
    return lanes_in(room_on(device), BYTES_A_WEIGHT * weights + 4 * activations, images)


# -- steps in the training loop ---------------------------------------------------------------------------------


def add_and_advance_(loss_sum: Tensor, losses: Tensor, cursor: Tensor) -> None:
    loss_sum += losses
    cursor += 1


class StackedSteps:
    """The steps of all lanes, made together; on a GPU replayed from a CUDA graph."""

    def __init__(self, learners: Sequence[Learner], goes_on: bool = False) -> None:
        self.learners = learners
        self.device = learners[0].device
        self.stack = Stack(learners, goes_on)
        self.loss_sum = torch.zeros(len(learners), dtype=torch.float64, device=self.device)
        streams = [learner.stream for learner in learners]
        self.source = SharedImages.of(streams) or OwnExamples(streams)
        self.cursor = torch.zeros(1, dtype=torch.long, device=self.device)  # the epoch's step that comes next
        self.columns = torch.empty(0, device=self.device)
        if self.device.type == "cuda":
            self.warm_up = torch.cuda.Stream(self.device)
        self.recordings: dict[int, torch.cuda.CUDAGraph] = {}  # by how many steps each makes, the longest first
        self.recorded_for: object = None
        self.made = 0

    def begin(self, t: int) -> None:
        """Before the steps of task t."""
        self.t = t
        self.stack.adopt()
        if isinstance(self.source, OwnExamples):
            self.recordings, self.recorded_for = {}, None  # they read the images of the task before, which make way
        self.source.begin(t)
        heads = [learner.stream.tasks[t].head for learner in self.learners]
        columns = torch.tensor([range(head.start, head.stop) for head in heads])
        if columns.shape != self.columns.shape:
            self.columns, self.recorded_for = torch.empty_like(columns, device=self.device), None
        self.columns.copy_(columns)

    def planned(self, plans: Sequence[Sequence[StepPlan]]) -> Batch:
        """The plans of all lanes as one, still on the host: made while the device is busy with the epoch before."""
        lanes = zip(self.learners, plans, strict=True)
        pairs = [learner.pairs(self.t, steps) for learner, steps in lanes]
        # Also where a task has less than a batch: what is recorded and compiled is for one width.
        epoch = padded(pairs, self.stack.rate.dtype, self.learners[0].config.batch_size)
        return epoch.pinned() if self.device.type == "cuda" else epoch

    def begin_epoch(self, planned: Batch, steps_of_lane: Sequence[int]) -> None:
        """Bring an epoch's plans to the device in one go, to where the recorded step looks for them."""
        self.steps_of_lane = steps_of_lane
        purpose = (self.source.recorded_for, planned.example.shape)
        if purpose != self.recorded_for:
            self.epoch = Batch(*(torch.empty_like(part, device=self.device) for part in planned))
            self.ready = self.source.room_for(self.epoch, self.columns)
            self.recordings, self.recorded_for, self.made = {}, purpose, 0
        for here, part in zip(self.epoch, planned, strict=True):
            here.copy_(part, non_blocking=True)
        self.go_to(0)

    def go_to(self, i: int) -> None:
        self.cursor.fill_(i)
        self.next_step = i
        self.fetch()

    def fetch(self) -> None:
        """Gather the step that the cursor stands at; it lies ready in the same place each time."""
        self.source.fetch(self.ready, self.cursor, self.epoch, self.stack.kernel)

    def step(self, i: int) -> int:
        """Step i of the epoch, of every lane that has one, and those that are recorded with it; returns how many."""
        if i != self.next_step:
            self.go_to(i)
        made = self._make_steps(max(self.steps_of_lane) - i)
        self.next_step = i + made
        for learner, count in zip(self.learners, self.steps_of_lane, strict=True):
            learner.noted_steps(max(0, min(count, self.next_step) - i))
        return made

    def _make_steps(self, at_most: int) -> int:
        for count, recording in self.recordings.items():
            if count <= at_most:
                recording.replay()
                return count
        if self.device.type == "cuda":
            self._step_before_recording()
        else:
            self._step()
        return 1

    def _step(self) -> None:
        """The step that lies ready. Nothing of it is decided on the host."""
        self.stack.step(self.ready, self._note_losses_and_fetch_the_next)

    def _note_losses_and_fetch_the_next(self, losses: Tensor) -> None:
        self.stack.kernel(add_and_advance_)(self.loss_sum, losses, self.cursor)
        self.fetch()

    def _step_before_recording(self) -> None:
        self.warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.warm_up):
            self._step()
        torch.cuda.current_stream().wait_stream(self.warm_up)
        self.made += 1
        if self.made >= WARM_UP:
            torch.cuda.synchronize()
            counts = [count for count in (TOGETHER, 1) if count <= max(self.steps_of_lane)]
            # They may use the same memory: one is replayed after another, and what is kept lies elsewhere.
            pool = torch.cuda.graph_pool_handle()
            self.recordings = {count: self._recorded(count, pool) for count in counts}

    def _recorded(self, count: int, pool: Any) -> torch.cuda.CUDAGraph:
        """So many steps in a row. Nothing is computed; the first replay is the next step."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):  # a checkpoint may be written meanwhile
            for _ in range(count):
                self._step()
        return graph
