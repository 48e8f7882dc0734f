"""What all methods share: attach to optimizers, consolidate at the end of a task, save and load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from logging import INFO
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alasso import importance as measures
from alasso._distributed import as_sharded, local, sum_over_shards, total_of
from alasso._parameters import Names, ProtectedParameters, check_importance, weights_of
from alasso._state_dict import STATE_VERSION, check_form, check_saved, state_dtype, states_from, to_save
from alasso._step_hooks import StepHooks, base_optimizer, check_every
from alasso._summary import Notes, Summary, is_looked_at, log, log_verdict, summary_of
from alasso.errors import AlassoError, warn
from alasso.importance._objectives import Head, Loss, Objective, objective_of
from alasso.methods.base import Surrogate, noisy_move
from alasso.methods.settings import check_choice, check_non_negative, check_spelling

if TYPE_CHECKING:
    from typing_extensions import Self

CHECK_EVERY = 64  # steps: looking for NaN reads the weights and ω once, and waits for a GPU

Loader = Iterable[Any]
Measure = Literal["fisher", "mas"]
WarmScale = float | Literal["auto"]


class Regularizer:
    """Protects what a model has learned. Subclasses are the public methods: ALASSO, SI, EWC, OnlineEWC, MAS, IMM.

    A parameter that is frozen from the start costs nothing; unfrozen later, it is protected from its first step on.

    Args:
        model: The model to protect.
        surrogate: The method's settings and maths.
        exclude: Shell-style patterns of parameter names to leave alone (``"head.*"``).
        include: Patterns of those to protect, and no others; None for all. A tied parameter is protected if any of its
            names is included and none is excluded.

    Attributes:
        model: The protected model, without wrappers.
        tasks: Number of tasks consolidated so far.
        steps: Number of optimizer steps observed since the last consolidation.
        consolidates_every: After how many steps it consolidates by itself; None for never.
        protected: The protected parameters and their states.
        notes: What :meth:`summary` has to know of the tasks.

    Raises:
        AlassoError: ``model`` is no module, or a pattern matches no parameter.
    """

    method: ClassVar[str]
    anchors_are_weights: ClassVar[bool] = True  # whether the anchors are the weights at the end of a task

    def __init__(self, model: nn.Module, surrogate: Surrogate[Any], exclude: Names = (), include: Names = None) -> None:
        if not isinstance(model, nn.Module):
            raise AlassoError(f"{type(self).__name__} takes the model itself, an nn.Module, not {type(model).__name__}")
        self.tasks = self.steps = 0
        self.protected = ProtectedParameters(model, surrogate, exclude, include)
        self.notes = Notes()
        self.model = self.protected.model
        self._attached: list[StepHooks] = []
        self._penalty_was_taken = False  # since the last consolidation, perhaps to be part of a loss
        self.consolidates_every: int | None = None
        self._was_loaded = False  # a state whose anchors have not been compared with the weights yet

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.settings().items())
        tasks = "1 task" if self.tasks == 1 else f"{self.tasks} tasks"
        count = len(self.protected.states)
        return f"{type(self).__name__}({settings}), {tasks} consolidated, {count} tensor{'s' * (count != 1)} protected"

    # -- in the training loop --------------------------------------------------------------------------------

    def attach(self, optimizer: Optimizer, compile: bool = False, *, every: int | None = None) -> Self:
        """Add the penalty to every step of ``optimizer`` from now on, and observe the steps.

        The training loop stays as it is: closures, gradient accumulation, clipping, schedulers, mixed precision. Attach
        again after the model grew or with a new optimizer; attaching the same one again changes ``compile`` alone. The
        regularizer is also a context manager that detaches at the end.

        Args:
            optimizer: A torch optimizer that holds parameters of the model, or a wrapper of one.
            compile: Make whole steps of torch's Adam, AdamW and SGD one compiled pass with the penalty; of another
                optimizer, compile the hooks' own passes. Faster on large models, but the first steps take some seconds.
            every: Consolidate by itself after so many steps: KronALASSO, ALASSO, SI on a stream that has no tasks.

        Returns:
            The regularizer itself.

        Raises:
            AlassoError: The optimizer cannot be observed, or holds no protected parameter, or ``every`` does not fit.
        """
        optimizer = base_optimizer(optimizer)
        self.protected.look(self._is_at_anchors)
        if not any(True for _ in self.protected):
            raise AlassoError("the model has no weights to protect: all are frozen, excluded or not floating point")
        if not self.trains(optimizer):
            raise AlassoError(
                "the optimizer holds none of the model's protected parameters; "
                f"build it from the parameters of the model given to {type(self).__name__}"
            )
        if every is not None:
            check_every(every, self)
            self.consolidates_every = every
        hooks = StepHooks.of(optimizer)
        hooks.add(self, compile)
        self._attached = [one for one in self._attached if one.is_alive and one is not hooks] + [hooks]
        self.protected.warn_of_replaced()
        return self

    def detach(self) -> None:
        """Leave all optimizers as they were before :meth:`attach`; keep the memory of past tasks."""
        for hooks in self._attached:
            hooks.remove(self)
        self._attached.clear()
        self.consolidates_every = None

    @property
    def is_attached(self) -> bool:
        """Whether the regularizer observes the steps of an optimizer."""
        return any(hooks.is_alive for hooks in self._attached)

    @property
    def rounds(self) -> int:
        """Number of steps of each attached optimizer since the last consolidation."""
        return self.steps // max(len(self._attached), 1)

    def trains(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer holds any protected parameter.

        Args:
            optimizer: A torch optimizer.

        Returns:
            True if it holds one.
        """
        held = (p for group in optimizer.param_groups for p in group["params"])
        return any(self.protected.name_of(p) is not None for p in held)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    @property
    def _is_at_anchors(self) -> bool:
        """Whether the model's weights should equal the anchors now."""
        return self.anchors_are_weights and self.tasks > 0 and self.steps == 0

    def look(self) -> None:
        """Look at the model again, and warn of parameters that replaced others."""
        self.protected.look(self._is_at_anchors)
        self.protected.warn_of_replaced()

    @property
    def step_kind(self) -> int:
        """Which kind of step comes next, for a method that does not do the same in all: a CUDA graph records one."""
        return 0

    def before_step(self, optimizer: Optimizer) -> None:
        """Look at a step before an attached optimizer makes it.

        Args:
            optimizer: The one that makes it.
        """
        if self.steps == 0:
            self._before_first_step()
        if is_early := is_looked_at(self.rounds):
            self.notes.see_gradients(self.protected, optimizer, self.steps)
        if is_early or self.steps % CHECK_EVERY == CHECK_EVERY - 1:
            self.protected.check_finite(self.steps + 1)

    @torch.no_grad()
    def _before_first_step(self) -> None:
        """Begin a task; the path of the first one begins at the present weights."""
        if self.tasks == 0:
            self.protected.reset()
        elif self._was_loaded:
            self._was_loaded = False
            self.protected.warn_of_strayed()

    # -- the end of a task -----------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def consolidate(self, loader: Loader | None = None, *, head: Head | None = None) -> None:
        """End a task: anchor the present weights, and add the task's importance.

        Args:
            loader: The task's data, for methods that measure importance on it (EWC, MAS): any iterable of (x, y).
                ALASSO and SI need none and ignore it, so that one loop serves all methods.
            head: Maps the model's output to the task's logits, for example to keep the task's own classes. Of a model
                without forward(), such as a ModuleDict, it maps the inputs.

        Raises:
            AlassoError: No step was observed, data is missing, or nothing was learned.
            DivergedError: Importance is not finite; the earlier state is kept.
        """
        self._check_was_trained()
        protected = self.protected
        parameters = protected.look(self._is_at_anchors)
        with torch.enable_grad():
            measured = self.measure(loader, head)
        new_states, moves, finite = {}, {}, {}
        with torch.no_grad():
            for name, parameter in parameters.items():
                state, theta = self.state_at_end(name), weights_of(parameter)
                sums = torch.stack([(theta - state.anchor).square_().sum(), getattr(state, "path", theta).sum()])
                moves[name], drop = sum_over_shards(sums, parameter)
                if "moves" in state._fields:  # of all shards, which a rank's own consolidation does not see
                    move = noisy_move(moves[name], drop, self.notes.steepest.get(name))
                    state = state._replace(moves=state.moves + move / max(parameter.numel(), 1))
                new = protected.surrogate.consolidate(state, theta, measured.get(name))
                new_states[name] = new._replace(anchor=new.anchor.to(state.anchor.dtype))
                stiffness = protected.surrogate.typical_stiffness(new)
                finite[name] = torch.stack([moves[name], *stiffness]).sum()
        # Check all of the new state before the old one is replaced.
        importance = ((name, protected.surrogate.importance(state)) for name, state in new_states.items())
        check_importance(measured.items() or importance, parameters, finite)
        protected.end_task(new_states)
        self.notes.task_ends(moves)
        self.tasks, self.steps = self.tasks + 1, 0
        self._penalty_was_taken = self._was_loaded = False
        if log.isEnabledFor(INFO):
            log_verdict(self)

    def state_at_end(self, name: str) -> Any:
        """Return the state that a task ends with, before it is consolidated.

        Args:
            name: The parameter's name.

        Returns:
            The state.
        """
        return self.protected.states[name]

    def measure(self, loader: Loader | None, head: Head | None) -> dict[str, Tensor]:
        """Return the importance that a method measures on data at the end of a task.

        Args:
            loader: What :meth:`consolidate` was given.
            head: What :meth:`consolidate` was given.

        Returns:
            {parameter name: importance}, shaped like the parameter; empty for a method that measures nothing.
        """
        return {}

    def _check_was_trained(self) -> None:
        own = self.protected.surrogate
        if (own.observes_path or own.learns_from_steps) and self.steps == 0:
            since = " since the last one" if self.tasks else ""
            what_to_do = "train with the optimizer that is attached" if self._attached else "call attach(optimizer)"
            what_to_do += " before it (a copied optimizer loses its hooks)"
            raise AlassoError(f"consolidate() has seen no optimizer step{since}; {what_to_do}")
        if self.tasks and not (self.steps or self.is_attached or self._penalty_was_taken):
            warn(
                f"{type(self).__name__} is attached to no optimizer, and penalty() was part of no loss: nothing "
                "protected the past during this task; call attach(optimizer) before training"
            )

    # -- beside the loop ---------------------------------------------------------------------------------------

    def warm_start(
        self,
        loader: Loader,
        importance: Measure = "fisher",
        *,
        labels: str = "true",
        head: Head | None = None,
        loss: Loss | None = None,
        scale: WarmScale = "auto",
    ) -> None:
        """Protect weights that were trained without the regularizer, such as a pretrained model's.

        A path method did not observe that training, so Ω is measured at the present weights. ALASSO treats both sides
        of these weights as unobserved. Call it before training; it counts as one task.

        Args:
            loader: Some hundred samples of what the model must not forget.
            importance: The diagonal "fisher" information, or the outputs' sensitivity, "mas", which needs no labels.
            labels: Whose log-likelihood the Fisher is of, as in :func:`alasso.importance.fisher`.
            head: Maps the model's output to logits.
            loss: A custom negative log-likelihood, one value a sample.
            scale: Factor of the measured importance; with 0.5, Ω·d² is the Fisher's estimate of the rise in loss.
                "auto" means the same by both measures, for outputs of unit size like logits; 1 for EWC, MAS and IMM.

        Raises:
            AlassoError: Training has begun, or an argument is invalid.
            DivergedError: Importance is not finite.
        """
        check_choice("importance", importance, Measure)
        check_non_negative(scale=1.0 if scale == "auto" else scale)
        if scale == 0:
            raise AlassoError("scale must be a positive number, not 0")
        if self.tasks > 0 or self.steps > 0:
            raise AlassoError("warm_start() is for weights from before the first task; call it before training")
        self.protected.look()
        with torch.inference_mode(False), torch.enable_grad():
            states = self._measured_states(scale, loader, objective_of(importance, labels, loss), head)
            shown = {name: self.surrogate.importance(state) for name, state in states.items()}
            stiffness = {name: self.surrogate.typical_stiffness(state)[1] for name, state in states.items()}
            check_importance(shown.items(), dict(self.protected), stiffness)
            self.protected.put_all(states)
        self.tasks = 1

    def _measured_states(self, scale: WarmScale, loader: Loader, objective: Objective, head: Head | None) -> Any:
        """Return the states of weights whose training was not seen, by name."""
        parameters, strength = dict(self.protected), self.surrogate.warm_strength if scale == "auto" else None
        measured = measures.mean_over(loader, self.model, objective, parameters, head, strength=strength)
        factor = 1.0 if scale == "auto" else scale
        return {n: self.surrogate.warm_start(weights_of(p), factor * measured[n]) for n, p in parameters.items()}

    def forget(self, parameter: nn.Parameter) -> None:
        """Forget one parameter's past: it starts fresh, without importance.

        Args:
            parameter: One of the model's; it may have just replaced another, of any shape.

        Raises:
            AlassoError: It is not one of the model's protected parameters.
        """
        self.protected.forget(parameter)

    @torch.no_grad()
    def shift_anchor(self, parameter: nn.Parameter, by: Tensor) -> None:
        """Move a parameter's anchor by the same amount as its weights, where that leaves the model's outputs unchanged.

        Args:
            parameter: One of the model's protected parameters.
            by: The shift, of the parameter's shape.

        Raises:
            AlassoError: It is not one of the model's protected parameters.
        """
        name = self.protected.name_of(parameter)
        if name is None:
            raise AlassoError("this parameter is not protected; pass one of the regularizer's own model")
        state = self.protected.state_of(name, parameter)
        self.protected.put(name, state._replace(anchor=state.anchor + local(by).to(state.anchor.dtype)))

    def penalty(self) -> Tensor:
        """Return what the surrogate of the past adds to the loss at the model's present weights.

        With sharded parameters it is the sum over all shards: call it on all ranks.

        Returns:
            A scalar, differentiable by the weights.
        """
        self._penalty_was_taken |= torch.is_grad_enabled()
        if None in map(self.protected.name_of, self.protected.named().values()):
            self.look()  # a head grew or was replaced
        states = [(p, self.protected.state_of(name, p)) for name, p in self.protected]
        terms = [(self.surrogate.penalty(local(p).to(state_dtype(p)), s), p) for p, s in states]
        total = total_of(terms) if terms else torch.zeros(())
        if self.is_attached and total.requires_grad:
            total.register_hook(self._warn_that_it_counts_twice)
        return total

    def _warn_that_it_counts_twice(self, gradient: Tensor) -> None:
        if self.is_attached:
            warn(
                "penalty() is part of the loss, and attach() adds it at every step as well: the past counts twice; "
                "remove it from the loss, or call detach()"
            )

    def importance(self) -> dict[str, Tensor]:
        """Return the importance of all protected weights.

        Returns:
            {parameter name: Ω ≥ 0}, shaped and sharded like the parameter.
        """
        parameters, of = dict(self.protected), self.surrogate.importance
        return {name: as_sharded(of(s), parameters.get(name)) for name, s in self.protected.states.items()}

    def anchor(self) -> dict[str, Tensor]:
        """Return the weights that the penalty pulls to.

        Returns:
            {parameter name: θ̂}, shaped and sharded like the parameter.
        """
        parameters, states = dict(self.protected), self.protected.states
        return {name: as_sharded(s.anchor, parameters.get(name)) for name, s in states.items()}

    def summary(self) -> Summary:
        """Return whether the past holds the weights; print it between two tasks. With shards, call it on all ranks.

        Returns:
            A table by tensor and a verdict.
        """
        return summary_of(self)

    # -- settings --------------------------------------------------------------------------------------------

    @property
    def surrogate(self) -> Surrogate[Any]:
        """The method's settings and maths; a new one acts from the next step on."""
        return self.protected.surrogate

    @surrogate.setter
    def surrogate(self, surrogate: Surrogate[Any]) -> None:
        self.protected.surrogate = surrogate
        self.protected.version += 1

    def settings(self) -> dict[str, Any]:
        """Return the settings.

        Returns:
            {name: value}.
        """
        return asdict(self.surrogate)  # type: ignore[call-overload,no-any-return]

    def load_settings(self, saved: Mapping[str, Any]) -> None:
        """Restore settings that :meth:`settings` returned.

        Args:
            saved: The settings by name.

        Raises:
            AlassoError: One is out of its range; then none has changed.
        """
        self.surrogate = replace(self.surrogate, **saved)  # type: ignore[type-var]

    def __setattr__(self, name: str, value: Any) -> None:
        is_new = name not in self.__dict__ and not name.startswith("_") and not hasattr(type(self), name)
        if is_new and "protected" in self.__dict__:
            check_spelling(self, name)
        super().__setattr__(name, value)

    # -- saving ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, also in the middle of a task.

        Of sharded parameters, each rank's dictionary holds its own shards as distributed tensors, ready for
        ``torch.distributed.checkpoint``: call it on all ranks.

        Returns:
            A dictionary of tensors, numbers and strings only, which ``torch.save`` takes.

        Raises:
            DivergedError: The state holds NaN or infinite numbers, and could not be loaded again.
        """
        parameters, in_model = dict(self.protected), self.protected.named()
        self.protected.check_states(in_model)
        partial = self.surrogate.partial
        return {
            "version": STATE_VERSION,
            "method": self.method,
            "settings": self.settings(),
            "tasks": self.tasks,
            "steps": self.steps,
            "every": self.consolidates_every,
            "parameters": {
                name: {f: to_save(t, state, parameters.get(name), f in partial) for f, t in state._asdict().items()}
                for name, state in self.protected.states.items()
                if name in in_model  # not of a layer that was removed
            },
            "notes": {name: self.notes.of(name, s) for name, s in self.protected.states.items() if name in in_model},
        }

    @torch.inference_mode(False)
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore a saved state, including the settings, as optimizers do.

        Args:
            saved: What :meth:`state_dict` returned.

        Raises:
            AlassoError: The state does not fit the model or the method; then nothing has changed.
        """
        check_form(saved)
        self.protected.look(self._is_at_anchors)
        named = self.protected.named()  # frozen ones, too: they may have a past
        parameters = dict(self.protected) | {name: named[name] for name in saved["parameters"] if name in named}
        needed = {field.name for field in fields(self.surrogate)}  # type: ignore[arg-type]
        check_saved(saved, self.method, self.surrogate, (needed, self.settings().keys()), parameters)
        states = states_from(saved["parameters"], self.surrogate, parameters)
        self.load_settings(saved["settings"])
        self.protected.states.clear()
        self.protected.put_all(states)
        self.notes.load(saved.get("notes", {}))  # which earlier versions did not save
        self.tasks, self.steps = saved["tasks"], saved["steps"]
        self.consolidates_every = saved.get("every") or self.consolidates_every  # earlier versions did not save it
        self._was_loaded = self._is_at_anchors
        self.protected.look(self._is_at_anchors)

    def __getstate__(self) -> dict[str, Any]:
        """Copy without the hooks on optimizers; a copy has to be attached again."""
        return {**self.__dict__, "_attached": []}
