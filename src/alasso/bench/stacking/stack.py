"""Several networks of one shape as one: stacked tensors with a row a lane, and the step that moves them all."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from alasso.bench.learners.base import Learner, Merged, Regularized, drops_nodes
from alasso.bench.learners.vcl import Variational
from alasso.bench.stacking.lane_drops import LaneDrops
from alasso.bench.stacking.lane_gradients import LaneBatch, LaneGradients, Weights
from alasso.bench.stacking.slots import (
    BETA1,
    BETA2,
    PASSES,
    EvenSlot,
    LogvarSlot,
    PlainSlot,
    Slot,
    SpringSlot,
    empty_slot,
    given_to_the_network,
    in_rows,
    is_dense,
    laid_out_like,
    row_of,
    taken,
)
from alasso.bench.training.compiling import compiled, compiles_on
from alasso.optim._update_rules import bias_corrections
from alasso.vcl import kl_stiffness
from alasso.vcl.layers import BayesLayer, named_posteriors

SMALL = 1 << 16  # weights; tensors below are moved aside, while the large ones are


class Pace(NamedTuple):
    """How fast each lane goes in this step: Adam's step size and √(1 − β₂ᵗ), and whether it goes at all; (lanes, 1)."""

    step_size: Tensor
    root: Tensor
    active: Tensor


class Tilt(NamedTuple):
    """Each lane's overestimate of the side that was not observed: aK + ε in place of the stiffness K; (lanes, 1)."""

    a: Tensor
    epsilon: Tensor


