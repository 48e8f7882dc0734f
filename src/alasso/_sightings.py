"""What parameters a model had, by name, when it was last looked at, and which have taken the places of others since.

A past that was another parameter's pulls the new one to where that was: good for one made from it, such as a head that
grew, and bad for one that begins anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from alasso._distributed import is_sharded
from alasso._frames import users_stacklevel
from alasso._parameters import some_of


class Past(NamedTuple):
    """What is kept under a name: how much it matters, and the weights that the last task ended with, where known."""

    omega: Tensor
    last_weights: Tensor | None


class Sightings:
    """Of one model."""

    def __init__(self) -> None:
        self._seen: dict[str, ref[nn.Parameter]] = {}
        self._begun_anew: set[str] = set()  # and not said yet

    def __contains__(self, name: str) -> bool:
        return name in self._seen

    def renamed(self, named: Mapping[str, nn.Parameter]) -> dict[str, str]:
        """Old name → new name of parameters that were seen under a name which is there no more."""
        new = {id(parameter): name for name, parameter in named.items() if name not in self._seen}
        gone = {name: reference() for name, reference in self._seen.items() if name not in named}
        return {name: new[id(parameter)] for name, parameter in gone.items() if id(parameter) in new}

    def look(self, named: Mapping[str, nn.Parameter], past_of: Callable[[str], Past | None]) -> None:
        self._begun_anew |= {name for name, parameter in named.items() if self._begins_anew(name, parameter, past_of)}
        self._seen = {name: ref(parameter) for name, parameter in named.items()}

    def _begins_anew(self, name: str, parameter: nn.Parameter, past_of: Callable[[str], Past | None]) -> bool:
        """Whether a parameter took the place of one that has a past, and was not made from it."""
        before = self._seen.get(name)
        if before is None or (old := before()) is parameter or (past := past_of(name)) is None:
            return False
        if is_sharded(parameter) or (old is not None and is_sharded(old)) or not bool(past.omega.any()):
            return False  # of shards, made anew whenever the model is gathered or sharded, nothing can be told
        known = [weights for weights in (old, past.last_weights) if weights is not None]
        return bool(known) and not any(begins_with(parameter, weights) for weights in known)

    def note(self, name: str, parameter: nn.Parameter) -> None:
        """This one is as it should be."""
        self._seen[name] = ref(parameter)
        self._begun_anew.discard(name)

    def all_is_well(self) -> None:
        self._begun_anew.clear()

    def warn(self) -> None:
        """Once of each that has begun anew."""
        names, self._begun_anew = sorted(self._begun_anew), set()
        if names:
            warnings.warn(
                f"{some_of(names)}: replaced since the last task by parameters with weights of "
                "their own, which the past pulls to where the old ones were. If they are to begin anew, as the head of "
                "a new task does, pass each to forget(), or leave such names out from the beginning (exclude=)",
                stacklevel=users_stacklevel(),
            )


def begins_with(theta: Tensor, before: Tensor) -> bool:
    """Whether θ holds these weights, or is a larger one that holds them as its first block; to the lesser precision."""
    if theta.dim() != before.dim() or any(n < m for n, m in zip(theta.shape, before.shape, strict=True)):
        return False
    block = theta.detach()[tuple(slice(0, n) for n in before.shape)]
    dtype = min(theta.dtype, before.dtype, key=lambda dtype: torch.finfo(dtype).bits)
    return torch.equal(block.to(before.device, dtype), before.detach().to(dtype))
