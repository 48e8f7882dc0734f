"""Adam and SGD that know a regularizer: the penalty is part of their own pass over memory.

They are torch's optimizers, with their arguments, ``state_dict`` and behaviour; :mod:`alasso.optim._fused_step`
makes the steps.
What does not fit there goes by way of hooks around torch's own step, with equal results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from alasso._exchange import Exchange
from alasso._step_hooks import TakesRegularizer
from alasso.errors import AlassoError
from alasso.optim._engines import AdamEngine, SGDEngine
from alasso.optim._fused_step import Engine
from alasso.regularizer import Regularizer

Closure = Callable[[], Any]


class _OnePass(TakesRegularizer, Optimizer):
    """What the two have in common."""

    # Defaults here, not in __init__, because a copied or unpickled optimizer never runs it.
    _engine: Engine | None = None
    _exchange: Exchange | None = None

    @property
    def regularizer(self) -> Regularizer | None:
        """The regularizer that this optimizer works for."""
        return None if self._exchange is None else self._exchange.regularizer

    def _work_for(self, regularizer: Any) -> None:
        if isinstance(regularizer, Regularizer):
            regularizer.attach(self)
        elif regularizer is not None:
            given = f"the class {regularizer.__name__}" if isinstance(regularizer, type) else type(regularizer).__name__
            raise AlassoError(f"regularizer takes one made for the model, as alasso.ALASSO(model), not {given}")

    def connect(self, regularizer: Regularizer) -> Exchange:
        if self._exchange is not None and self._exchange.regularizer is not regularizer:
            raise AlassoError(
                f"this {type(self).__name__} already works for another regularizer; detach() that one first"
            )
        self._exchange = _Connection(regularizer, self)
        return self._exchange

    def _new_engine(self) -> Engine:
        raise AssertionError("each optimizer has its own")

    def _step(self, closure: Closure | None, torch_step: Callable[..., Any]) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._engine is None:
            self._engine = self._new_engine()
        if not self._engine.made(self._exchange):
            self._in_two_halves(unhooked(torch_step))
        return loss

    def _in_two_halves(self, torch_step: Callable[..., Any]) -> None:
        exchange = self._exchange
        if exchange is None:
            torch_step(self)
            return
        try:
            exchange.open()
            torch_step(self)
            exchange.close()
        finally:
            exchange.give_back_gradients()


class _Connection(Exchange):
    """A regularizer's part in the steps of an optimizer that knows it."""

    optimizer: _OnePass

    def forget(self) -> None:
        if self.optimizer._engine is not None:
            self.optimizer._engine.forget()

    def remove(self) -> None:
        super().remove()
        self.release()
        self.forget()
        if self.optimizer._exchange is self:
            self.optimizer._exchange = None


class Adam(_OnePass, torch.optim.Adam):
    """``torch.optim.Adam`` with all its arguments, and two more.

    ``regularizer``  its penalty is part of each step, its path is observed; ``attach()`` is not needed
    ``compile``  None: compiled where that pays; True: whatever the network's size; False: never

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
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        regularizer: Regularizer | None = None,
        compile: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
        self._engine = AdamEngine(self, compile)
        self._work_for(regularizer)

    def step(self, closure: Closure | None = None) -> Any:
        check_recording(self)
        return self._step(closure, torch.optim.Adam.step)

    def _new_engine(self) -> Engine:
        return AdamEngine(self)


class SGD(_OnePass, torch.optim.SGD):
    """``torch.optim.SGD`` with all its arguments, and ``regularizer`` and ``compile`` as in :class:`Adam`."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        regularizer: Regularizer | None = None,
        compile: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, **options)
        self._engine = SGDEngine(self, compile)
        self._work_for(regularizer)

    def step(self, closure: Closure | None = None) -> Any:
        return self._step(closure, torch.optim.SGD.step)

    def _new_engine(self) -> Engine:
        return SGDEngine(self)


def unhooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """torch's step() without the hooks around it: they are run around ours."""
    inner: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    return inner


def check_recording(optimizer: Any) -> None:
    """torch's own check that a CUDA graph is recorded with capturable=True only; older versions name it otherwise."""
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        if hasattr(optimizer, name):
            getattr(optimizer, name)()
            return
