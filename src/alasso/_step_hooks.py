"""The two hooks on a torch optimizer: what happens before its step and after it.

    before   p.grad ← task gradient + ∂penalty/∂θ, in a tensor of its own; θ is remembered
    step     the optimizer does what it always does
    after    ω −= task gradient · (θ − θ before);  p.grad ← the task's gradient again

So ω sees the gradient of the task's loss alone and the move that was really made, and code that looks at ``p.grad``
between steps, or goes on accumulating into it, finds what it would find without the library.

This file alone knows closures, GradScaler, accumulation and steps within steps. What a step works on is gathered once,
in a :class:`Plan`, and used until something changes; the arithmetic is in :mod:`alasso._passes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from alasso._distributed import local
from alasso._passes import Batch, CompiledParameter, OddParameter, Share, Work, is_plain, passes
from alasso.errors import AlassoError

if TYPE_CHECKING:
    from alasso.regularizer import Regularizer

MOST_PLANS = 8  # of one optimizer: which parameters have a gradient may alternate, as with one head for each task


def base_optimizer(optimizer: Any) -> Optimizer:
    """Return the torch optimizer whose step() is really called, inside any wrapper; refuse what cannot be observed."""
    # accelerate's wrapper is an Optimizer that never ran Optimizer.__init__ and so has no hook tables of its own. One
    # that has some (Lookahead, say) is observed itself: it may move the weights beside the optimizer within it.
    while not has_hooks(optimizer) and isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        given = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else type(optimizer).__name__
        raise AlassoError(f"attach() needs a torch optimizer, not {given}")
    if isinstance(optimizer, LBFGS):
        raise AlassoError(
            "LBFGS evaluates the loss several times within one step, so no single gradient belongs to its move; "
            "use a first-order optimizer such as SGD or Adam"
        )
    if not has_hooks(optimizer):
        raise AlassoError(
            f"{type(optimizer).__name__} never called Optimizer.__init__ and cannot carry hooks; "
            "attach to the optimizer it wraps"
        )
    return optimizer


def has_hooks(optimizer: object) -> bool:
    """Return whether torch would run step hooks of this optimizer."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def may_nest(kind: type[Optimizer]) -> bool:
    """Return whether torch runs hooks for several step() methods of a class: for its own and for its parents'."""
    steps = (parent.__dict__.get("step") for parent in kind.__mro__)
    return len({step.__wrapped__ for step in steps if getattr(step, "hooked", False)}) > 1  # type: ignore[union-attr]


class Plan(NamedTuple):
    """What a step works on, as long as nothing changes."""

    works: list[Work]
    passes: list[Batch | CompiledParameter]
    odd: list[tuple[OddParameter, bool]]  # and whether the optimizer ascends
    seen_by: list[Regularizer]  # whose parameters have gradients


NOTHING = Plan([], [], [], [])


