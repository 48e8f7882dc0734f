"""A regularizer's share in an optimizer's steps: what happens to gradients before a step and after it.

A step with an attached regularizer:

    before   p.grad ← task gradient + ∂penalty/∂θ, in a tensor of its own; θ is remembered
    step     the optimizer does what it always does
    after    ω −= task gradient · (θ − θ before);  p.grad ← the task's gradient again

So ω sees the gradient of the task's loss alone and the move that was really made, and code that looks at ``p.grad``
between steps, or goes on accumulating into it, finds what it would find without the library. What an optimizer of one's
own does to ``p.grad`` within its step, which may be anything, it does to that tensor, and the task's gradient stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alasso._distributed import local
from alasso._unseen import note_held
from alasso.errors import AlassoError
from alasso.methods.base import add_to_path_
from alasso.optim import _compile as kernels

if TYPE_CHECKING:
    from alasso.regularizer import Regularizer


class OpenStep(NamedTuple):
    """One parameter between the two hooks."""

    name: str
    parameter: nn.Parameter
    task_grad: Tensor
    total_grad: Tensor
    version: int  # of total_grad: how often it had been written to
    theta_before: Tensor | None
    to_objective: float | Tensor | None  # factor from the task's loss to what the optimizer sees; None is 1


class Exchange:
    """One regularizer's share in the steps of one optimizer: what happens to gradients before a step and after it."""

    def __init__(self, regularizer: Regularizer, optimizer: Optimizer) -> None:
        self.regularizer = regularizer
        self.optimizer = optimizer
        self._open: list[OpenStep] = []
        self._held: dict[str, ref[nn.Parameter]] = {}  # what the optimizer had under these names when last noted
        self._foreign: dict[int, nn.Parameter] = {}  # by id: held, so that no other comes to have it
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self._noted: set[int] = set()  # parameters whose weights were copied when the step began, by id
        self._is_torchs = type(optimizer).__module__.startswith(("torch.optim", "alasso.optim"))

    @property
    def is_open(self) -> bool:
        """Whether a step has begun and not ended."""
        return bool(self._open)

    def remove(self) -> None:
        """Leave the optimizer as it was."""
        self.take_back_gradients()

    # -- before the step -------------------------------------------------------------------------------------

    @torch.no_grad()
    def open(self) -> None:
        self.begin()
        # A fused optimizer under GradScaler sees scaled gradients and divides by the scale itself.
        scale = getattr(self.optimizer, "grad_scale", None)
        for group in self.optimizer.param_groups:
            # What the optimizer ascends is minus the task's loss.
            to_objective = -1.0 if group.get("maximize") else None
            if scale is not None:
                to_objective = scale if to_objective is None else to_objective * scale
            for parameter in group["params"]:
                if parameter.grad is not None and (name := self.name_of(parameter)) is not None:
                    self._open_parameter(name, parameter, to_objective)

    def begin(self) -> None:
        """Before the very first step of all, the path begins at the weights as they are now; before others, weights may
        be missing that belong to a loaded past.
        """
        regularizer = self.regularizer
        if regularizer.tasks == 0 and regularizer.steps == 0:
            regularizer.reanchor()
        regularizer.compare_weights()

    def _open_parameter(self, name: str, parameter: nn.Parameter, to_objective: float | Tensor | None) -> None:
        task_grad = parameter.grad
        assert task_grad is not None
        if task_grad.is_sparse:
            raise AlassoError(f"{name} has a sparse gradient, which has no place for a penalty; use sparse=False")
        regularizer = self.regularizer
        state = regularizer.state_of(name, parameter)
        total_grad = task_grad
        observes_path = regularizer.surrogate.observes_path
        # In the first task there is nothing to add, but an optimizer may change the gradient in place, as torch's SGD
        # does with nesterov and foreach, and other hooks may clip it: the path wants it as it was.
        if regularizer.tasks > 0 or to_objective is not None or observes_path:
            total_grad = self._buffer("total gradient", parameter, task_grad)
        before = None
        if observes_path:
            before = self._buffer("before", parameter, local(parameter))
        if not (to_objective is None and self._opened_in_one_pass(parameter, task_grad, total_grad, before, state)):
            self._open_plainly(name, parameter, task_grad, total_grad, before, state, to_objective)
        parameter.grad = total_grad
        self._open.append(OpenStep(name, parameter, task_grad, total_grad, total_grad._version, before, to_objective))

    def _opened_in_one_pass(
        self, parameter: nn.Parameter, task_grad: Tensor, total_grad: Tensor, before: Tensor | None, state: Any
    ) -> bool:
        theta = local(parameter).detach()
        if self.regularizer.tasks == 0 or id(parameter) in self._noted:
            return False
        if kernels.why_not_compiled(theta.device.type, theta.numel()):
            return False
        written = [local(total_grad), before if before is not None else theta]
        flat = kernels.flattened([*written, local(task_grad).detach(), theta], state)
        surrogate = self.regularizer.surrogate_on(theta.device, theta.dtype)
        if flat is None or surrogate is None:
            return False
        (total, kept, g, theta), state = flat
        kernels.open_step(surrogate)(total, kept if before is not None else None, g, theta, surrogate, state)
        return True

    def _open_plainly(
        self,
        name: str,
        parameter: nn.Parameter,
        task_grad: Tensor,
        total_grad: Tensor,
        before: Tensor | None,
        state: Any,
        to_objective: float | Tensor | None,
    ) -> None:
        theta = local(parameter)
        if total_grad is not task_grad:
            total_grad.copy_(task_grad)
        if self.regularizer.tasks > 0:
            springs = self.regularizer.stiffness_of(name, state)
            if to_objective is not None:
                springs = (springs[0] * to_objective, springs[1] * to_objective)
            kernels.add_penalty_(local(total_grad), theta, state.anchor, *springs)
        if before is not None and id(parameter) not in self._noted:
            before.copy_(theta)

    @torch.no_grad()
    def note_weights(self) -> None:
        """Where the step begins: optimizers of others may move the weights before they call their closure (SAM)."""
        if self._is_torchs or not self.regularizer.surrogate.observes_path:
            return
        for parameter in self.parameters():
            if self.name_of(parameter) is not None:
                self._buffer("before", parameter, local(parameter)).copy_(local(parameter))
                self._noted.add(id(parameter))

    def _buffer(self, purpose: str, parameter: nn.Parameter, like: Tensor) -> Tensor:
        """Room for a tensor, the same at every step: fresh memory is slow memory."""
        key = (purpose, id(parameter), like.shape, like.stride(), like.dtype, like.device)
        if key not in self._buffers:
            self._buffers[key] = torch.empty_like(like)
        return self._buffers[key]

    # -- after the step --------------------------------------------------------------------------------------

    @torch.no_grad()
    def close(self) -> None:
        scale, found_inf = (getattr(self.optimizer, name, None) for name in ("grad_scale", "found_inf"))
        for step in self._open:
            if step.theta_before is not None:
                self._observe(step, step.theta_before, found_inf)
            if scale is not None:
                g = local(step.task_grad)
                g.copy_(self._unscaled(g, scale, found_inf))
        if self._open:
            self.regularizer.steps += 1
        self.give_back_gradients()

    @staticmethod
    def _unscaled(g: Tensor, scale: Tensor, found_inf: Tensor | None) -> Tensor:
        """As a fused optimizer leaves a gradient: divided by the scale, but for steps that were skipped."""
        return g / scale if found_inf is None else torch.where(found_inf.to(torch.bool), g, g / scale)

    def _observe(self, step: OpenStep, theta_before: Tensor, found_inf: Tensor | None) -> None:
        state = self.regularizer.state_of(step.name, step.parameter)
        g, theta = local(step.task_grad).detach(), local(step.parameter).detach()
        if (
            step.to_objective is None
            and found_inf is None
            and kernels.why_not_compiled(theta.device.type, theta.numel()) is None
            and (flat := kernels.flattened([state.path, g, theta_before, theta])) is not None
        ):
            kernels.close_step()(*flat[0])
            return
        dtype = state.anchor.dtype
        g = g.to(dtype)
        if step.to_objective is not None:
            g = g / step.to_objective
        if found_inf is not None:
            # The scaler skipped this step: the weights stand still, but 0 · inf would poison ω.
            g = torch.where(found_inf.to(torch.bool), 0.0, g)
        add_to_path_(state.path, g, theta_before.to(dtype), theta.to(dtype))

    # -- bookkeeping -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def give_back_gradients(self) -> None:
        for step in self._open:
            if step.parameter.grad is step.total_grad:
                if self._was_zeroed(step):
                    local(step.task_grad).zero_()
                step.parameter.grad = step.task_grad
        self._open.clear()
        self._noted.clear()

    def _was_zeroed(self, step: OpenStep) -> bool:
        """Whether an optimizer that is not torch's did ``zero_grad(set_to_none=False)`` within its step."""
        if self._is_torchs or step.total_grad is step.task_grad or step.total_grad._version == step.version:
            return False
        g = local(step.total_grad)
        if kernels.is_being_recorded(g.device):
            return False  # nothing can be asked of a GPU that records
        one_row_is_zero = g.dim() == 0 or not bool(g[:1].any())  # most are told by this much
        return one_row_is_zero and not bool(g.any())

    @torch.no_grad()
    def take_back_gradients(self) -> None:
        """After a step that raised: what has been written since into the gradient that it left is the task's own."""
        for step in self._open:
            if step.parameter.grad is step.total_grad and step.total_grad._version != step.version:
                step.task_grad.copy_(step.total_grad)
        self.give_back_gradients()

    def parameters(self) -> Iterator[nn.Parameter]:
        """What the optimizer holds."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def note_held(self) -> None:
        note_held(self.regularizer, self.parameters())
        for parameter in self.parameters():
            if (name := self.regularizer.name_of(parameter)) is not None:
                self._held[name] = ref(parameter)
        held = {id(parameter) for parameter in self.parameters()}
        self._foreign = {place: parameter for place, parameter in self._foreign.items() if place in held}

    def take_replaced(self) -> set[str]:
        """Names under which the model has other parameters now than those that the optimizer still holds; said once."""
        in_optimizer = {id(p) for p in self.parameters()}
        in_model = {id(p) for p in self.regularizer.model.parameters()}
        held = {name: p for name, reference in self._held.items() if (p := reference()) is not None}
        gone = {name for name, p in held.items() if id(p) in in_optimizer - in_model}
        self._held = {name: ref(p) for name, p in held.items() if name not in gone}
        return gone

    def name_of(self, parameter: nn.Parameter) -> str | None:
        name = self.regularizer.name_of(parameter)
        if name is None and id(parameter) not in self._foreign:
            self.regularizer.look_again()  # a parameter group added, or a head replaced, since attach()
            name = self.regularizer.name_of(parameter)
            if name is None:
                self._foreign[id(parameter)] = parameter
        return name

    def forget(self) -> None:
        """Let go of the regularizer's tensors: it has new ones."""

    def release(self) -> None:
        """Give up the memory that only steps in two halves need."""
        if self._buffers:
            self._buffers.clear()
            self.regularizer.forget_stiffness()
