r"""How stiff a penalty may be under SGD: where its curvature k″ is beyond

.. math:: \text{lr} \cdot k'' < 2 \, (1 + \beta) \qquad (\text{Nesterov: } / \, (1 + 2 \beta)),

every step swings further past the anchor than the one before, up to NaN. Optimizers such as Adam make steps of a size
of their own, and need no limit. The limit follows the learning rate from step to step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer

log = logging.getLogger("alasso")

SHARE = 0.5  # of the limit that a penalty may take; the task's own curvature needs some, too


class Limits:
    """The limit of each parameter group of one optimizer, at its present learning rate; none unless it is SGD.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # Its steps grow with the gradient.
        self.is_sgd = isinstance(optimizer, SGD) or "SGD" in type(optimizer).__name__
        self._of: list[float | Tensor] = []
        self._was_said = False

    def follow(self, optimizer: Optimizer) -> None:
        """Take over the learning rates of the step that the optimizer is about to make."""
        self._of = [most_curvature(group) for group in optimizer.param_groups]

    def below(self, stiffest: float, group: int) -> float | Tensor | None:
        """Return the limit of a group where a penalty may be beyond it, else None; say so once.

        Args:
            stiffest: The penalty's largest curvature; 0 for none.
            group: The group's index.
        """
        if stiffest == 0:
            return None
        most = self._of[group]
        if not isinstance(most, Tensor):
            if stiffest <= most:
                return None
            if not self._was_said:
                self._was_said = True
                log.warning(
                    "SGD would not be stable under the whole penalty at this learning rate: its stiffest parts get less"
                )
        return most


def most_curvature(group: Mapping[str, Any]) -> float | Tensor:
    """Return the largest curvature that a penalty may have.

    Args:
        group: A parameter group of SGD; a tensor for its learning rate is not looked into, as CUDA graphs need it.

    Returns:
        A positive number, or a scalar tensor.
    """
    lr, momentum = group["lr"], group.get("momentum", 0.0)
    most = SHARE * 2 * (1 + momentum) / (1 + 2 * momentum if group.get("nesterov") else 1)
    return most / lr if isinstance(lr, Tensor) or lr > 0 else float("inf")
