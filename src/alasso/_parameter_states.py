"""What a regularizer remembers: a state for each parameter, made at first sight, and brought to where it lies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from alasso._distributed import as_sharded, local, reshard
from alasso._grown import grown, moved_like, state_dtype
from alasso._parameters import check_kinds, check_patterns, named_weights, patterns_of, plain_name, unwrapped
from alasso._settings import WithSettings
from alasso._sightings import Past, Sightings
from alasso._state_dict import from_saved
from alasso.errors import AlassoError
from alasso.methods.base import Surrogate
from alasso.optim import _compile as kernels

NOT_PROTECTED = "this parameter is not protected; pass one of the regularizer's own model"
NO_PARAMETER = "forget() takes a parameter itself, as model.head.weight, not {!r:.40}"


class KeepsStates(WithSettings):
    """The states of a model's parameters by name, and what is worked out from them."""

    anchors_are_weights: ClassVar[bool] = True  # whether the model ends a task at its anchors
    #: Names of the model's parameters by id; each is held, so that no other comes to have it. None: to be looked up.
    _names_by_id: dict[int, tuple[str, nn.Parameter]] | None = None

    def __init__(self, model: nn.Module, surrogate: Surrogate[Any], exclude: Iterable[str]) -> None:
        if not isinstance(model, nn.Module):
            raise AlassoError(f"{type(self).__name__} takes the model itself, an nn.Module, not {type(model).__name__}")
        self.model = unwrapped(model)
        self.surrogate = surrogate
        self.exclude = patterns_of(exclude)
        self.tasks = 0  # consolidated so far
        self.steps = 0  # optimizer steps observed since the last consolidation
        self._states: dict[str, Any] = {}
        self._sightings = Sightings()
        self._stiffness: dict[str, tuple[Any, tuple[Tensor, Tensor]]] = {}
        self._surrogate_on: dict[tuple[torch.device, torch.dtype], tuple[Any, Any]] = {}
        check_patterns(self.model, self.exclude)
        check_kinds(self.model, self.exclude)
        self.refresh()

    def refresh(self) -> None:
        """Look at the model again: parameters may have been added, unfrozen, or replaced by larger ones."""
        reshard(self.model)
        named = dict(named_weights(self.model, self.exclude))
        self._rename(self._sightings.renamed(named))
        self._sightings.look(named, self._past_of)
        self._names_by_id = {id(parameter): (name, parameter) for name, parameter in named.items()}
        for name, parameter in self.protected():
            self.state_of(name, parameter)

    def look_again(self) -> None:
        """:meth:`refresh`, and warn of parameters that have taken the places of others."""
        self.refresh()
        self._sightings.warn()

    @property
    def _names(self) -> dict[int, tuple[str, nn.Parameter]]:
        if self._names_by_id is None:
            self.refresh()
        assert self._names_by_id is not None
        return self._names_by_id

    def _rename(self, names: Mapping[str, str]) -> None:
        """What is remembered under old names is so under new ones: pruning a layer, say, gives its weight another."""
        moved = {new: self._states.pop(old) for old, new in names.items() if old in self._states}
        if moved:
            self._states |= moved
            self.forget_stiffness()
            self._forget_passes()

    def _past_of(self, name: str) -> Past | None:
        state = self._states.get(name)
        if self.tasks == 0 or state is None:
            return None
        return Past(state.omega, state.anchor if self.anchors_are_weights and self.steps == 0 else None)

    def protected(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of every parameter that has, or can have, a state."""
        for name, parameter in self.model.named_parameters():
            known = self.name_of(parameter)
            if known is not None and (parameter.requires_grad or plain_name(name) in self._states):
                yield known, parameter

    def name_of(self, parameter: nn.Parameter) -> str | None:
        """Name under which this parameter is protected, None if it is not."""
        known = self._names.get(id(parameter))
        return known[0] if known is not None else None

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
        self._names[id(parameter)] = name, parameter
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

    # -- looking at it ---------------------------------------------------------------------------------------

    def importance(self) -> dict[str, Tensor]:
        """{parameter name: Ω}, never negative; sharded as the parameters are."""
        return self._field("omega")

    def anchor(self) -> dict[str, Tensor]:
        """{parameter name: θ̂}, the weights that the penalty pulls towards; sharded as the parameters are."""
        return self._field("anchor")

    def _field(self, field: str) -> dict[str, Tensor]:
        parameters = dict(self.protected())
        return {name: as_sharded(getattr(state, field), parameters.get(name)) for name, state in self._states.items()}

    # -- what hangs on it ------------------------------------------------------------------------------------

    def settings_changed(self) -> None:
        self.forget_stiffness()
        self._forget_passes()

    def _forget_passes(self) -> None:
        """Have what works on these states, and keeps them in its own form, take them anew."""

    # -- copies ----------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """All but what is known of the model by where it lies: a copy, or one from a file, looks at its own.

        At its first use, not before: a model that holds its regularizer is made after it.
        """
        return {**self.__dict__, "_names_by_id": None, "_sightings": Sightings()}