class StepHooks:
    """The hooks on one optimizer, for all regularizers that are attached to it.

    Args:
        optimizer: Held weakly: an optimizer that nobody uses any more is let go.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = ref(optimizer)
        self._handles: list[Any] = []
        self._compile: dict[Regularizer, bool] = {}  # the regularizers, and whether they ask for compiled passes
        self._buffers: dict[int, tuple[Any, Tensor, Tensor | None]] = {}  # by id of the parameter, which plans hold
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._versions: list[int] = []  # of the regularizers when the plans were made
        self._plan = NOTHING  # of the step that is open
        self._grads: list[Tensor] = []  # the tasks' gradients meanwhile
        self._begun_at: dict[int, Tensor] = {}  # weights at the step's begin, if the optimizer may have moved them
        self._depth = 0  # of steps within steps: a subclass's step() may call its parent's
        self._an_inner_step_ended = False

    @staticmethod
    def of(optimizer: Optimizer) -> StepHooks:
        """Return the one object that an optimizer has, made at first use."""
        if optimizer not in _hooks_of:
            _hooks_of[optimizer] = StepHooks(optimizer)
        return _hooks_of[optimizer]

    def add(self, regularizer: Regularizer, compile: bool) -> None:
        """Work for this regularizer from now on."""
        self._forget_plans()
        self._compile[regularizer] = compile
        optimizer = self._optimizer()
        if optimizer is not None and not self._handles and not getattr(optimizer, "calls_its_hooks", False):
            self._handles = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]

    def remove(self, regularizer: Regularizer) -> None:
        """Work for this regularizer no longer; leave the optimizer as it was before the first came."""
        self._forget_plans()
        self._compile.pop(regularizer, None)
        if not self._compile:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    @property
    def regularizers(self) -> list[Regularizer]:
        """The regularizers that the optimizer works for."""
        return list(self._compile)

    @property
    def is_alive(self) -> bool:
        """Whether the optimizer is still in use."""
        return self._optimizer() is not None

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield what the optimizer holds."""
        optimizer = self._optimizer()
        for group in [] if optimizer is None else optimizer.param_groups:
            yield from group["params"]

    # -- the hooks -------------------------------------------------------------------------------------------

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        args = args[1:] if args and args[0] is optimizer else args
        closure = args[0] if args else kwargs.get("closure")
        if self._is_within_a_step(optimizer):
            self._depth += 1
            return None
        self.leave_open_step()  # which raised
        self._depth, self._an_inner_step_ended = 1, False
        if not callable(closure):  # another optimizer's step may take other arguments
            self.open(optimizer)
            return None
        # With a closure, backward runs inside step(): the gradients are there only after it. Torch's own optimizers
        # call it first; others may move the weights before that, as sharpness-aware ones do.
        if not type(optimizer).__module__.startswith("torch.optim"):
            self._begun_at = {id(p): local(p).detach().clone() for p in self.parameters() if p.requires_grad}
        wrapped = self._wrapped(closure, optimizer)
        if args:
            return (optimizer, wrapped, *args[1:]), kwargs
        return (optimizer,), {**kwargs, "closure": wrapped}

    def _is_within_a_step(self, optimizer: Optimizer) -> bool:
        """Return whether torch runs the hooks for a parent class's step(), called within an open step.

        A step that raised also stays open. Where a class has a step() of its own and a parent's, too, the next one is
        then taken for an inner one and goes unseen; that an inner step has ended tells those after it.
        """
        return self._depth > 0 and not self._an_inner_step_ended and may_nest(type(optimizer))

    def _wrapped(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        def closure_then_penalty() -> Any:
            if self._plan is not NOTHING:
                raise AlassoError(
                    f"{type(optimizer).__name__} called its closure twice in one step, so no single gradient "
                    "belongs to its move; use an optimizer that evaluates the loss once a step"
                )
            loss = closure()
            self.open(optimizer)
            return loss

        return closure_then_penalty

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth -= 1
        self._an_inner_step_ended = True
        if self._depth <= 0:
            self.close(optimizer)

    # -- a step ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Tell the regularizers that a step begins which may be the first of a task."""
        for regularizer in self._compile:
            if regularizer.steps == 0:
                regularizer.before_first_step()

    @torch.no_grad()
    def open(self, optimizer: Optimizer) -> None:
        """Put the total gradients in the place of the task's."""
        self.begin()
        # A fused optimizer under GradScaler sees scaled gradients and divides by the scale itself.
        scale = getattr(optimizer, "grad_scale", None)
        self._plan = plan = self._plan_of(optimizer, scale is not None)
        for one in plan.passes:
            one.open()
        for parameter, ascends in plan.odd:
            factor = 1.0 if scale is None else scale
            parameter.open(-factor if ascends else factor)
        self._grads = [work.parameter.grad for work in plan.works]  # type: ignore[misc]
        for work in plan.works:
            work.parameter.grad = work.total
            if work.before is not None and id(work.parameter) in self._begun_at:
                work.before.copy_(self._begun_at[id(work.parameter)])

    @torch.no_grad()
    def close(self, optimizer: Optimizer) -> None:
        """Add the step to the paths, and put the task's gradients back."""
        plan = self._plan
        found_inf = getattr(optimizer, "found_inf", None) if plan.odd else None
        for one in plan.passes:
            one.close()
        for parameter, _ in plan.odd:
            parameter.close(found_inf)
        if plan.odd and (scale := getattr(optimizer, "grad_scale", None)) is not None:
            for g in self._grads:  # as a fused optimizer leaves them: without the scale, but for steps it skipped
                g.copy_(g / scale if found_inf is None else torch.where(found_inf.to(torch.bool), g, g / scale))
        for regularizer in plan.seen_by:
            regularizer.steps += 1
        for work, grad in zip(plan.works, self._grads, strict=True):
            if work.parameter.grad is not None:  # the optimizer may have put another in its place, or dropped it
                work.parameter.grad = grad
        self._end_step()

    def _end_step(self) -> None:
        self._plan, self._grads, self._begun_at, self._depth = NOTHING, [], {}, 0

    @torch.no_grad()
    def leave_open_step(self) -> None:
        """After a step that raised: what was written since into the gradient that it left is the task's own."""
        for work, grad in zip(self._plan.works, self._grads, strict=True):
            if work.parameter.grad is work.total:
                grad.copy_(work.total)
                work.parameter.grad = grad
        self._end_step()

    # -- what steps work on ----------------------------------------------------------------------------------

    def key_of(self, optimizer: Optimizer) -> tuple[Any, ...]:
        """Return what changes where a step has to work on other things than the one before."""
        key: list[Any] = [one.protected.version for one in self._compile]
        for group in optimizer.param_groups:
            key.append(group.get("maximize"))
            for p in group["params"]:
                if (grad := p.grad) is not None:
                    key += (id(p), p.data_ptr(), None if grad.is_sparse else grad.stride())
        return tuple(key)

    def _plan_of(self, optimizer: Optimizer, is_scaled: bool) -> Plan:
        key = (is_scaled, self.key_of(optimizer))
        if (plan := self._plans.get(key)) is None:
            plan = self._made_plan(optimizer, is_scaled)
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            # Parameters that came up on the way have changed the key.
            self._plans[is_scaled, self.key_of(optimizer)] = plan
        return plan

    def _forget_plans(self) -> None:
        self.leave_open_step()
        self._buffers.clear()
        self._plans.clear()

    def _made_plan(self, optimizer: Optimizer, is_scaled: bool) -> Plan:
        versions = [one.protected.version for one in self._compile]
        if versions != self._versions:
            self._versions = versions
            self._plans.clear()
            held = {id(p) for p in self.parameters()}
            self._buffers = {place: buffers for place, buffers in self._buffers.items() if place in held}
        plan = Plan([], [], [], [])
        plain: list[Work] = []
        for group in optimizer.param_groups:
            ascends = bool(group.get("maximize"))
            for parameter in group["params"]:
                if parameter.grad is None or not (owners := self.owners_of(parameter)):
                    continue
                plan.seen_by.extend(one for one in owners if one not in plan.seen_by)
                shares = tuple(Share.of(regularizer, name, parameter) for regularizer, name in owners.items())
                if not any(share.has_past or share.surrogate.observes_path for share in shares):
                    continue
                if parameter.grad.is_sparse:
                    name = next(iter(owners.values()))
                    raise AlassoError(
                        f"{name} has a sparse gradient, which has no place for a penalty; use sparse=False"
                    )
                work = Work(parameter, *self._buffers_of(parameter, shares), shares)
                plan.works.append(work)
                if is_scaled or ascends or not is_plain(work, parameter.grad):
                    plan.odd.append((OddParameter(work), ascends))
                else:
                    plain.append(work)
        plan.passes.extend(passes(plain, any(self._compile.values())))
        return plan

    def owners_of(self, parameter: nn.Parameter) -> dict[Regularizer, str]:
        """Return the regularizers that protect a parameter, with the name that each knows it by."""
        owners = {}
        for regularizer in self._compile:
            name = regularizer.protected.name_of(parameter)
            if name is None:
                regularizer.look()  # a parameter group was added, or a head replaced, since attach()
                name = regularizer.protected.name_of(parameter)
            if name is not None:
                owners[regularizer] = name
        return owners

    def _buffers_of(self, parameter: nn.Parameter, shares: Sequence[Share]) -> tuple[Tensor, Tensor | None]:
        """Return room for the total gradient and for the weights before a step: fresh memory is slow memory."""
        grad = parameter.grad
        assert grad is not None
        like = (grad.shape, grad.stride(), grad.dtype, grad.device, local(parameter).dtype)
        if (known := self._buffers.get(id(parameter))) is None or known[0] != like:
            observed = any(share.surrogate.observes_path for share in shares)
            before = torch.empty_like(local(parameter)) if observed else None
            known = self._buffers[id(parameter)] = like, torch.empty_like(grad), before
        return known[1:]


_hooks_of: WeakKeyDictionary[Optimizer, StepHooks] = WeakKeyDictionary()