class Stack:
    """The stacked tensors of several learners, and the step that moves them all.

    ``goes_on``: from where a stack was stopped. Its tensors are laid out before its first step, and not after it.
    """

    def __init__(self, learners: Sequence[Learner], goes_on: bool = False) -> None:
        self.learners, self.goes_on = learners, goes_on
        self.device = learners[0].device
        self.alone = len(learners) == 1  # needs no leading axis
        self.laid_out = False
        on_gpu = self.device.type == "cuda"
        # What is done aside is short and goes first, not last.
        self.beside = [torch.cuda.Stream(self.device, priority=-1) for _ in range(2)] if on_gpu else []
        self.steps = torch.zeros(len(learners), 1, device=self.device)
        self.rate = self.column(learner.config.learning_rate for learner in learners)
        self.adam_epsilon = self.column(learner.config.adam_eps for learner in learners)
        self.tilt = Tilt(torch.ones_like(self.rate), torch.zeros_like(self.rate))
        self.half_share = torch.zeros_like(self.rate)  # 1 / 2N, where weights are Gaussians
        self.numbers: dict[type[Slot], tuple[Tensor, ...]] = {
            PlainSlot: (),
            EvenSlot: (),
            SpringSlot: self.tilt,
            LogvarSlot: (self.half_share,),
        }  # which the passes take beside those that all of them take
        kinds = kinds_of_slots(learners)
        self.slots = {
            name: empty_slot(kinds[name], torch.empty(len(learners), *p.shape, dtype=p.dtype, device=self.device))
            for name, p in learners[0].model.named_parameters()
        }
        self.at_work: list[torch.cuda.Stream] = []
        self.kept: list[Tensor] = []
        network = copy.deepcopy(learners[0].model).to("meta")  # what it computes; the weights come from the slots
        for layer in network.modules():
            if isinstance(layer, BayesLayer):
                layer.given_variances = True
        self.drops = LaneDrops(network, len(learners), self.device) if drops_nodes(learners[0].config) else None
        self.gradients = self.gradients_of(network)

    def column(self, numbers: Iterable[float]) -> Tensor:
        """One a lane, of the weights' own precision; (lanes, 1)."""
        dtype = next(self.learners[0].model.parameters()).dtype
        return torch.tensor([[number] for number in numbers], device=self.device, dtype=dtype)

    def gradients_of(self, network: nn.Module) -> LaneGradients:
        first, lanes = self.learners[0], len(self.learners)
        built_as = first.built_as
        if built_as and self.drops is not None:
            built_as = (built_as, "drop-transfer")
        config = first.config
        samples = config.settings["train_samples"] if isinstance(first, Variational) else 1
        bf16 = config.precision == "bf16"
        return LaneGradients(network, built_as, lanes, bf16, config.loss_clip, self.device, samples)

    # -- learners in and out of the stack -------------------------------------------------------------------

    @torch.no_grad()
    def adopt(self) -> None:
        """Take over what the learners have now, and make it views: after they were made, loaded, or ended a task."""
        for lane, learner in enumerate(self.learners):
            if isinstance(learner, Regularized) and learner.regularizer.tasks == learner.regularizer.steps == 0:
                learner.regularizer.reanchor()  # as the hooks do before the first step
            for name, parameter in learner.model.named_parameters():
                row = row_of(self.slots[name], lane)
                parameter.data = taken(row.theta, parameter.data)
                self._adopt_moments(learner.optimizer, parameter, row, lane)
                if isinstance(learner, Regularized) and isinstance(row, EvenSlot | SpringSlot):
                    self._adopt_spring(learner, name, parameter, row)
            if isinstance(learner, Regularized):
                self.tilt.a[lane], self.tilt.epsilon[lane] = learner.regularizer.surrogate.overestimate()
            if isinstance(learner, Variational):
                self._adopt_priors(learner, lane)
            if self.drops is not None and isinstance(learner, Merged):
                self.drops.chance[lane] = learner.drop_share if learner.dropping else 0.0

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

    def _adopt_spring(
        self, learner: Regularized, name: str, parameter: nn.Parameter, row: EvenSlot | SpringSlot
    ) -> None:
        regularizer = learner.regularizer
        state = regularizer.state_of(name, parameter)
        stiffness, side = regularizer.surrogate.observed_spring(state)
        # What has no past has no penalty, whatever a method's settings say.
        row.stiffness.copy_(stiffness) if regularizer.tasks else row.stiffness.zero_()
        views = {"anchor": taken(row.anchor, state.anchor)}
        if isinstance(row, SpringSlot):
            row.side.copy_(side)
            if regularizer.surrogate.observes_path:
                views["path"] = taken(row.path, state.path)
        regularizer.adopt(name, state._replace(**views))

    def _adopt_priors(self, learner: Variational, lane: int) -> None:
        """Copied, not taken over: they change but once a task, and the learner goes on to have its own."""
        self.half_share[lane] = 0.5 / learner.data_size
        for posterior in named_posteriors(learner.model):
            mean, logvar = self.slots[posterior.mean], self.slots[posterior.logvar]
            assert isinstance(mean, EvenSlot) and isinstance(logvar, LogvarSlot)
            mean.anchor[lane].copy_(posterior.prior_mean)
            mean.stiffness[lane].copy_(kl_stiffness(posterior.prior_var, learner.data_size))
            logvar.anchor[lane].copy_(posterior.prior_var.log())
            logvar.variance[lane].copy_(logvar.theta[lane].exp())

    # -- the step -------------------------------------------------------------------------------------------

    def step(self, batch: LaneBatch, meanwhile: Callable[[Tensor], None]) -> None:
        """One step of every lane. ``meanwhile`` gets each lane's loss, without the penalty; on a GPU, what it does is
        done beside the updates, which keep the memory busy and little else.
        """
        with self.aside(batch.share):
            pace = Pace(*self.kernel(pace_of_step_)(self.steps, self.rate, batch.share))
        if not self.laid_out and self.goes_on:
            self.lay_out_like(self.gradients_without_a_trace(batch))  # as it was when it was stopped
        gradients, losses = self.gradients_on(batch)
        self.join()
        if not self.laid_out:
            self.lay_out_like(gradients)
        small = {name: g for name, g in gradients.items() if g.numel() < SMALL * len(self.learners)}
        with self.aside(losses):
            meanwhile(losses)
        with self.aside(*small.values(), on=1):
            for name, gradient in small.items():
                self.move(name, pace, gradient, self.kernel(PASSES[type(self.slots[name])]))
        for name, gradient in gradients.items():
            if name not in small:
                slot = self.slots[name]
                self.move(name, pace, gradient, self.kernel(PASSES[type(slot)], slot.theta.shape))
        self.join()

    def gradients_on(self, batch: LaneBatch) -> tuple[Weights, Tensor]:
        """And each lane's loss."""
        weights = self.as_given({name: given_to_the_network(slot) for name, slot in self.slots.items()})
        beside = None if self.drops is None else self.as_given(self.drops.given(self.slots))
        return self.gradients(weights, batch, not self.laid_out, beside)

    def gradients_without_a_trace(self, batch: LaneBatch) -> Weights:
        """Not even in the random numbers."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            return self.gradients_on(batch)[0]

    def as_given(self, tensors: Weights) -> Weights:
        """As the network takes them: one lane alone without a leading axis."""
        return {name: tensor[0] if self.alone else tensor for name, tensor in tensors.items()}

    @torch.no_grad()
    def move(self, name: str, pace: Pace, gradient: Tensor, kernel: Callable[..., None]) -> None:
        slot = self.slots[name]
        if self.alone:
            gradient = gradient[None]
        rows = [*(in_rows(tensor) for tensor in slot), in_rows(gradient, slot.theta)]
        kernel(*rows, *pace, self.adam_epsilon, *self.numbers[type(slot)])

    @contextmanager
    def aside(self, *needed: Tensor, on: int = 0) -> Iterator[None]:
        """On a stream of its own, on a GPU; what is ``needed`` there is kept until :meth:`join`."""
        if not self.beside:
            yield
            return
        self.kept += needed
        self.at_work.append(self.beside[on])
        self.beside[on].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.beside[on]):
            yield

    def join(self) -> None:
        for stream in self.at_work:
            torch.cuda.current_stream().wait_stream(stream)
        self.at_work.clear()
        self.kept.clear()

    def kernel(self, function: Callable[..., Any], shape: tuple[int, ...] = ()) -> Callable[..., Any]:
        return compiled(function, len(self.learners), shape) if compiles_on(self.device) else function

    @torch.no_grad()
    def lay_out_like(self, gradients: dict[str, Tensor]) -> None:
        """Bring the tensors into the memory layout their gradients come in, so that a pass reads all in one order."""
        for name, gradient in gradients.items():
            slot = self.slots[name]
            if not self.alone and gradient.stride() != slot.theta.stride() and is_dense(gradient):
                self.slots[name] = laid_out_like(gradient, slot)
        self.laid_out = True
        self.adopt()


def pace_of_step_(steps: Tensor, rate: Tensor, share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One step further: Adam's step size lr / (1 − β₁ᵗ) and √(1 − β₂ᵗ) of each lane, and whether it makes this step."""
    active = share.sum(1, keepdim=True) > 0
    steps += active
    correction1, correction2 = bias_corrections(steps.double(), math.log(BETA1), math.log(BETA2))
    return (rate / correction1).to(rate.dtype), correction2.sqrt().to(rate.dtype), active


def kinds_of_slots(learners: Sequence[Learner]) -> dict[str, type[Slot]]:
    """By name of parameter; the least that all these learners can do with."""
    first = learners[0]
    if not isinstance(first, Variational):
        return dict.fromkeys((name for name, _ in first.model.named_parameters()), kind_for(learners))
    kinds: dict[str, type[Slot]] = {}
    for posterior in named_posteriors(first.model):
        kinds |= {posterior.mean: EvenSlot, posterior.logvar: LogvarSlot}
    return kinds


def kind_for(learners: Sequence[Learner]) -> type[Slot]:
    """Of weights that are no Gaussians."""
    surrogates = [learner.regularizer.surrogate for learner in learners if isinstance(learner, Regularized)]
    if any(surrogate.observes_path or surrogate.overestimate() != (1.0, 0.0) for surrogate in surrogates):
        return SpringSlot
    return EvenSlot if surrogates else PlainSlot
