"""The two hooks on a torch optimizer: what happens before its step and after it.

    before   p.grad ← task gradient + ∂penalty/∂θ, in a tensor of its own; θ is remembered
    step     the optimizer does what it always does
    after    ω −= task gradient · (θ − θ before);  p.grad ← the task's gradient again

So ω sees the gradient of the task's loss alone and the move that was really made, and code that looks at ``p.grad``
between steps, or goes on accumulating into it, finds what it would find without the library. An optimizer that keeps
``p.grad`` beyond its step has to clone it: the tensor is used again.

Closures, GradScaler and steps within steps are known here. What a step works on is in :mod:`alasso._plans`, the
arithmetic in :mod:`alasso._passes`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from alasso._compile import is_recording
from alasso._distributed import local
from alasso._fused_step import Engine, engine_for
from alasso._plans import NOTHING, Plans
from alasso.errors import AlassoError, warn

if TYPE_CHECKING:
    from alasso.regularizer import Regularizer


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


def check_every(every: int, regularizer: Regularizer) -> None:
    """Refuse to consolidate by itself a method that needs more than steps, or after no number of them."""
    if type(every) is not int or every < 1:
        raise AlassoError(f"every must be a whole number of steps, one or more, not {every!r:.40}")
    if not (regularizer.surrogate.observes_path or regularizer.surrogate.learns_from_steps):
        raise AlassoError(
            f"{regularizer.method} does not learn from steps alone, so attach(every=…) cannot consolidate it; call "
            "consolidate() yourself, or use KronALASSO, ALASSO or SI"
        )


def may_nest(kind: type[Optimizer]) -> bool:
    """Return whether torch runs hooks for several step() methods of a class: for its own and for its parents'."""
    steps = (parent.__dict__.get("step") for parent in kind.__mro__)
    return len({step.__wrapped__ for step in steps if getattr(step, "hooked", False)}) > 1  # type: ignore[union-attr]


