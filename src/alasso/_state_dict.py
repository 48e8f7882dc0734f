"""A regularizer's state as it is saved: what goes in, what is taken back, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from alasso._distributed import as_sharded, is_first_shard, local, sharded_like, sum_over_shards
from alasso.errors import AlassoError

if TYPE_CHECKING:
    from alasso.methods.base import Surrogate

STATE_VERSION = 1
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOST = 2**63  # no count is larger


def state_dtype(theta: Tensor) -> torch.dtype:
    """Return float32 at least: half precision cannot hold sums of small changes."""
    return torch.float64 if theta.dtype == torch.float64 else torch.float32


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


def states_from(
    saved: Mapping[str, Mapping[str, Tensor]], surrogate: Surrogate[Any], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """Return this rank's states from what :func:`check_saved` has let through; they share no tensor with it."""
    states = {}
    for name, tensors in saved.items():
        own = {f: from_saved(t.detach(), parameters[name], f in surrogate.partial) for f, t in tensors.items()}
        states[name] = surrogate.State(**own)
    return states


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
        if type(saved[part]) is not int or not 0 <= saved[part] < MOST:
            raise AlassoError(f"not a saved regularizer: its number of {part} is {saved[part]!r:.40}")
    every = saved.get("every")
    if every is not None and (type(every) is not int or not 1 <= every < MOST):
        raise AlassoError(f"not a saved regularizer: it consolidates every {every!r:.40} steps")


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
    version, saved_by = saved["version"], saved["method"]
    if type(version) is not int or version != STATE_VERSION:
        raise AlassoError(f"the state has version {version!r:.40}, this library reads version {STATE_VERSION}")
    if not isinstance(saved_by, str) or saved_by != method:
        raise AlassoError(f"the state was saved by {saved_by!s:.40}, it cannot be loaded into {method}")
    needed, allowed = settings
    if not needed <= set(saved["settings"]) <= allowed:
        names = sorted(map(str, saved["settings"]))
        raise AlassoError(f"the state's settings are {names}, which are not those of {method}")
    surrogate = replace(surrogate, **{name: saved["settings"][name] for name in needed})  # type: ignore[type-var]
    unknown = sorted(map(str, set(saved["parameters"]) - set(protected)))
    lacking = sorted(set(protected) - set(saved["parameters"]))
    if unknown or lacking:
        parts = [f"the state has {unknown[0]}, which the model lacks"] if unknown else []
        parts += [f"the model has {lacking[0]}, which the state lacks"] if lacking else []
        hint = "; if it was frozen when the state was saved, load first and unfreeze it then" if lacking else ""
        raise AlassoError(f"{'; '.join(parts)} (another model, or another exclude or include?{hint})")
    for name, parameter in protected.items():
        tensors = saved["parameters"][name]
        if not isinstance(tensors, Mapping) or set(tensors) != set(surrogate.State._fields):  # type: ignore[attr-defined]
            held = sorted(map(str, tensors)) if isinstance(tensors, Mapping) else type(tensors).__name__
            raise AlassoError(f"the state of {name} holds {held}, which is not what {method} keeps")
        _check_tensors(name, tensors, surrogate, parameter)
    _check_notes(saved.get("notes", {}), protected)


def _check_tensors(name: str, tensors: Mapping[str, object], surrogate: Surrogate[Any], theta: nn.Parameter) -> None:
    """Refuse of one parameter what is no plain tensor of its shape and kind, not finite, or out of its range."""
    shape, kept = tuple(theta.shape), {}
    own = surrogate.init(torch.empty(shape, dtype=state_dtype(theta), device="meta"))
    for field, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise AlassoError(f"{field} of {name} is a {type(tensor).__name__} in the saved state, not a tensor")
        if not is_plain(tensor):
            raise AlassoError(f"{field} of {name} is sparse, quantized or without values in the saved state")
        if not surrogate.fits(field, tensor, shape):
            raise AlassoError(f"{name} has shape {shape}, but the saved state is for {tuple(tensor.shape)} ({field})")
        wanted = getattr(own, field).dtype
        if tensor.dtype not in (FLOATS if wanted.is_floating_point else (wanted,)):
            kind = "real numbers" if wanted.is_floating_point else wanted
            raise AlassoError(f"{field} of {name} holds {tensor.dtype} in the saved state, not {kind}")
        numbers, (least, most) = local(tensor.detach()), surrogate.ranges.get(field, (-torch.inf, torch.inf))
        kept[field] = numbers = numbers.to(wanted)  # as it will be used
        odd = torch.stack([(~torch.isfinite(numbers)).sum(), ((numbers < least) | (numbers > most)).sum()])
        # The same answer on each rank: all refuse it, or none does.
        infinite, outside = sum_over_shards(odd, tensor).tolist()
        if infinite:
            raise AlassoError(f"{field} of {name} is not finite in the saved state, which protects nothing")
        if outside:
            allowed = f"from {least} to {most}" if most < torch.inf else f"{least} or more"
            raise AlassoError(f"{field} of {name} must be {allowed} everywhere, and is not in the saved state")
    state = surrogate.State(**kept)
    if not surrogate.goes_together(state):
        raise AlassoError(f"the state of {name} contradicts itself: its fields do not go together")
    if sum_over_shards(overflows(surrogate, state).int(), tensors["anchor"]):  # type: ignore[arg-type]
        raise AlassoError(f"the penalty of {name} overflows with the saved state, which no training left behind")


@torch.no_grad()
def overflows(surrogate: Surrogate[Any], state: Any) -> Tensor:
    """Return whether a penalty is infinite near the anchor, or at zero: no training leaves such a state behind."""
    near = torch.stack([*surrogate.typical_stiffness(state), surrogate.penalty(state.anchor, state)]).sum()
    at_zero: Tensor = surrogate.importance(state) * state.anchor.square()
    return ~near.isfinite() | at_zero.isinf().any()


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is numbers in memory, and nothing that only stands for some."""
    return tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_quantized)


def _check_notes(notes: object, protected: Mapping[str, nn.Parameter]) -> None:
    """Refuse notes of other tensors, or that hold anything but two squared lengths and a word."""
    if not isinstance(notes, Mapping) or not set(notes) <= set(protected):
        raise AlassoError("not a saved regularizer: its notes are not on these parameters")
    for name, note in notes.items():
        if not isinstance(note, Mapping) or set(note) != {"gradient", "steepest", "moved", "factors"}:
            raise AlassoError(f"not a saved regularizer: its notes on {name} are not those of a regularizer")
        for field in ("gradient", "steepest", "moved"):  # a gradient may have been infinite, and its step skipped
            length = note[field]
            if not isinstance(length, Tensor) or not is_plain(length) or length.dtype not in FLOATS or length.dim():
                raise AlassoError(f"not a saved regularizer: its note {field} on {name} is not a number")
            if length < 0 or (field == "moved" and not torch.isfinite(length)):
                raise AlassoError(f"not a saved regularizer: its note {field} on {name} is {float(length)}")
        if not isinstance(note["factors"], str):
            raise AlassoError(f"not a saved regularizer: its note factors on {name} is not a word")
