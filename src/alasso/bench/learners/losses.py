"""The loss of every learner: cross-entropy, with probabilities clipped where a run asks for it."""

from __future__ import annotations

import math

from torch import Tensor, nn


def cross_entropies(outputs: Tensor, y: Tensor, clip: float) -> Tensor:
    """Of each example. With a clip, the probability of the right class counts as no less than ``clip`` and no more
    than 1 − ``clip``, and beyond these an example has no gradient, as in Keras.
    """
    each = nn.functional.cross_entropy(outputs, y, reduction="none")
    return each.clamp(-math.log1p(-clip), -math.log(clip)) if clip else each


def mean_cross_entropy(outputs: Tensor, y: Tensor, clip: float) -> Tensor:
    return cross_entropies(outputs, y, clip).mean() if clip else nn.functional.cross_entropy(outputs, y)
