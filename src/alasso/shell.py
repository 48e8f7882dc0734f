"""The shell around the maths: keeps each parameter's state, attaches to optimizers, consolidates, saves and loads."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alasso import importance as measures
from alasso import kernels
from alasso.attach import Exchange, attached, base_optimizer
from alasso.errors import AlassoError
from alasso.methods.surrogate import Surrogate
from alasso.names import check_kinds, check_patterns, named_weights, patterns_of, plain_name, unwrapped
from alasso.objectives import Loss
from alasso.ranks import as_sharded, total_of
from alasso.saving import STATE_VERSION, check_saved, from_saved, to_save
from alasso.settings import WithSettings
from alasso.sharding import gather_no_more, local
from alasso.sightings import Past, Sightings
from alasso.soundness import check_importance
from alasso.states import grown, moved_like, state_dtype
from alasso.unseen import count_unseen_steps, warn_of_untrained
from alasso.wording import count_of

Loader = Iterable[Any]
Head = Callable[[Any], Tensor]
Measure = Literal["fisher", "mas"]


NOT_PROTECTED = "this parameter is not protected; pass one of the regularizer's own model"
NO_PARAMETER = "forget() takes a parameter itself, as model.head.weight, not {!r:.40}"


class Regularizer(WithSettings):
    """Protects what a model has learned. Subclasses are the public methods: ALASSO, SI, EWC, OnlineEWC, MAS.

    ``exclude`` holds shell-style patterns of parameter names that are left alone (``"head.*"``). Parameters that are
    frozen when they first meet the regularizer cost nothing; one that is unfrozen later is picked up at its first step.
    """

    method: ClassVar[str]
    anchors_are_weights: ClassVar[bool] = True  # whether the model ends a task at its anchors

    def __init__(self, model: nn.Module, surrogate: Surrogate[Any], exclude: Iterable[str] = ()) -> None:
        if not isinstance(model, nn.Module):
            raise AlassoError(f"{type(self).__name__} takes the model itself, an nn.Module, not {type(model).__name__}")
        self.model = unwrapped(model)
        self.surrogate = surrogate
        self.exclude = patterns_of(exclude)
        self.tasks = 0  # consolidated so far
        self.steps = 0  # optimizer steps observed since the last consolidation
        self.unseen_steps = 0  # and those of optimizers that were not attached
        self.penalty_was_taken = False  # since then, to be added to a loss by hand
        self._states: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._sightings = Sightings()
        self._stiffness: dict[str, tuple[Any, tuple[Tensor, Tensor]]] = {}
        self._surrogate_on: dict[tuple[torch.device, torch.dtype], tuple[Any, Any]] = {}
        self._attachments: list[Exchange] = []
        check_patterns(self.model, self.exclude)
        check_kinds(self.model, self.exclude, stacklevel=4)
        self.refresh()

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.settings().items())
        behind, protected = count_of(self.tasks, "task"), count_of(len(self._states), "tensor")
        return f"{type(self).__name__}({settings}), {behind} behind, {protected} protected"

    # -- in the training loop --------------------------------------------------------------------------------

    def attach(self, optimizer: Optimizer) -> Regularizer:
        """Add the penalty to every step of ``optimizer`` from now on, and observe the steps.

        The training loop stays as it is: closures, gradient accumulation, clipping, schedulers, mixed precision. Attach
        again after the model grew or with a new optimizer; attaching the same optimizer twice changes nothing. Also a
        context manager that detaches at the end.
        """
        optimizer = base_optimizer(optimizer)
        self.refresh()
        if not any(True for _ in self.protected()):
            raise AlassoError("the model has no weights to protect: all are frozen, excluded, or no real numbers")
        if not any(id(p) in self._names for group in optimizer.param_groups for p in group["params"]):
            raise AlassoError(
                "the optimizer holds none of the model's protected parameters; "
                "build it from the parameters of the model given to " + type(self).__name__
            )
        if not self.is_attached_to(optimizer):
            self._attachments.append(attached(self, optimizer))
        for attachment in self._attachments:
            attachment.note_held()
        count_unseen_steps(self)
        self._sightings.warn(stacklevel=2)
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

    def is_attached_to(self, optimizer: Optimizer) -> bool:
        return any(attachment.optimizer is optimizer for attachment in self._attachments)

    @property
    def is_within_a_step(self) -> bool:
        """Whether an attached optimizer has begun a step and not ended it."""
        return any(attachment.is_open for attachment in self._attachments)

    def __enter__(self) -> Regularizer:
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
            raise AlassoError(f"consolidate() has seen no optimizer step since the last one; {self._who_stepped()}")
        if self.surrogate.observes_path and self.unseen_steps >= self.steps:
            warnings.warn(
                f"consolidate() has seen only {self.steps} of {self.steps + self.unseen_steps} optimizer steps since "
                "the last one, and takes importance from those alone; attach() every optimizer that trains the model",
                stacklevel=2,
            )
        self._look_again(stacklevel=2)
        self._consolidate({})

    def _who_stepped(self) -> str:
        """Where no step was seen: what to do about it."""
        if self.unseen_steps:
            made = "1 was" if self.unseen_steps == 1 else f"{self.unseen_steps} were"
            return f"{made} made by an optimizer that is not attached: attach() it before training"
        what_to_do = "train with the optimizer that is attached" if self._attachments else "call attach(optimizer)"
        return f"{what_to_do} before it (a copied optimizer loses its hooks)"

    def _look_again(self, stacklevel: int) -> None:
        """At the end of a task; parameters that came into the model meanwhile and are not trained are said."""
        added = {name for name, _ in named_weights(self.model, self.exclude) if name not in self._sightings}
        self.refresh()
        warn_of_untrained(self, self._attachments, added, stacklevel + 1)
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
                stacklevel=2,
            )

    def importance(self) -> dict[str, Tensor]:
        """{parameter name: Ω}, never negative; sharded as the parameters are."""
        return self._field("omega")

    def anchor(self) -> dict[str, Tensor]:
        """{parameter name: θ̂}, the weights that the penalty pulls towards; sharded as the parameters are."""
        return self._field("anchor")

    def _field(self, field: str) -> dict[str, Tensor]:
        parameters = dict(self.protected())
        return {name: as_sharded(getattr(state, field), parameters.get(name)) for name, state in self._states.items()}

    # -- saving ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All there is to remember, also in the middle of a task; tensors, numbers and strings only.

        Of sharded parameters, each rank's dictionary holds its own shards as distributed tensors, ready for
        `torch.distributed.checkpoint`: call it on all ranks.
        """
        parameters = dict(self.protected())
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
            },
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over a saved state, settings included (as optimizers do). Refused whole if anything does not fit."""
        self.refresh()
        parameters = dict(self.protected())
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
        self.refresh()

    def settings_changed(self) -> None:
        self.forget_stiffness()
        self._forget_passes()

    # -- the state of single parameters ----------------------------------------------------------------------

    def refresh(self) -> None:
        """Look at the model again: parameters may have been added, unfrozen, or replaced by larger ones."""
        gather_no_more(self.model)
        named = dict(named_weights(self.model, self.exclude))
        self._sightings.look(named, self._past_of)
        self._names = {id(parameter): name for name, parameter in named.items()}
        for name, parameter in self.protected():
            self.state_of(name, parameter)

    def _past_of(self, name: str) -> Past | None:
        state = self._states.get(name)
        if self.tasks == 0 or state is None:
            return None
        return Past(state.omega, state.anchor if self.anchors_are_weights and self.steps == 0 else None)

    def protected(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of every parameter that has, or can have, a state."""
        for name, parameter in self.model.named_parameters():
            known = self._names.get(id(parameter))
            if known is not None and (parameter.requires_grad or plain_name(name) in self._states):
                yield known, parameter

    def name_of(self, parameter: nn.Parameter) -> str | None:
        """Name under which this parameter is protected, None if it is not."""
        return self._names.get(id(parameter))

    def state_of(self, name: str, parameter: nn.Parameter) -> Any:
        """The parameter's state, made at first sight, and brought to where and how large the parameter is now."""
        state = self._states.get(name)
        theta = local(parameter)
        if (
            state is not None
            and state.anchor.shape == theta.shape
            and state.anchor.device == theta.device
            and state.anchor.dtype == state_dtype(theta)
        ):
            return state
        return self._new_state_of(name, parameter)

    @torch.inference_mode(False)  # whoever asks: the state is written to at steps to come
    @torch.no_grad()
    def _new_state_of(self, name: str, parameter: nn.Parameter) -> Any:
        theta = local(parameter)
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = self.surrogate.init(self._theta(parameter))
        if state.anchor.shape != theta.shape and state.anchor.shape == parameter.shape:
            # The model was sharded since.
            state = self._states[name] = type(state)(*(from_saved(t, parameter) for t in state))
        if state.anchor.shape != theta.shape:
            state = self._states[name] = grown(self.surrogate, name, state, self._theta(parameter))
        if state.anchor.device != theta.device or state.anchor.dtype != state_dtype(theta):
            state = self._states[name] = moved_like(state, theta)
        return state

    def stiffness_of(self, name: str, state: Any) -> tuple[Tensor, Tensor]:
        """The state's stiffness, which does not change within a task: worked out once, 4 or 8 bytes a weight."""
        kept = self._stiffness.get(name)
        if kept is None or kept[0] is not state:
            kept = self._stiffness[name] = (state, self.surrogate.stiffness(state))
        return kept[1]

    def adopt(self, name: str, state: Any) -> None:
        """This is the parameter's state from now on, in these very tensors."""
        self._states[name] = state
        self._forget_passes()

    def _forget_passes(self) -> None:
        for attachment in self._attachments:
            attachment.forget()

    def forget_stiffness(self) -> None:
        """Give up what :meth:`stiffness_of` keeps."""
        self._stiffness.clear()

    def surrogate_on(self, device: torch.device, dtype: torch.dtype) -> Any:
        """The surrogate with its settings as tensors, as compiled passes take them."""
        kept = self._surrogate_on.get((device, dtype))
        if kept is None or kept[0] is not self.surrogate:
            kept = (self.surrogate, kernels.with_tensor_settings(self.surrogate, device, dtype))
            if not kernels.is_being_recorded(device):
                self._surrogate_on[device, dtype] = kept
        return kept[1]

    def reanchor(self) -> None:
        """Before the very first step there is no past: the path begins at the weights as they are now."""
        self.unseen_steps = 0
        for name, parameter in self.protected():
            self._states[name] = self.surrogate.init(self._theta(parameter))

    def shift_anchor(self, parameter: nn.Parameter, by: Tensor) -> None:
        """The caller gave this parameter another origin, θ → θ + ``by``, that changes nothing: memory goes along."""
        name, state = self._known(parameter)
        self.adopt(name, state._replace(anchor=state.anchor + local(by).to(state.anchor.dtype)))

    def forget(self, parameter: nn.Parameter) -> None:
        """This parameter no longer matters to what was learned: it starts again, without a past.

        It may be one that has just taken the place of another, of any shape.
        """
        name = next((name for name, own in named_weights(self.model, self.exclude) if own is parameter), None)
        if name is None or not (parameter.requires_grad or name in self._states):
            raise AlassoError(NOT_PROTECTED if isinstance(parameter, nn.Parameter) else NO_PARAMETER.format(parameter))
        # This one alone is looked at again: others of the same layer may be about to be forgotten, too.
        self._names[id(parameter)] = name
        self._sightings.note(name, parameter)
        self.adopt(name, self.surrogate.init(self._theta(parameter)))

    def _known(self, parameter: nn.Parameter) -> tuple[str, Any]:
        name = self.name_of(parameter)
        if name is None or name not in self._states:
            raise AlassoError(NOT_PROTECTED)
        return name, self.state_of(name, parameter)

    def _theta(self, parameter: nn.Parameter) -> Tensor:
        theta = local(parameter).detach()
        return theta.to(state_dtype(theta))

    # -- copies ----------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """All but what is known of the model by where it lies: a copy, or one from a file, looks at its own."""
        return {**self.__dict__, "_names": {}, "_sightings": Sightings()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.refresh()
