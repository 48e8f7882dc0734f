"""A regularizer's state as it is saved: what goes in, what is taken back, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from alasso._distributed import as_sharded, is_first_shard, local, sharded_like, sum_over_shards
from alasso.errors import AlassoError
from alasso.methods.base import Surrogate

STATE_VERSION = 1


def to_save(tensor: Tensor, state: Any, parameter: nn.Parameter | None) -> Tensor:
    """A field of a parameter's state as it is saved: a part of the whole, or the sum of the shards' summaries."""
    if tensor.shape == state.anchor.shape:
        return as_sharded(tensor, parameter)
    return sum_over_shards(tensor, parameter).clone()


def from_saved(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """This rank's share of a saved field."""
    if tensor.shape == parameter.shape:
        return sharded_like(tensor, parameter)
    return tensor.clone() if is_first_shard(parameter) else torch.zeros_like(tensor)


def check_saved(
    saved: Mapping[str, Any],
    method: str,
    surrogate: Surrogate[Any],
    settings: Mapping[str, Any],
    protected: Mapping[str, nn.Parameter],
) -> None:
    """Refuse a state, whose form is right, of another method, version, model or shape, saying which.

    Of the ``settings``, older states have the surrogate's alone.
    """
    if saved["version"] != STATE_VERSION:
        raise AlassoError(f"the state has version {saved['version']}, this library reads version {STATE_VERSION}")
    if saved["method"] != method:
        raise AlassoError(f"the state was saved by {saved['method']}, it cannot be loaded into {method}")
    if not set(asdict(surrogate)) <= set(saved["settings"]) <= set(settings):  # type: ignore[call-overload]
        raise AlassoError(f"the state's settings are {sorted(saved['settings'])}, which are not those of {method}")
    unknown = sorted(set(saved["parameters"]) - set(protected))
    lacking = sorted(set(protected) - set(saved["parameters"]))
    if unknown or lacking:
        parts = [f"the state has {unknown[0]}, which the model has not"] if unknown else []
        parts += [f"the model has {lacking[0]}, which the state has not"] if lacking else []
        hint = "; where it was frozen when the state was saved, load first and unfreeze it then" if lacking else ""
        raise AlassoError(f"{'; '.join(parts)} (another model, or another exclude?{hint})")
    for name, parameter in protected.items():
        tensors = saved["parameters"][name]
        if not isinstance(tensors, Mapping) or set(tensors) != set(surrogate.State._fields):  # type: ignore[attr-defined]
            held = sorted(tensors) if isinstance(tensors, Mapping) else type(tensors).__name__
            raise AlassoError(f"the state of {name} holds {held}, which is not what {method} keeps")
        check_tensors(name, tensors, tuple(parameter.shape))


def check_form(saved: object) -> None:
    """Whether it can be a saved state at all."""
    if not isinstance(saved, Mapping):
        raise AlassoError(f"this is no saved regularizer but {type(saved).__name__}: pass what state_dict() gave")
    missing = {"version", "method", "settings", "tasks", "steps", "parameters"} - set(saved)
    if missing:
        raise AlassoError(f"this is no saved regularizer: it lacks {', '.join(sorted(missing))}")
    for part in ("settings", "parameters"):
        if not isinstance(saved[part], Mapping):
            raise AlassoError(
                f"this is no saved regularizer: its {part} are no mapping but {type(saved[part]).__name__}"
            )
    for part in ("tasks", "steps"):
        if not isinstance(saved[part], int) or saved[part] < 0:
            raise AlassoError(f"this is no saved regularizer: its number of {part} is {saved[part]!r}")


def check_tensors(name: str, tensors: Mapping[str, object], shape: tuple[int, ...]) -> None:
    """Of one parameter: numbers of its shape, or one for all of it, and none that is not finite."""
    for field, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise AlassoError(f"{field} of {name} is no tensor in the saved state but {type(tensor).__name__}")
        if tuple(tensor.shape) != shape and (field == "anchor" or tensor.numel() != 1):
            raise AlassoError(f"{name} has shape {shape}, but the saved state is for {tuple(tensor.shape)} ({field})")
        if not is_finite(tensor):
            raise AlassoError(f"{field} of {name} is not finite in the saved state, which protects nothing")


def is_finite(tensor: Tensor) -> bool:
    """Of a tensor whose shards lie on several ranks, the same answer on each: they refuse it together, or none does."""
    odd = (~torch.isfinite(local(tensor))).sum()
    return not sum_over_shards(odd, tensor)
