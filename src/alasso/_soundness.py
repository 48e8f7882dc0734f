"""Whether importance can be trusted: finite, and somewhere more than nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from alasso._distributed import agreed
from alasso.errors import AlassoError, DivergedError

FLAWS = ("", "infinite", "NaN")


def flaw_of(omega: Tensor) -> int:
    """Place in FLAWS of what is wrong with an importance, 0 if nothing is."""
    if bool(torch.isfinite(omega).all()):
        return 0
    return 2 if bool(torch.isnan(omega).any()) else 1


def check_importance(importance: Mapping[str, Tensor], parameters: Iterable[nn.Parameter]) -> None:
    """Refuse, on all ranks alike, importance that is no number or that is nowhere."""
    flaws = [flaw_of(omega) for omega in importance.values()]
    some = any(bool(omega.any()) for omega in importance.values())
    # A rank sees its own shards alone, but either all ranks go on or none does.
    *flaws, any_importance = agreed([*flaws, int(some)], parameters)
    for name, flaw in zip(importance, flaws, strict=True):
        if flaw:
            raise DivergedError(
                f"importance of {name} is {FLAWS[flaw]}: the training diverged (are the inputs finite? a smaller "
                "learning rate, c or lam helps, and a larger xi), or a setting lets it overflow; what was protected "
                "before is kept, but to go on, load model, optimizer and regularizer as they were before this task"
            )
    if not any_importance:
        raise AlassoError(
            "importance is zero for every weight: nothing was learned that could be protected "
            "(did the weights move, and did gradients reach them?)"
        )
