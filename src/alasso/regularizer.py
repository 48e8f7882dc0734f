"""The shell around the maths: attaches to optimizers, consolidates, saves and loads."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alasso import importance as measures
from alasso._distributed import local, total_of
from alasso._exchange import Exchange
from alasso._frames import users_stacklevel
from alasso._parameter_states import KeepsStates
from alasso._parameters import named_weights, some_of
from alasso._sightings import begins_with
from alasso._soundness import check_importance
from alasso._state_dict import STATE_VERSION, check_form, check_saved, from_saved, to_save
from alasso._step_hooks import attached, base_optimizer
from alasso._unseen import count_unseen_steps, warn_of_untrained
from alasso._wording import count_of
from alasso.errors import AlassoError
from alasso.importance._objectives import Loss
from alasso.methods.base import Surrogate
from alasso.optim import _compile as kernels

if TYPE_CHECKING:
    from typing_extensions import Self

Loader = Iterable[Any]
Head = Callable[[Any], Tensor]
Measure = Literal["fisher", "mas"]


class Regularizer(KeepsStates):
    """Protects what a model has learned. Subclasses are the public methods: ALASSO, SI, EWC, OnlineEWC, MAS.

    ``exclude`` holds shell-style patterns of parameter names that are left alone (``"head.*"``); so is a tied parameter
    of which any name fits. Parameters that are frozen when they first meet the regularizer cost nothing; one that is
    unfrozen later is picked up at its first step.
    """

    method: ClassVar[str]
    _to_compare = False  # weights with anchors, once a state of a task's end was loaded

    def __init__(self, model: nn.Module, surrogate: Surrogate[Any], exclude: Iterable[str] = ()) -> None:
        super().__init__(model, surrogate, exclude)
        self.unseen_steps = 0  # since the last consolidation, of optimizers that were not attached
        self.penalty_was_taken = False  # since then, to be added to a loss by hand
        self._attachments: list[Exchange] = []

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.settings().items())
        behind, protected = count_of(self.tasks, "task"), count_of(len(self._states), "tensor")
        return f"{type(self).__name__}({settings}), {behind} behind, {protected} protected"

    # -- in the training loop --------------------------------------------------------------------------------

    def attach(self, optimizer: Optimizer) -> Self:
        """Add the penalty to every step of ``optimizer`` from now on, and observe the steps.

        The training loop stays as it is: closures, gradient accumulation, clipping, schedulers, mixed precision. Attach
        again after the model grew or with a new optimizer; attaching the same optimizer twice changes nothing. Also a
        context manager that detaches at the end.
        """
        optimizer = base_optimizer(optimizer)
        self.refresh()
        if not any(True for _ in self.protected()):
            raise AlassoError("the model has no weights to protect: all are frozen, excluded, or no real numbers")
        if not self.holds_any_of(optimizer):
            raise AlassoError(
                "the optimizer holds none of the model's protected parameters; "
                "build it from the parameters of the model given to " + type(self).__name__
            )
        if not self.is_attached_to(optimizer):
            self._attachments.append(attached(self, optimizer))
        for attachment in self._attachments:
            attachment.note_held()
        count_unseen_steps(self)
        self._sightings.warn()
        return self

    def detach(self) -> None:
        """Leave all optimizers as they were before :meth:`attach`; the memory of past tasks stays."""
        for attachment in self._attachments:
            attachment.remove()
        self._attachments.clear()

    @property
    def is_attached(self) -> bool:
        """Whether there is an optimizer whose steps are observed."""
        return bool(self._attachments)

    def holds_any_of(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer trains any protected parameter."""
        return any(self.name_of(p) is not None for group in optimizer.param_groups for p in group["params"])

    def is_attached_to(self, optimizer: Optimizer) -> bool:
        return any(attachment.optimizer is optimizer for attachment in self._attachments)

    @property
    def is_within_a_step(self) -> bool:
        """Whether an attached optimizer has begun a step and not ended it."""
        return any(attachment.is_open for attachment in self._attachments)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def consolidate(self, loader: Loader | None = None, *, head: Head | None = None) -> None:
        """End of a task: take the weights as they are as the new anchor, and the path to them as their importance.

        No data is needed; a loader is taken and not used, so that one loop can serve all methods.
        """
        if self.surrogate.observes_path and self.steps == 0:
            since = " since the last one" if self.tasks else ""
            raise AlassoError(f"consolidate() has seen no optimizer step{since}; {self._who_stepped()}")
        if self.surrogate.observes_path and self.unseen_steps >= self.steps:
            warnings.warn(
                f"consolidate() has seen only {self.steps} of {self.steps + self.unseen_steps} optimizer steps since "
                "the last one, and takes importance from those alone; attach() every optimizer that trains the model",
                stacklevel=users_stacklevel(),
            )
        self._look_again()
        self._consolidate({})

    def _who_stepped(self) -> str:
        """Where no step was seen: what to do about it."""
        if self.unseen_steps:
            made = "1 was" if self.unseen_steps == 1 else f"{self.unseen_steps} were"
            return f"{made} made by an optimizer that is not attached: attach() it before training"
        what_to_do = "train with the optimizer that is attached" if self._attachments else "call attach(optimizer)"
        return f"{what_to_do} before it (a copied optimizer loses its hooks)"

    def _look_again(self) -> None:
        """At the end of a task; parameters that came into the model meanwhile and are not trained are said."""
        added = {name for name, _ in named_weights(self.model, self.exclude) if name not in self._sightings}
        self.refresh()
        warn_of_untrained(self, self._attachments, added)
        for attachment in self._attachments:
            attachment.note_held()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _consolidate(self, importance: Mapping[str, Tensor]) -> None:
        self.refresh()
        # All of the new state is worked out and checked before any of the old one is given up.
        new_states = {}
        for name, parameter in self.protected():
            state, theta = self.state_of(name, parameter), self._theta(parameter)
            new_states[name] = self.surrogate.consolidate(state, theta, importance.get(name))
        check_importance({name: state.omega for name, state in new_states.items()}, (p for _, p in self.protected()))
        self._states.update(new_states)
        self._forget_passes()
        self.tasks += 1
        self._sightings.all_is_well()  # what parameters hold now is what the past holds, too
        self.steps = self.unseen_steps = 0
        self.penalty_was_taken = False

    def warm_start(
        self,
        loader: Loader,
        importance: Measure = "fisher",
        *,
        labels: str = "true",
        head: Head | None = None,
        loss: Loss | None = None,
        scale: float = 1.0,
    ) -> None:
        """Protect weights that were trained before the regularizer came, such as those of a pretrained model.

        A path method has seen nothing of that training, so Ω is measured on ``loader`` at the weights as they are: the
        diagonal "fisher" information, or the outputs' sensitivity, "mas", which needs no labels. It should hold some
        hundred samples of what the model must not lose. ALASSO treats both sides of these weights as unobserved. Call
        it before training; it counts as one task.

        ``labels``, ``head`` and ``loss`` are those of :func:`alasso.importance.fisher`. ``scale`` multiplies what was
        measured: with 0.5, Ω·d² is the Fisher's own estimate of how much the old loss rises.
        """
        if importance not in get_args(Measure):
            raise AlassoError(f"importance must be one of {', '.join(get_args(Measure))}, not {importance!r}")
        if self.tasks > 0 or self.steps > 0:
            raise AlassoError("warm_start() is for weights from before the first task; call it before training")
        if not scale > 0:
            raise AlassoError(f"scale must be a positive number, not {scale}")
        self.refresh()
        parameters = dict(self.protected())
        with torch.inference_mode(False), torch.enable_grad():
            if importance == "fisher":
                options: dict[str, Any] = {"labels": labels, "loss": loss}
                measured = measures.fisher(self.model, loader, parameters=parameters, head=head, **options)
            else:
                measured = measures.squared_output_norm(self.model, loader, parameters=parameters, head=head)
        check_importance(measured, (p for _, p in self.protected()))
        with torch.inference_mode(False), torch.no_grad():
            for name, parameter in parameters.items():
                theta = self._theta(parameter)
                self.adopt(name, self.surrogate.warm_start(theta, (scale * measured[name]).to(theta.dtype)))
        self.tasks = 1

    def penalty(self) -> Tensor:
        """What the surrogate of the past adds to the loss at the model's present weights; differentiable.

        With sharded parameters it is the sum over all shards: call it on all ranks.
        """
        self.penalty_was_taken |= torch.is_grad_enabled()
        if any(self.name_of(parameter) is None for _, parameter in named_weights(self.model, self.exclude)):
            self.look_again()  # a head that grew, or was replaced, since
        terms = [
            (self.surrogate.penalty(local(parameter).to(state.anchor.dtype), state), parameter)
            for name, parameter in self.protected()
            for state in (self.state_of(name, parameter),)
        ]
        total = total_of(terms) if terms else torch.zeros(())
        if self.is_attached and total.requires_grad:
            total.register_hook(self._warn_that_it_counts_twice)
        return total

    def _warn_that_it_counts_twice(self, gradient: Tensor) -> None:
        if self.is_attached:
            warnings.warn(
                "penalty() is part of a loss, and attach() adds it at every step, too: the past counts twice; leave it "
                "out of the loss, or detach()",
                stacklevel=users_stacklevel(),
            )

    # -- saving ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All there is to remember, also in the middle of a task; tensors, numbers and strings only.

        Of sharded parameters, each rank's dictionary holds its own shards as distributed tensors, ready for
        `torch.distributed.checkpoint`: call it on all ranks.
        """
        parameters = dict(self.protected())
        in_model = {name for name, _ in named_weights(self.model, self.exclude)}  # and not of layers that are gone
        return {
            "version": STATE_VERSION,
            "method": self.method,
            "settings": self.settings(),
            "tasks": self.tasks,
            "steps": self.steps,
            "unseen_steps": self.unseen_steps,
            "parameters": {
                name: {field: to_save(tensor, state, parameters.get(name)) for field, tensor in state._asdict().items()}
                for name, state in self._states.items()
                if name in in_model
            },
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over a saved state, settings included (as optimizers do). Refused whole if anything does not fit."""
        check_form(saved)
        self.refresh()
        named = dict(named_weights(self.model, self.exclude))  # frozen ones, too: their past may be from before that
        parameters = dict(self.protected()) | {name: named[name] for name in saved["parameters"] if name in named}
        check_saved(saved, self.method, self.surrogate, self.settings(), parameters)
        self.take_settings(saved["settings"])
        with torch.inference_mode(False):
            self._states = {
                name: self.surrogate.State(
                    **{field: from_saved(tensor, parameters[name]) for field, tensor in tensors.items()}
                )
                for name, tensors in saved["parameters"].items()
            }
        self.tasks, self.steps = saved["tasks"], saved["steps"]
        self.unseen_steps = saved.get("unseen_steps", 0)
        self._to_compare = self.anchors_are_weights and self.tasks > 0 and self.steps == 0
        self.refresh()

    def compare_weights(self) -> None:
        """Before the first step after a state of a task's end was loaded: the model should be where that task ended."""
        if not self._to_compare:
            return
        self._to_compare = False
        known = [(name, local(parameter), self.state_of(name, parameter)) for name, parameter in self.protected()]
        if any(kernels.is_being_recorded(theta.device) for _, theta, _ in known):
            return
        matter = {name: begins_with(theta, state.anchor) for name, theta, state in known if state.omega.any()}
        if strayed := [name for name, holds in matter.items() if not holds]:
            some = len(strayed) < len(matter)
            which = f"{some_of(strayed)} do not hold" if some else "no tensor of the model holds"
            warnings.warn(
                f"{which} the weights that the loaded past ended with, to which it pulls them from now on; load the "
                "model's own weights, too: they are not part of the regularizer's state. What is to begin anew goes to "
                "forget()",
                stacklevel=users_stacklevel(),
            )

    def __getstate__(self) -> dict[str, Any]:
        """Without attachments: the hooks on optimizers are not copied, nor are they put into files."""
        return {**super().__getstate__(), "_attachments": []}

    # -- what hangs on the states ----------------------------------------------------------------------------

    def _forget_passes(self) -> None:
        for attachment in self._attachments:
            attachment.forget()

    def reanchor(self) -> None:
        self.unseen_steps = 0
        super().reanchor()
