"""Steps on a GPU, recorded once a task and replayed: gather, forward, backward and update without launch gaps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alasso.bench.learners.base import Learner, StepPlan

WARM_UP = 3  # real steps, made one by one; torch asks for some before it records


class DirectSteps:
    """Steps of one learner, made one by one."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.loss_sum = torch.zeros(1, dtype=torch.float64, device=learner.device)

    def begin(self, t: int) -> None:
        """Before the steps of task t."""
        self.t = t

    def planned(self, plans: Sequence[Sequence[StepPlan]]) -> Any:
        """An epoch's plans, a list for each learner, as :meth:`begin_epoch` takes them."""
        (own,) = plans
        return own

    def begin_epoch(self, planned: Any, steps_of_lane: Sequence[int]) -> None:
        """Before the steps of an epoch."""
        self.plans: Sequence[StepPlan] = planned

    def step(self, i: int) -> int:
        """Step i of the epoch, and maybe some of those after it; returns how many."""
        self.loss_sum += self.learner.step(self.t, self.plans[i])
        return 1


class GraphedSteps(DirectSteps):
    """Steps replayed from a CUDA graph for each size of batch; the first few of a task are made one by one."""

    def begin(self, t: int) -> None:
        super().begin(t)
        # What a step does differs from task to task: other pixels, other columns, another penalty.
        self.graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, StepPlan]] = {}
        self.made: dict[tuple[int, ...], int] = defaultdict(int)
        self.stream = torch.cuda.Stream(self.learner.device)

    def step(self, i: int) -> int:
        self._step(self.plans[i])
        return 1

    def _step(self, plan: StepPlan) -> None:
        sizes = tuple(len(part) for part in plan if part is not None)
        if sizes in self.graphs:
            graph, buffers = self.graphs[sizes]
            for buffer, part in zip(buffers, plan, strict=True):
                if buffer is not None and part is not None:
                    buffer.copy_(part, non_blocking=True)
            graph.replay()
            self.learner.noted_steps(1)
            return
        self.made[sizes] += 1
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.loss_sum += self.learner.step(self.t, self.on_device(plan))
        torch.cuda.current_stream().wait_stream(self.stream)
        if self.made[sizes] >= WARM_UP:
            self.graphs[sizes] = self.record(self.on_device(plan))

    def record(self, buffers: StepPlan) -> tuple[torch.cuda.CUDAGraph, StepPlan]:
        """Recording computes nothing; the first replay is the first step."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        self.learner.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # a checkpoint may be written meanwhile
            self.loss_sum += self.learner.step(self.t, buffers)
        self.learner.noted_steps(-1)  # recording ran the hooks, but made no step
        return graph, buffers

    def on_device(self, plan: StepPlan) -> StepPlan:
        def moved(part: Tensor | None) -> Tensor | None:
            return None if part is None else part.to(self.learner.device)

        return StepPlan(plan.own.to(self.learner.device), moved(plan.others))
