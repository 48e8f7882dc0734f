"""Several networks of one shape as one: stacked tensors with a row a lane, and the step that moves them all."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from alasso import kernels
from alasso.bench.learners import Learner, Regularized
from alasso.methods.surrogate import two_sided_spring_grad
from alasso.moves import adam_direction, adam_moments, bias_corrections

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # torch's defaults, which all learners use


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
            if isinstance(learner, Regularized) and learner.regularizer.tasks == learner.regularizer.steps == 0:
                learner.regularizer.reanchor()  # as the hooks do before the first step
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
