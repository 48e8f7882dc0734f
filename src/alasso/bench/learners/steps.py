"""The steps of an epoch: made one by one, or on a GPU recorded once a task in a CUDA graph and replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from alasso.bench.learners.base import Learner, StepPlan

WARM_UP = 3  # real steps, made one by one; torch asks for some before it records


class Steps:
    """Steps of one learner, made one by one."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=learner.device)

    def begin_task(self, t: int) -> None:
        """Before the steps of task t."""
        self.t = t

    def begin_epoch(self, plans: Sequence[StepPlan]) -> None:
        """Before the steps of an epoch."""
        self.plans = plans

    def step(self, i: int) -> None:
        """Step i of the epoch."""
        self.loss_sum += self.learner.step(self.t, self.plans[i])


class RecordedSteps(Steps):
    """Steps replayed from a CUDA graph; a few of a task are made one by one: the first, and those to be looked at.

    Each task has its own graphs, with their own memory, for each size of batch, since the last one of an epoch is
    smaller, and for each kind of step that the method has.
    """

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner)
        self.stream = torch.cuda.Stream(learner.device)  # warm-up and recording share its workspaces

    def begin_task(self, t: int) -> None:
        super().begin_task(t)
        # What a step does differs from task to task: other examples, other columns, another penalty.
        self.recorded: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, StepPlan]] = {}
        self.made: Counter[tuple[int, ...]] = Counter()
        torch.cuda.empty_cache()  # a graph's memory is its own, and is not taken again after it

    def begin_epoch(self, plans: Sequence[StepPlan]) -> None:
        self.plans = on_device(plans, self.learner.device)

    def step(self, i: int) -> None:
        plan = self.plans[i]
        kind = (self.learner.step_kind, *(len(part) for part in plan if part is not None))
        if self.made[kind] < WARM_UP or self.learner.looks:
            self.made[kind] += 1
            self.warm_up(plan)
            return
        if kind not in self.recorded:
            place = StepPlan(plan.own.clone(), None if plan.others is None else plan.others.clone())
            self.recorded[kind] = self.record(place), place
        graph, place = self.recorded[kind]
        for buffer, part in zip(place, plan, strict=True):
            if buffer is not None and part is not None:
                buffer.copy_(part)
        graph.replay()
        self.learner.noted_steps(1)

    def warm_up(self, plan: StepPlan) -> None:
        """A real step, away from the stream that replays, as torch asks for."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.loss_sum += self.learner.step(self.t, plan)
        torch.cuda.current_stream().wait_stream(self.stream)

    def record(self, place: StepPlan) -> torch.cuda.CUDAGraph:
        """A step on the examples that ``place`` names when it is replayed. Recording computes nothing."""
        graph = torch.cuda.CUDAGraph()
        self.learner.optimizer.zero_grad(set_to_none=True)  # gradients get their memory from the graph
        torch.cuda.synchronize(self.learner.device)
        with torch.cuda.stream(self.stream):  # torch.cuda.graph would give all unused memory back first, each time
            graph.capture_begin(capture_error_mode="thread_local")  # a checkpoint may be written meanwhile
            try:
                self.loss_sum += self.learner.step(self.t, place)
            finally:
                graph.capture_end()
        self.learner.noted_steps(-1)  # Python counted a step that was not made
        return graph


def steps_for(learner: Learner) -> Steps:
    """Recorded where a step runs on a GPU alone."""
    on_gpu = learner.device.type == "cuda"
    return RecordedSteps(learner) if on_gpu and learner.can_be_recorded else Steps(learner)


def on_device(plans: Sequence[StepPlan], device: torch.device) -> list[StepPlan]:
    """An epoch's plans, brought to the device in one go."""
    own = _on_device([plan.own for plan in plans], device)
    others = [plan.others for plan in plans if plan.others is not None]
    return list(map(StepPlan, own, _on_device(others, device) if others else [None] * len(plans)))


def _on_device(parts: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    together = torch.cat(list(parts))
    if device.type == "cuda":
        together = together.pin_memory()  # from there it travels while the GPU is busy with the last epoch
    return torch.split(together.to(device, non_blocking=True), [len(part) for part in parts])
