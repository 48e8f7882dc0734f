"""The shell around the maths: keeps each parameter's state, attaches to optimizers, consolidates, saves and loads."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alasso import kernels
from alasso.attach import Exchange, attached, base_optimizer
from alasso.errors import AlassoError
from alasso.methods.surrogate import Surrogate
from alasso.sharding import local

STATE_VERSION = 1

Loader = Iterable[Any]
Head = Callable[[Tensor], Tensor]


class Regularizer:
    """Protects what a model has learned. Subclasses are the public methods: ALASSO, SI, EWC, OnlineEWC, MAS.

    ``exclude`` holds shell-style patterns of parameter names that are left alone (``"head.*"``). Parameters that are
    frozen when they first meet the regularizer cost nothing; one that is unfrozen later is picked up at its first step.
    """

    method: ClassVar[str]

    def __init__(self, model: nn.Module, surrogate: Surrogate[Any], exclude: Iterable[str] = ()) -> None:
        self.model = unwrapped(model)
        self.surrogate = surrogate
        self.exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        self.tasks = 0  # consolidated so far
        self.steps = 0  # optimizer steps observed since the last consolidation
        self._states: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._stiffness: dict[str, tuple[Any, tuple[Tensor, Tensor]]] = {}
        self._surrogate_on: dict[tuple[torch.device, torch.dtype], tuple[Any, Any]] = {}
        self._attachments: list[Exchange] = []
        self._check_patterns()
        self.refresh()

    # -- in the training loop --------------------------------------------------------------------------------

    def attach(self, optimizer: Optimizer) -> Regularizer:
        """Add the penalty to every step of ``optimizer`` from now on, and observe the steps.

        The training loop stays as it is: closures, gradient accumulation, clipping, schedulers, mixed precision. Attach
        again after the model grew or with a new optimizer; attaching the same optimizer twice changes nothing. Also a
        context manager that detaches at the end.
        """
        optimizer = base_optimizer(optimizer)
        self.refresh()
        if not any(id(p) in self._names for group in optimizer.param_groups for p in group["params"]):
            raise AlassoError(
                "the optimizer holds none of the model's protected parameters; "
                "build it from the parameters of the model given to " + type(self).__name__
            )
        if all(attachment.optimizer is not optimizer for attachment in self._attachments):
            self._attachments.append(attached(self, optimizer))
        return self

    def detach(self) -> None:
        """Leave all optimizers as they were before :meth:`attach`; the memory of past tasks stays."""
        for attachment in self._attachments:
            attachment.remove()
        self._attachments.clear()

    def __enter__(self) -> Regularizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    @torch.no_grad()
    def consolidate(self, loader: Loader | None = None, *, head: Head | None = None) -> None:
        """End of a task: take the weights as they are as the new anchor, and the path to them as their importance.

        No data is needed; a loader is taken and not used, so that one loop can serve all methods.
        """
        if self.surrogate.observes_path and self.steps == 0:
            raise AlassoError(
                "consolidate() has seen no optimizer step since the last one; "
                "call attach(optimizer) before training (a copied optimizer loses its hooks)"
            )
        self._consolidate({})

    def _consolidate(self, importance: Mapping[str, Tensor]) -> None:
        self.refresh()
        # All of the new state is worked out and checked before any of the old one is given up.
        new_states = {}
        for name, parameter in self.protected():
            state, theta = self.state_of(name, parameter), self._theta(parameter)
            new_states[name] = self.surrogate.consolidate(state, theta, importance.get(name))
        self._check_importance({name: state.omega for name, state in new_states.items()})
        self._states.update(new_states)
        self._forget_passes()
        self.tasks += 1
        self.steps = 0

    def penalty(self) -> Tensor:
        """What the surrogate of the past adds to the loss at the model's present weights; differentiable."""
        terms = [
            self.surrogate.penalty(local(parameter).to(state.anchor.dtype), state)
            for name, parameter in self.protected()
            for state in (self.state_of(name, parameter),)
        ]
        if not terms:
            return torch.zeros(())
        return torch.stack([term.to(terms[0].device) for term in terms]).sum()

    def importance(self) -> dict[str, Tensor]:
        """{parameter name: Ω}, never negative."""
        return {name: state.omega.clone() for name, state in self._states.items()}

    def anchor(self) -> dict[str, Tensor]:
        """{parameter name: θ̂}, the weights that the penalty pulls towards."""
        return {name: state.anchor.clone() for name, state in self._states.items()}

    # -- saving ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All there is to remember, also in the middle of a task; tensors, numbers and strings only."""
        return {
            "version": STATE_VERSION,
            "method": self.method,
            "settings": asdict(self.surrogate),  # type: ignore[call-overload]
            "tasks": self.tasks,
            "steps": self.steps,
            "parameters": {
                name: {field: tensor.clone() for field, tensor in state._asdict().items()}
                for name, state in self._states.items()
            },
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over a saved state, settings included (as optimizers do). Refused whole if anything does not fit."""
        self.refresh()
        check_saved(saved, self.method, self.surrogate, dict(self.protected()))
        self.surrogate = replace(self.surrogate, **saved["settings"])  # type: ignore[type-var]
        self._stiffness.clear()
        self._forget_passes()
        self._states = {
            name: self.surrogate.State(**{field: tensor.clone() for field, tensor in tensors.items()})
            for name, tensors in saved["parameters"].items()
        }
        self.tasks, self.steps = saved["tasks"], saved["steps"]
        self.refresh()

    # -- the state of single parameters ----------------------------------------------------------------------

    def refresh(self) -> None:
        """Look at the model again: parameters may have been added, unfrozen, or replaced by larger ones."""
        # named_parameters() names a tied parameter once.
        self._names = {
            id(parameter): plain_name(name)
            for name, parameter in self.model.named_parameters()
            if parameter.is_floating_point() and not self._excluded(plain_name(name))
        }
        for name, parameter in self.protected():
            self.state_of(name, parameter)

    def protected(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of every parameter that has, or can have, a state."""
        for name, parameter in self.model.named_parameters():
            known = self._names.get(id(parameter))
            if known is not None and (parameter.requires_grad or plain_name(name) in self._states):
                yield known, parameter

    def name_of(self, parameter: nn.Parameter) -> str | None:
        """Name under which this parameter is protected, None if it is not."""
        return self._names.get(id(parameter))

    @torch.no_grad()
    def state_of(self, name: str, parameter: nn.Parameter) -> Any:
        """The parameter's state, made at first sight, and brought to where and how large the parameter is now."""
        theta = local(parameter)
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = self.surrogate.init(self._theta(parameter))
        if state.anchor.shape != theta.shape:
            state = self._states[name] = self._grown(name, state, self._theta(parameter))
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
        """Keep a parameter's state in the tensors given from now on: equal in content, elsewhere in memory."""
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
        for name, parameter in self.protected():
            self._states[name] = self.surrogate.init(self._theta(parameter))

    def _theta(self, parameter: nn.Parameter) -> Tensor:
        theta = local(parameter).detach()
        return theta.to(state_dtype(theta))

    def _grown(self, name: str, state: Any, theta: Tensor) -> Any:
        """State for a parameter that grew: the old block keeps its memory, what is new starts free."""
        old = state.anchor.shape
        if len(old) != theta.dim() or any(n < m for n, m in zip(theta.shape, old, strict=True)):
            raise AlassoError(
                f"{name} changed from shape {tuple(old)} to {tuple(theta.shape)}; a parameter may grow, not shrink"
            )
        grown = self.surrogate.init(theta)
        block = tuple(slice(0, n) for n in old)
        fields = {}
        for field, tensor in grown._asdict().items():
            before = getattr(state, field).to(tensor.device, tensor.dtype)
            if tensor.shape == theta.shape:
                tensor = tensor.clone()
                tensor[block] = before
            else:  # a summary of the whole tensor, such as EWC's constant
                tensor = before
            fields[field] = tensor
        return type(state)(**fields)

    # -- checks ----------------------------------------------------------------------------------------------

    def _excluded(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.exclude)

    def _check_patterns(self) -> None:
        names = [plain_name(name) for name, _ in self.model.named_parameters()]
        for pattern in self.exclude:
            if not fnmatch.filter(names, pattern):
                raise AlassoError(f"exclude={pattern!r} matches no parameter; the model has {', '.join(names[:8])} …")
        if not names:
            raise AlassoError("the model has no parameters to protect")

    def _check_importance(self, importance: Mapping[str, Tensor]) -> None:
        for name, omega in importance.items():
            if not bool(torch.isfinite(omega).all()):
                kind = "NaN" if bool(torch.isnan(omega).any()) else "infinite"
                raise AlassoError(
                    f"importance of {name} is {kind}: the training diverged, or a setting lets it overflow; "
                    "the state before this consolidation is kept"
                )
        if not any(bool(omega.any()) for omega in importance.values()):
            raise AlassoError(
                "importance is zero for every weight: nothing was learned that could be protected "
                "(did the weights move, and did gradients reach them?)"
            )


def unwrapped(model: nn.Module) -> nn.Module:
    """The module the user wrote, inside torch.compile's and DistributedDataParallel's wrappers."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def plain_name(name: str) -> str:
    """Qualified name without the mark torch.compile leaves on submodules: compiled or not, a state fits."""
    return name.replace("_orig_mod.", "")


def state_dtype(theta: Tensor) -> torch.dtype:
    """Half precision cannot hold sums of small changes: state is float32 at least."""
    return torch.float64 if theta.dtype == torch.float64 else torch.float32


def moved_like(state: Any, theta: Tensor) -> Any:
    """State on θ's device and in the precision that goes with θ; integer fields keep their type."""
    dtype = state_dtype(theta)
    return type(state)(*(t.to(theta.device, dtype if t.is_floating_point() else t.dtype) for t in state))


def check_saved(
    saved: Mapping[str, Any], method: str, surrogate: Surrogate[Any], protected: Mapping[str, nn.Parameter]
) -> None:
    """Refuse a state of another method, version, model or shape, saying which."""
    missing = {"version", "method", "settings", "tasks", "steps", "parameters"} - set(saved)
    if missing:
        raise AlassoError(f"this is no saved regularizer: it lacks {', '.join(sorted(missing))}")
    if saved["version"] != STATE_VERSION:
        raise AlassoError(f"the state has version {saved['version']}, this library reads version {STATE_VERSION}")
    if saved["method"] != method:
        raise AlassoError(f"the state was saved by {saved['method']}, it cannot be loaded into {method}")
    if set(saved["settings"]) != set(asdict(surrogate)):  # type: ignore[call-overload]
        raise AlassoError(f"the state's settings are {sorted(saved['settings'])}, which are not those of {method}")
    unknown = sorted(set(saved["parameters"]) - set(protected))
    lacking = sorted(set(protected) - set(saved["parameters"]))
    if unknown or lacking:
        parts = [f"the state has {unknown[0]}, which the model has not"] if unknown else []
        parts += [f"the model has {lacking[0]}, which the state has not"] if lacking else []
        raise AlassoError("; ".join(parts) + " (another model, or another exclude?)")
    for name, parameter in protected.items():
        tensors = saved["parameters"][name]
        if set(tensors) != set(surrogate.State._fields):  # type: ignore[attr-defined]
            raise AlassoError(f"the state of {name} holds {sorted(tensors)}, which is not what {method} keeps")
        shape = tuple(tensors["anchor"].shape)
        if shape != tuple(local(parameter).shape):
            raise AlassoError(f"{name} has shape {tuple(local(parameter).shape)}, but the saved state is for {shape}")
