"""What all adapters share: they attach a regularizer while a task is trained, and consolidate it after."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

from torch import nn
from torch.optim import Optimizer

from alasso._step_hooks import base_optimizer
from alasso.errors import AlassoError
from alasso.importance._objectives import Head
from alasso.methods.imm import IMM
from alasso.regularizer import Loader, Regularizer

EndOfTask = Literal["fit", "manual"]
Make = Callable[[nn.Module], Regularizer]


class HasRegularizer:
    """What every adapter offers beside its events."""

    _keeper: TaskKeeper

    @property
    def regularizer(self) -> Regularizer:
        """The regularizer given, or the one made when training began."""
        return self._keeper.regularizer


class TaskKeeper:
    """Attaches and consolidates a regularizer, or makes it from the trainer's model first, task after task."""

    def __init__(
        self, regularizer: Regularizer | Make, end_of_task: EndOfTask, loader: Loader | None, head: Head | None
    ) -> None:
        if end_of_task not in get_args(EndOfTask):
            raise AlassoError(f"end_of_task must be one of {', '.join(get_args(EndOfTask))}, not {end_of_task!r}")
        if isinstance(regularizer, nn.Module) or not (isinstance(regularizer, Regularizer) or callable(regularizer)):
            raise AlassoError(
                f"the callback needs a regularizer such as ALASSO(model), or ALASSO itself, "
                f"not {type(regularizer).__name__}"
            )
        self._given = regularizer
        self._made = regularizer if isinstance(regularizer, Regularizer) else None
        self.end_of_task = end_of_task
        self.loader = loader
        self.head = head

    @property
    def regularizer(self) -> Regularizer:
        """The regularizer; an error before it is made."""
        if self._made is None:
            raise AlassoError("the regularizer is made when training begins; there is none yet")
        return self._made

    @property
    def is_made(self) -> bool:
        """Whether the regularizer exists."""
        return self._made is not None

    def make(self, model: nn.Module) -> None:
        """Make the regularizer for ``model``, unless it exists."""
        if self._made is None:
            assert not isinstance(self._given, Regularizer)
            self._made = self._given(model)

    def begin(self, optimizers: Iterable[Optimizer]) -> None:
        """Attach to the optimizers that hold protected parameters, and leave others (of a discriminator, say) alone."""
        regularizer = self.regularizer
        regularizer.detach()  # from a training that ended with an error
        if isinstance(regularizer, IMM) and regularizer.steps == 0:
            regularizer.begin_task()
        optimizers = list(optimizers)
        regularizer.look()
        holding = [optimizer for optimizer in optimizers if regularizer.trains(base_optimizer(optimizer))]
        for optimizer in holding or optimizers:  # if none does, attach() raises
            regularizer.attach(optimizer)

    def end(self, loader: Any) -> None:
        """End a task: consolidate, unless the user does that, and detach from the optimizers."""
        if self.end_of_task == "fit":
            self.regularizer.consolidate(self.loader if self.loader is not None else loader, head=self.head)
        self.regularizer.detach()
