"""A regularizer's state as it is saved: what goes in, what is taken back, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from alasso._distributed import as_sharded, is_first_shard, local, sharded_like, sum_over_shards
from alasso.errors import AlassoError

if TYPE_CHECKING:
    from alasso.methods.base import Surrogate

STATE_VERSION = 1


def to_save(tensor: Tensor, state: Any, parameter: nn.Parameter | None, partial: bool) -> Tensor:
    """Return a field of a state as it is saved: a part of the whole, the sum of the shards' parts, or a summary."""
    if partial:
        return sum_over_shards(tensor, parameter).clone()
    return as_sharded(tensor, parameter) if tensor.shape == state.anchor.shape else tensor.clone()


def from_saved(tensor: Tensor, parameter: nn.Parameter, partial: bool) -> Tensor:
    """Return this rank's share of a saved field."""
    if partial:
        return tensor.clone() if is_first_shard(parameter) else torch.zeros_like(tensor)
    return sharded_like(tensor, parameter) if tensor.shape == parameter.shape else tensor.clone()


def check_form(saved: object) -> None:
    """Refuse what cannot be a saved state at all."""
    if not isinstance(saved, Mapping):
        raise AlassoError(f"not a saved regularizer but {type(saved).__name__}: pass what state_dict() returned")
    missing = {"version", "method", "settings", "tasks", "steps", "parameters"} - set(saved)
    if missing:
        raise AlassoError(f"not a saved regularizer: it lacks {', '.join(sorted(missing))}")
    for part in ("settings", "parameters"):
        if not isinstance(saved[part], Mapping):
            raise AlassoError(f"not a saved regularizer: its {part} are a {type(saved[part]).__name__}, not a mapping")
    for part in ("tasks", "steps"):
        if not isinstance(saved[part], int) or saved[part] < 0:
            raise AlassoError(f"not a saved regularizer: its number of {part} is {saved[part]!r}")


def check_saved(
    saved: Mapping[str, Any],
    method: str,
    surrogate: Surrogate[Any],
    settings: tuple[Set[str], Set[str]],
    protected: Mapping[str, nn.Parameter],
) -> None:
    """Refuse a state, whose form is right, of another method, version, model or shape, naming the difference.

    Args:
        saved: The state.
        method: The name of the method that loads it.
        surrogate: Tells which tensors the method keeps for each parameter.
        settings: Names of the settings that must be there, and of those that may.
        protected: The model's parameters by name.
    """
    if saved["version"] != STATE_VERSION:
        raise AlassoError(f"the state has version {saved['version']}, this library reads version {STATE_VERSION}")
    if saved["method"] != method:
        raise AlassoError(f"the state was saved by {saved['method']}, it cannot be loaded into {method}")
    needed, allowed = settings
    if not needed <= set(saved["settings"]) <= allowed:
        raise AlassoError(f"the state's settings are {sorted(saved['settings'])}, which are not those of {method}")
    unknown = sorted(set(saved["parameters"]) - set(protected))
    lacking = sorted(set(protected) - set(saved["parameters"]))
    if unknown or lacking:
        parts = [f"the state has {unknown[0]}, which the model lacks"] if unknown else []
        parts += [f"the model has {lacking[0]}, which the state lacks"] if lacking else []
        hint = "; if it was frozen when the state was saved, load first and unfreeze it then" if lacking else ""
        raise AlassoError(f"{'; '.join(parts)} (another model, or another exclude?{hint})")
    for name, parameter in protected.items():
        tensors = saved["parameters"][name]
        if not isinstance(tensors, Mapping) or set(tensors) != set(surrogate.State._fields):  # type: ignore[attr-defined]
            held = sorted(tensors) if isinstance(tensors, Mapping) else type(tensors).__name__
            raise AlassoError(f"the state of {name} holds {held}, which is not what {method} keeps")
        _check_tensors(name, tensors, surrogate, tuple(parameter.shape))


def _check_tensors(name: str, tensors: Mapping[str, object], surrogate: Surrogate[Any], shape: tuple[int, ...]) -> None:
    """Refuse of one parameter what is no tensor, not of its shape, or not finite."""
    for field, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise AlassoError(f"{field} of {name} is a {type(tensor).__name__} in the saved state, not a tensor")
        if not surrogate.fits(field, tensor, shape):
            raise AlassoError(f"{name} has shape {shape}, but the saved state is for {tuple(tensor.shape)} ({field})")
        odd = (~torch.isfinite(local(tensor))).sum()
        if sum_over_shards(odd, tensor):  # the same answer on each rank: all refuse it, or none does
            raise AlassoError(f"{field} of {name} is not finite in the saved state, which protects nothing")
