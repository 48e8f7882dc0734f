"""Adam and SGD that know a regularizer: the penalty is part of their own pass over memory, which is compiled.

They are torch's optimizers, with their arguments, ``state_dict`` and behaviour.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from alasso._step_hooks import StepHooks
from alasso.errors import AlassoError
from alasso.regularizer import Regularizer

__all__ = ["SGD", "Adam"]

Loss = TypeVar("Loss")


class FusedOptimizer(Optimizer):
    """What the two have in common."""

    calls_its_hooks = True  # torch does not

    def _take(self, regularizer: object) -> None:
        if isinstance(regularizer, Regularizer):
            regularizer.attach(self)
        elif regularizer is not None:
            given = f"the class {regularizer.__name__}" if isinstance(regularizer, type) else type(regularizer).__name__
            raise AlassoError(f"regularizer takes one made for the model, as alasso.ALASSO(model), not {given}")

    def _step(self, closure: Callable[[], Loss] | None, torch_step: Callable[..., Any]) -> Loss | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        hooks = StepHooks.of(self)
        hooks.leave_open_step()  # which raised
        hooks.begin(self)
        if not hooks.made_in_one_pass(self):
            hooks.open_plainly(self)
            unhooked(torch_step)(self)
            hooks.close(self)
        hooks.end()
        return loss


class Adam(FusedOptimizer, torch.optim.Adam):
    """``torch.optim.Adam``, whose steps add a regularizer's penalty and observe its path; no ``attach()`` is needed.

    Compiling takes some seconds at the first steps, and is shown. What cannot be fused (half precision, scaled
    gradients, no compiler) is done by hooks, with equal results, and a line in the log.

    Args:
        params: As torch takes them.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decay of the weights.
        amsgrad: Whether the largest second moment so far is used.
        regularizer: Whose penalty is part of each step.
        **options: torch's other options.

    Raises:
        AlassoError: ``regularizer`` is none, or protects none of the parameters.

    >>> import alasso
    >>> model = torch.nn.Linear(4, 2)
    >>> reg = alasso.ALASSO(model)
    >>> optimizer = alasso.optim.Adam(model.parameters(), lr=1e-3, regularizer=reg)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    >>> reg.consolidate()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        regularizer: Regularizer | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
        self._take(regularizer)

    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:  # type: ignore[override]
        """Make a step.

        Args:
            closure: Evaluates the loss and its gradients, as torch's optimizers take it.

        Returns:
            The closure's loss, if there is one.
        """
        return self._step(closure, torch.optim.Adam.step)


class SGD(FusedOptimizer, torch.optim.SGD):
    """``torch.optim.SGD``, whose steps add a regularizer's penalty, as those of :class:`Adam` do.

    Args:
        params: As torch takes them.
        lr: Learning rate.
        momentum: Decay of the velocity.
        dampening: What is kept from the velocity of each gradient.
        weight_decay: Decay of the weights.
        nesterov: Whether the step looks ahead.
        regularizer: Whose penalty is part of each step.
        **options: torch's other options.

    Raises:
        AlassoError: ``regularizer`` is none, or protects none of the parameters.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        regularizer: Regularizer | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, **options)
        self._take(regularizer)

    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:  # type: ignore[override]
        """Make a step.

        Args:
            closure: Evaluates the loss and its gradients, as torch's optimizers take it.

        Returns:
            The closure's loss, if there is one.
        """
        return self._step(closure, torch.optim.SGD.step)


def unhooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's step() without the hooks around it: they are run around ours."""
    inner: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    return inner
