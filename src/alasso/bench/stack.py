"""Several networks of one shape as one: stacked tensors with a row a lane, and the step that moves them all."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from alasso import kernels
from alasso.bench.learners import Learner, Regularized
from alasso.methods.surrogate import two_sided_spring_grad
from alasso.moves import adam_direction, adam_moments, bias_corrections

BETA1, BETA2 = 0.9, 0.999  # torch's defaults, which all learners use
SMALL = 1 << 16  # weights of a tensor below which its update is not worth waiting for

NUMBERS = itertools.count()  # of stacks made so far

log = logging.getLogger("alasso")


class LaneBatch(NamedTuple):
    """What one step is made on, gathered: inputs (lanes, batch, …), labels counted from the lane's first column, each
    example's share in the lane's loss, and the columns of the output that are the lane's own.
    """

    x: Tensor
    y: Tensor
    share: Tensor
    columns: Tensor  # (lanes, classes of the task)


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
        self.alone = len(learners) == 1  # needs no leading axis
        self.bf16 = learners[0].config.precision == "bf16"
        self.laid_out = False
        on_gpu = self.device.type == "cuda"
        # What is done aside is short and goes first, not last.
        self.beside = torch.cuda.Stream(self.device, priority=-1) if on_gpu else None
        self.steps = torch.zeros(len(learners), 1, device=self.device)
        rates = [[learner.config.learning_rate] for learner in learners]
        dtype = next(learners[0].model.parameters()).dtype
        self.rate = torch.tensor(rates, device=self.device, dtype=dtype)
        epsilons = [[learner.config.adam_eps] for learner in learners]
        self.epsilon = torch.tensor(epsilons, device=self.device, dtype=dtype)
        self.slots = {
            name: Slot.like(torch.empty(len(learners), *p.shape, dtype=p.dtype, device=self.device))
            for name, p in learners[0].model.named_parameters()
        }
        self.kept: list[Tensor] = []
        self.number = next(NUMBERS)
        self.compiles = on_gpu and not kernels.no_compiler("cuda")
        self.kernels: dict[tuple[Callable[..., Any], tuple[int, ...]], Callable[..., Any]] = {}
        self.compiled_gradients: Callable[..., Any] | None = None
        if self.compiles:
            # What the compiler decided about a softmax over ten classes is not for the user to act on.
            warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
            own = self.own(lambda *of: self.plain_gradients(*of))
            self.compiled_gradients = torch.compile(own, dynamic=False, fullgraph=True)

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

    def step(self, batch: LaneBatch, meanwhile: Callable[[Tensor], None]) -> None:
        """One step of every lane. ``meanwhile`` gets each lane's loss, without the penalty; on a GPU, what it does is
        done beside the updates, which keep the memory busy and little else.
        """
        with self.aside(batch.share):
            pace = Pace(*self.kernel(pace_of_step_)(self.steps, self.rate, batch.share))
        leaves = {name: slot.theta[0] if self.alone else slot.theta for name, slot in self.slots.items()}
        gradients, losses = self.gradients(leaves, batch)
        self.join()
        if not self.laid_out:
            self.lay_out_like(gradients)
        small = {name: g for name, g in gradients.items() if g.numel() < SMALL * len(self.learners)}
        with self.aside(losses, *small.values()):
            meanwhile(losses)
            for name, gradient in small.items():
                self.move(name, pace, gradient, self.kernel(spring_and_adam_))
        for name, gradient in gradients.items():
            if name not in small:
                self.move(name, pace, gradient, self.kernel(spring_and_adam_, self.slots[name].theta.shape))
        self.join()

    def gradients(self, leaves: dict[str, Tensor], batch: LaneBatch) -> tuple[dict[str, Tensor], Tensor]:
        """Of each lane's loss by its weights; and the losses."""
        with torch.no_grad():
            if self.compiled_gradients is not None and self.laid_out:
                try:
                    found: tuple[dict[str, Tensor], Tensor] = self.compiled_gradients(leaves, *batch)
                    return found
                except Exception as reason:  # whatever a network of the user's own may hold
                    if torch.cuda.is_current_stream_capturing():
                        raise
                    log.info("forward and backward pass are not compiled: %s", kernels.first_line(reason))
                    self.compiled_gradients = None
            return self.plain_gradients(leaves, *batch)

    def plain_gradients(
        self, leaves: dict[str, Tensor], x: Tensor, y: Tensor, share: Tensor, columns: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        found: tuple[dict[str, Tensor], Tensor] = torch.func.grad(self.losses, has_aux=True)(
            leaves, x, y, share, columns
        )
        return found

    def losses(
        self, leaves: dict[str, Tensor], x: Tensor, y: Tensor, share: Tensor, columns: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The losses' sum, whose gradient by a lane's weights is that of the lane's own loss; and the losses."""
        outputs = self.outputs(leaves, x)
        if columns.shape[1] < outputs.shape[2]:
            outputs = outputs.gather(2, columns[:, None, :].expand(-1, outputs.shape[1], -1))
        losses = shared_cross_entropy(outputs, y, share)
        return losses.sum(), losses

    def outputs(self, leaves: dict[str, Tensor], x: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            if self.alone:
                outputs: Tensor = functional_call(self.network, leaves, x[0])[None]
            else:
                outputs = vmap(lambda w, inputs: functional_call(self.network, w, inputs), randomness="different")(
                    leaves, x
                )
        return outputs if outputs.dtype == torch.float64 else outputs.float()

    @torch.no_grad()
    def move(self, name: str, pace: Pace, gradient: Tensor, kernel: Callable[..., None]) -> None:
        slot = self.slots[name]
        if self.alone:
            gradient = gradient[None]
        kernel(*(in_rows(tensor) for tensor in slot), in_rows(gradient, slot.theta), *pace, self.epsilon)

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

    def kernel(self, function: Callable[..., Any], shape: tuple[int, ...] = ()) -> Callable[..., Any]:
        """The function compiled, for a GPU, where each kernel saved is a launch saved; elsewhere as it is.

        For one ``shape`` alone, a pass over weights finds out sooner which lane a weight is of.
        """
        if not self.compiles:
            return function
        if (function, shape) not in self.kernels:
            own = self.own(function, *shape)
            self.kernels[function, shape] = torch.compile(own, dynamic=not shape, fullgraph=True)
        return self.kernels[function, shape]

    def own(self, function: Callable[..., Any], *shape: int) -> Callable[..., Any]:
        """The function as this stack's own piece of code: of one piece, torch keeps few compiled variants."""
        return kernels.renamed(function, "_".join(map(str, (function.__name__, self.number, *shape))))

    @torch.no_grad()
    def lay_out_like(self, gradients: dict[str, Tensor]) -> None:
        """Bring the tensors into the memory layout their gradients come in, so that a pass reads all in one order."""
        for name, gradient in gradients.items():
            slot = self.slots[name]
            if not self.alone and gradient.stride() != slot.theta.stride() and is_dense(gradient):
                self.slots[name] = Slot(*(torch.empty_like(gradient).copy_(tensor) for tensor in slot))
        self.laid_out = True
        self.adopt()


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
    epsilon: Tensor,
) -> None:
    """Penalty, Adam and ω in one pass; a lane that is not active stays as it is."""
    total = grad + two_sided_spring_grad(theta - anchor, k_minus, k_plus)
    new_m, new_v = adam_moments(total, m, v, 1 - BETA1, 1 - BETA2)
    new_theta = theta - step_size * adam_direction(new_m, new_v, root, epsilon)
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
