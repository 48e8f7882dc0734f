r"""LoRA adapters of peft: a regularizer of the model protects them like any trained parameters.

:func:`merge_adapters` merges adapters into the base weights between tasks, so that each task can use the whole rank:

.. math:: W + s\,BA \;\to\; W' + s\,B'A, \qquad W' = W + s\,BA, \quad B' = 0

The weights do not change, and neither does ∂W/∂B = s·(·)A: the importance of B holds for B′, whose anchor is B's
minus the merged values. ∂W/∂A = s·B′ᵀ(·) is zero now, so A is free for the next task.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from alasso.errors import AlassoError
from alasso.methods.imm import IMM
from alasso.regularizer import Regularizer

try:
    from peft.tuners.lora import LoraLayer
except ImportError as error:
    raise ImportError("alasso.integrations.lora needs peft: pip install 'alasso[lora]'") from error


@torch.no_grad()
def merge_adapters(regularizer: Regularizer) -> None:
    """Merge the active adapters into the base weights, and adapt the regularizer's memory of them.

    Call it after ``consolidate()``. It needs no data, and the optimizer can stay.

    Args:
        regularizer: A regularizer of the model with the adapters.

    Raises:
        AlassoError: The method is IMM, a task has begun, or the adapters cannot be merged; then nothing has changed.
    """
    if not isinstance(regularizer, Regularizer):
        raise AlassoError(f"merge_adapters() takes the regularizer, not {type(regularizer).__name__}")
    if isinstance(regularizer, IMM):
        raise AlassoError("IMM averages the weights of tasks, which merged adapters no longer have; use another method")
    if regularizer.steps > 0:
        raise AlassoError("adapters are merged between tasks; call consolidate() first")
    pairs = list(_adapter_pairs(regularizer.model))
    if not pairs:
        raise AlassoError("the model has no LoRA adapters of linear or embedding layers to merge")
    for layer, _, restarts, stays in pairs:  # check all before changing anything
        if not layer.get_base_layer().weight.is_floating_point():
            raise AlassoError("the base weights are quantised and cannot take an adapter in; keep the adapters apart")
        if any(regularizer.protected.name_of(factor) is None for factor in (restarts, stays)):
            raise AlassoError("an adapter is excluded or frozen, so the regularizer has no memory of it to adapt")
    for layer, adapter, restarts, stays in pairs:
        base = layer.get_base_layer().weight
        base.add_(layer.get_delta_weight(adapter).to(base.dtype))
        regularizer.shift_anchor(restarts, -restarts.detach())
        restarts.zero_()
        regularizer.forget(stays)


def _adapter_pairs(model: nn.Module) -> Iterator[tuple[Any, str, nn.Parameter, nn.Parameter]]:
    """Yield (layer, adapter, factor that starts at zero, the other factor) of every active adapter."""
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    for layer in layers:
        if layer.merged:
            raise AlassoError("the adapters are merged for inference at the moment; call unmerge_adapter() first")
        for adapter in layer.active_adapters:
            if getattr(layer, "use_dora", {}).get(adapter):
                raise AlassoError("DoRA scales the base weights, which merging does not support; use plain LoRA")
            if adapter in layer.lora_A:
                yield layer, adapter, layer.lora_B[adapter].weight, layer.lora_A[adapter].weight
            elif adapter in layer.lora_embedding_A:
                yield layer, adapter, layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