class StepHooks:
    """The hooks on one optimizer, for all regularizers that are attached to it.

    Args:
        optimizer: Held weakly: an optimizer that nobody uses any more is let go.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = ref(optimizer, self._let_go)
        self._is_torchs = type(optimizer).__module__.startswith(("torch.optim", "alasso.optim"))
        self._handles: list[Any] = []
        self.plans = Plans(optimizer)
        self._calls = bool(getattr(optimizer, "calls_its_hooks", False))  # as torch does not
        self._engine: Engine | None = engine_for(optimizer) if self._calls else None  # makes whole steps in one pass
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []  # gradients of a step that an engine has made
        self._plan = NOTHING  # of the step that is open
        self._grads: list[Tensor] = []  # the tasks' gradients meanwhile
        self._written: list[int] = []  # how often each total gradient had been written to when the optimizer got it
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
        if others := [one for one in self.regularizers if one is not regularizer and one.model is regularizer.model]:
            warn(
                f"another regularizer of this model ({type(others[0]).__name__}) is attached to this optimizer: both "
                "will pull; if the new one takes the old one's place, detach() the old one"
            )
        self._forget_plans()
        self.plans.compile[regularizer] = compile
        optimizer = self._optimizer()
        if optimizer is not None and not self._calls:
            self._engine = engine_for(optimizer) if any(self.plans.compile.values()) else None
        if optimizer is not None and not self._handles and not self._calls:
            self._handles = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]

    def remove(self, regularizer: Regularizer) -> None:
        """Work for this regularizer no longer; leave the optimizer as it was before the first came."""
        self._forget_plans()
        self.plans.compile.pop(regularizer, None)
        if not self.plans.compile:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    @property
    def regularizers(self) -> list[Regularizer]:
        """The regularizers that the optimizer works for."""
        return list(self.plans.compile)

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
        if self._depth > 0 or self._plan is not NOTHING:  # a step raised
            if self._depth > 0 and may_nest(type(optimizer)):
                warn("a step was interrupted, and the one after it was taken for its rest: that one had no penalty")
            self.leave_open_step()
        self._depth, self._an_inner_step_ended = 1, False
        if not callable(closure):  # another optimizer's step may take other arguments
            self.open(optimizer)
            return None
        # With a closure, backward runs inside step(): the gradients are there only after it. Torch's own optimizers
        # call it first; others may move the weights before that, as sharpness-aware ones do.
        if not type(optimizer).__module__.startswith("torch.optim"):
            observers = [one for one in self.plans.compile if one.surrogate.observes_path]
            for p in self.parameters():
                if any(one.protected.name_of(p) is not None for one in observers):
                    self._begun_at[id(p)] = local(p).detach().clone()
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
            if self._plan is not NOTHING or self._hidden:
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
            self.end()

    # -- a step ----------------------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer) -> None:
        """Tell the regularizers that a step begins."""
        for regularizer in self.plans.compile:
            regularizer.before_step(optimizer)

    def open(self, optimizer: Optimizer) -> None:
        """Put the total gradients in the place of the task's; or make the whole step, and leave nothing to do."""
        self.begin(optimizer)
        if self._engine is not None and self._is_alone(optimizer) and self.made_in_one_pass(optimizer):
            self._hidden = [(p, p.grad) for p in self.parameters() if p.grad is not None]
            for parameter, _ in self._hidden:
                parameter.grad = None
        else:
            self.open_plainly(optimizer)

    def _is_alone(self, optimizer: Optimizer) -> bool:
        """Return whether nobody else hooks into the steps: others must find gradients, which an engine hides."""
        tables = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
        return all(len(table) == 1 for table in tables)

    def made_in_one_pass(self, optimizer: Optimizer) -> bool:
        """Make the whole step where there is an engine that can, and return whether it was made."""
        return self._engine is not None and self._engine.made(optimizer, self.plans)

    @torch.no_grad()
    def open_plainly(self, optimizer: Optimizer) -> None:
        """Put the total gradients in the place of the task's."""
        # A fused optimizer under GradScaler sees scaled gradients and divides by the scale itself.
        scale = getattr(optimizer, "grad_scale", None)
        plan = self.plans.of(optimizer)
        for one in plan.passes:
            one.open()
        found_inf = getattr(optimizer, "found_inf", None) if plan.odd else None
        for parameter, ascends in plan.odd:
            factor = 1.0 if scale is None else scale
            parameter.open(-factor if ascends else factor, found_inf, self._begun_at.get(parameter.id))
        self._plan, self._written = plan, [work.total._version for work in plan.works]
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
            parameter.close()
        if plan.odd and (scale := getattr(optimizer, "grad_scale", None)) is not None:
            for g in self._grads:  # as a fused optimizer leaves them: without the scale, but for steps it skipped
                g.copy_(g / scale if found_inf is None else torch.where(found_inf.to(torch.bool), g, g / scale))
        for regularizer in plan.seen_by:
            regularizer.steps += 1
        for work, grad, written in zip(plan.works, self._grads, self._written, strict=True):
            if work.parameter.grad is not None:  # the optimizer may have put another in its place, or dropped it
                if not self._is_torchs and work.total._version != written and is_zero(work.total):
                    grad.zero_()  # as the optimizer did
                work.parameter.grad = grad
        self._end_step()

    def end(self) -> None:
        """Consolidate after a step where the regularizers were told to do so by themselves."""
        for regularizer in list(self.plans.compile):
            every = regularizer.consolidates_every
            if every is not None and regularizer.rounds >= every:
                regularizer.consolidate()

    def _end_step(self) -> None:
        for parameter, grad in self._hidden:
            if parameter.grad is None:
                parameter.grad = grad
        self._plan, self._grads, self._written, self._hidden = NOTHING, [], [], []
        self._begun_at, self._depth = {}, 0

    @torch.no_grad()
    def leave_open_step(self) -> None:
        """End a step that raised: what was written since into the gradient that it left is the task's own."""
        for work, grad, written in zip(self._plan.works, self._grads, self._written, strict=True):
            if work.parameter.grad is work.total:
                if work.total._version != written:
                    grad.copy_(work.total)
                work.parameter.grad = grad
        self._end_step()

    def _forget_plans(self) -> None:
        self.leave_open_step()
        self.plans.release()
        if self._engine is not None:
            self._engine.forget()

    def _let_go(self, _: Any) -> None:
        """The optimizer is gone."""
        if not sys.is_finalizing():  # torch may be gone, too
            self._forget_plans()


def is_zero(tensor: Tensor) -> bool:
    """Return whether a gradient is all zeros, as one that an optimizer has reset within its step."""
    g = local(tensor)
    if is_recording(g.device):
        return False  # nothing can be asked of a GPU that records
    return not bool(g[:1].any() if g.dim() else g.any()) and not bool(g.any())


_hooks_of: WeakKeyDictionary[Optimizer, StepHooks] = WeakKeyDictionary()
