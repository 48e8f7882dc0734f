"""What of a stack's step is compiled: once for each kind and shape, however many stacks are made."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from alasso import kernels

_NUMBERS = itertools.count()


def compiles_on(device: torch.device) -> bool:
    """On a GPU, each kernel saved is a launch saved; a CPU gains nothing from stacks, compiled or not."""
    return device.type == "cuda" and kernels.no_compiler("cuda") is None


@cache
def compiled(function: Callable[..., Any], lanes: int, shape: tuple[int, ...] = ()) -> Callable[..., Any]:
    """The function compiled for so many lanes, and for all shapes of tensors or for one.

    For one ``shape`` alone, a pass over weights finds out sooner which lane a weight is of.
    """
    own = kernels.renamed(function, "_".join(map(str, (function.__name__, lanes, *shape))))
    return torch.compile(own, dynamic=not shape, fullgraph=True)


def compiled_once(make: Callable[[], Callable[..., Any]], key: str | None) -> Callable[..., Any]:
    """What ``make`` makes, compiled for the shapes it is called with; made but once for each key that is not None."""
    if key is not None and key in _made:
        return _made[key]
    # What the compiler decided about a softmax over ten classes is not for the user to act on.
    warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
    function = make()
    own = kernels.renamed(function, f"{function.__name__}_{next(_NUMBERS)}")
    run: Callable[..., Any] = torch.compile(own, dynamic=False, fullgraph=True)
    if key is not None:
        _made[key] = run
    return run


_made: dict[str, Callable[..., Any]] = {}


def structure(network: nn.Module) -> str | None:
    """Equal for networks that compute the same with the same weights; None where that cannot be known.

    A sequence of torch's own layers is what it prints. A class of the user's own may hide anything.
    """
    known = all(type(part).__module__.startswith(("torch.nn.", "alasso.bench.")) for part in network.modules())
    inner = [part for part in network.modules() if any(True for _ in part.children())]
    return repr(network) if known and all(type(part) is nn.Sequential for part in inner) else None
