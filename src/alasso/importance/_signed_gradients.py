r"""Gradients of a layer's weight in one call, by a few products with random signs S, which keep lengths on average.

G ⊗ A, a sum over all positions, takes the positions of a sample for samples of their own. Where a layer's weight is
shared by positions that are alike, as in a transformer, its curvature is larger, by

.. math::

    \frac{\sum_n \lVert \sum_p g_{np} \, a_{np}^\top S \rVert^2}
         {\sum_n \sum_p \lVert g_{np} \rVert^2 \, \lVert a_{np}^\top S \rVert^2}

with sums over samples n and their positions p.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from alasso.importance._layers import CONVOLUTIONS
from alasso.importance.kronecker import (
    KERNELS,
    has_inputs_as_rows,
    images_under,
    rows_of,
    signs_like,
    under_signs,
)


def signed_pairs(layer: nn.Module, x: Tensor, g: Tensor, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the pairs whose products add up to M S, for the gradient M of the loss by a layer's weight in one call.

    Args:
        layer: One that :func:`is_factored`, no embedding.
        x: The layer's input; its first axis is that of samples.
        g: The gradient by the layer's output, as it reaches its weight.
        rank: r.
        dtype: The precision to compute in.

    Returns:
        (samples, groups, positions, rows / groups); (samples, groups, positions, min(columns, r)).
    """
    x, g = x.to(dtype), g.to(dtype)
    if isinstance(layer, KERNELS):
        seen, left = (x, g) if isinstance(layer, CONVOLUTIONS) else (g, x)
        left = left if left.dim() == len(layer.kernel_size) + 2 else left[None]
        right = under_signs(images_under(layer, seen), layer.kernel_size, layer, rank)[1].flatten(2)  # type: ignore[arg-type]
        left = left.reshape(len(left), layer.groups, -1, right.shape[-1])
        return left.mT, right.reshape(*left.shape[:2], *right.shape[1:]).mT
    left, right = (x, g) if has_inputs_as_rows(layer) else (g, x)
    samples = len(x) if x.dim() > 1 else 1
    left, right = (one.reshape(samples, 1, -1, one.shape[-1]) for one in (left, right))
    return left, right @ signs_like(right, right.shape[-1], rank)


def signed_gradient(layer: nn.Module, x: Tensor, g: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """Return M S for the gradient M of the loss by a layer's weight, seen as a matrix, that one call brings about.

    Args:
        layer: One that :func:`is_factored`.
        x: The layer's input.
        g: The gradient by the layer's output, as it reaches its weight.
        rank: r.
        dtype: The precision to compute in.

    Returns:
        (rows, min(columns, r)).
    """
    if isinstance(layer, nn.Embedding):
        g = rows_of(layer, g.to(dtype))
        told = g @ signs_like(g, g.shape[1], rank)
        return told.new_zeros(layer.num_embeddings, told.shape[1]).index_add_(0, x.flatten(), told)
    return torch.einsum("ngpm,ngpr->gmr", *signed_pairs(layer, x, g, rank, dtype)).flatten(0, 1)


def sizes_of_gradients(layer: nn.Module, x: Tensor, g: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """Return Σ ‖M S‖² over a call's samples, and the same as if their positions had nothing in common.

    Args:
        layer: One that :func:`is_factored`.
        x: The layer's input; its first axis is that of samples.
        g: The gradient by the layer's output, as it reaches its weight.
        rank: r.
        dtype: The precision to compute in.

    Returns:
        Both; zeros for one position a sample, and for embeddings, whose positions share a row only by the same token.
    """
    if isinstance(layer, nn.Embedding) or (x.dim() < 3 and not hasattr(layer, "kernel_size")):
        return torch.zeros(2, dtype=dtype, device=g.device)
    left, right = signed_pairs(layer, x, g, rank, dtype)
    if left.shape[2] < right.shape[3]:  # few positions: ‖Σ_p l_p r_pᵀ‖² = Σ_pq (l_p · l_q) (r_p · r_q)
        pairs = (left @ left.mT) * (right @ right.mT)
        return torch.stack([pairs.sum(), pairs.diagonal(dim1=2, dim2=3).sum()]).clamp(min=0)  # rounding errors
    alone = torch.linalg.vector_norm(left, dim=-1) * torch.linalg.vector_norm(right, dim=-1)
    return torch.stack([(left.mT @ right).square().sum(), alone.square().sum()])
