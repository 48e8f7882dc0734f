"""A parameter's state where the parameter has changed: another device, another precision, more rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from alasso.errors import AlassoError
from alasso.methods.base import Surrogate


def state_dtype(theta: Tensor) -> torch.dtype:
    """Half precision cannot hold sums of small changes: state is float32 at least."""
    return torch.float64 if theta.dtype == torch.float64 else torch.float32


def moved_like(state: Any, theta: Tensor) -> Any:
    """State on θ's device and in the precision that goes with θ; integer fields keep their type."""
    dtype = state_dtype(theta)
    return type(state)(*(t.to(theta.device, dtype if t.is_floating_point() else t.dtype) for t in state))


def grown(surrogate: Surrogate[Any], name: str, state: Any, theta: Tensor) -> Any:
    """State for a parameter that grew: the old block keeps its memory, what is new starts free."""
    old = state.anchor.shape
    if len(old) != theta.dim() or any(n < m for n, m in zip(theta.shape, old, strict=True)):
        raise AlassoError(
            f"{name} changed from shape {tuple(old)} to {tuple(theta.shape)}; a parameter may grow, not shrink: "
            "if it is to begin anew, pass it to forget() first"
        )
    fresh = surrogate.init(theta)
    block = tuple(slice(0, n) for n in old)
    fields = {}
    for field, tensor in fresh._asdict().items():
        before = getattr(state, field).to(tensor.device, tensor.dtype)
        if tensor.shape == theta.shape:
            tensor = tensor.clone()
            tensor[block] = before
        else:  # a summary of the whole tensor, such as EWC's constant
            tensor = before
        fields[field] = tensor
    return type(state)(**fields)
