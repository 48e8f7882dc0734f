"""Hooks on any torch optimizer: which one to observe, closures, steps within steps.

What happens to the gradients at each step is in :mod:`alasso._exchange`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from alasso._exchange import Exchange
from alasso._frames import is_parents_step, users_stacklevel
from alasso.errors import AlassoError
from alasso.optim._engines import engine_for

if TYPE_CHECKING:
    from alasso.regularizer import Regularizer


def base_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer whose step() is really called, inside any wrapper; refuses those that cannot be observed."""
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
    """Whether torch would run step hooks of this optimizer."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


class Attachment(Exchange):
    """The two hooks of one regularizer on one optimizer.

    Where torch's own Adam or SGD is large enough to be made in one compiled pass with the penalty, the first hook makes
    the whole step, and hides the gradients from the optimizer, which then has nothing to do, until the second.
    """

    def __init__(self, regularizer: Regularizer, optimizer: Optimizer) -> None:
        super().__init__(regularizer, optimizer)
        self._engine = engine_for(optimizer)
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        self._warn_of_earlier_ones()
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        # Of several regularizers, the one whose step began last ends it first: each finds the gradients it left.
        optimizer._optimizer_step_post_hooks.move_to_end(self._handles[1].id, last=False)  # type: ignore[attr-defined]

    def _warn_of_earlier_ones(self) -> None:
        """A path integral is over the task's own gradient: with another penalty in it, it would be a wrong one."""
        hooks = self.optimizer._optimizer_step_pre_hooks.values()
        earlier = [owner for hook in hooks if isinstance(owner := getattr(hook, "__self__", None), Attachment)]
        if earlier and self.regularizer.surrogate.observes_path:
            own, other = (type(one.regularizer).__name__ for one in (self, earlier[0]))
            either = earlier[0].regularizer.surrogate.observes_path  # then no order serves both
            what_to_do = "Detach the other one." if either else f"Detach the other one, or attach {own} first."
            warnings.warn(
                f"another regularizer ({other}) is attached to this optimizer already: {own}, attached after it, takes "
                f"its penalty for part of the task's loss. {what_to_do}",
                stacklevel=users_stacklevel(),
            )

    def open(self) -> None:
        # Another hook that looks at the gradients, or changes them, must find them.
        hooks = (self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks)
        alone = all(len(table) == 1 for table in hooks)
        if self._engine is not None and alone and self._engine.made(self):
            self._hide_gradients()
        else:
            super().open()

    def forget(self) -> None:
        if self._engine is not None:
            self._engine.forget()

    def _hide_gradients(self) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._hidden = [(p, p.grad) for p in parameters]
        for p in parameters:
            p.grad = None

    def give_back_gradients(self) -> None:
        super().give_back_gradients()
        for parameter, grad in self._hidden:
            if parameter.grad is None:
                parameter.grad = grad
        self._hidden = []

    def remove(self) -> None:
        super().remove()
        for handle in self._handles:
            handle.remove()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        args = args[1:] if args and args[0] is optimizer else args
        closure = args[0] if args else kwargs.get("closure")
        if is_parents_step(sys._getframe(1), optimizer):
            return None
        self.take_back_gradients()  # a step that raised left them exchanged
        if not callable(closure):  # an optimizer of one's own may take other arguments
            self.open()
            return None
        self.note_weights()
        # With a closure, backward runs inside step(): the gradients are there only after it.
        wrapped = self._wrap(closure)
        if args:
            return (optimizer, wrapped, *args[1:]), kwargs
        return (optimizer,), {**kwargs, "closure": wrapped}

    def _wrap(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def closure_then_penalty() -> Any:
            if self._open or self._hidden:
                raise AlassoError(
                    f"{type(self.optimizer).__name__} called its closure twice in one step, so no single gradient "
                    "belongs to its move; use an optimizer that evaluates the loss once a step"
                )
            loss = closure()
            self.open()
            return loss

        return closure_then_penalty

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_parents_step(sys._getframe(1), optimizer):
            self.close()


class TakesRegularizer:
    """An optimizer that adds the penalty by itself and needs no hooks."""

    def connect(self, regularizer: Regularizer) -> Exchange:
        """Work for this regularizer from now on."""
        raise AssertionError("each such optimizer has its own")


def attached(regularizer: Regularizer, optimizer: Optimizer) -> Exchange:
    """The regularizer's part in this optimizer's steps, from now on."""
    if isinstance(optimizer, TakesRegularizer):
        return optimizer.connect(regularizer)
    return Attachment(regularizer, optimizer)
