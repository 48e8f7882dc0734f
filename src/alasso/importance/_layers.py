"""How the common layers use their parameters, so that per-sample gradients follow from inputs and output gradients.

With input x and output gradient g, sample i's gradient is, summed over its positions p,

    a weight            Σ_p g_ip x_ipᵀ
    a bias              Σ_p g_ip
    a norm's scale      Σ_p g_ip x̂_ip            x̂ is the normalized input
    an embedding's row  Σ_p g_ip [x_ip = v]      row v
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
CHANNELS_LAST = (nn.Linear, nn.LayerNorm)
#: The layers whose per-sample gradients follow from inputs and output gradients.
DIRECT_LAYERS = frozenset({*CHANNELS_LAST, *CONVOLUTIONS, *BATCH_NORMS, nn.GroupNorm, nn.Embedding})
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


def is_direct(layer: nn.Module) -> bool:
    """Return whether the layer is exactly of a known kind: a subclass or replaced forward may differ.

    Two kinds are not: batch norms that use the batch's own statistics, which mix samples, and embeddings that alter
    gradients.
    """
    uses_batch_statistics = isinstance(layer, BATCH_NORMS) and layer.running_mean is None
    alters_gradients = isinstance(layer, nn.Embedding) and (
        layer.scale_grad_by_freq or layer.sparse or layer.max_norm is not None
    )
    return (
        kind_of(layer) in DIRECT_LAYERS
        and "forward" not in vars(layer)
        and not uses_batch_statistics
        and not alters_gradients
    )


def kind_of(layer: nn.Module) -> type:
    """Return the layer's class as its author wrote it: FSDP2 replaces it by a subclass."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where it is not loaded, nothing is sharded
    return type(layer).__bases__[1] if fsdp is not None and isinstance(layer, fsdp.FSDPModule) else type(layer)


def sum_positions(layer: nn.Module, values: Tensor, shape: torch.Size) -> Tensor:
    """Sum (N, …) over positions.

    Args:
        layer: Tells where its channels are: last in linear layers and layer norms, else second.
        values: (N, …, C) or (N, C, …).
        shape: Of the parameter, all of whose axes lie in the channels.

    Returns:
        (N, *shape).
    """
    channels_last = values if isinstance(layer, CHANNELS_LAST) else values.movedim(1, -1)
    return channels_last.reshape(len(values), -1, *shape).sum(1)


def normalized(layer: nn.Module, x: Tensor) -> Tensor:
    """Return x̂, a norm layer's input (N, …) before scale and shift."""
    if isinstance(layer, nn.LayerNorm):
        return F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    if isinstance(layer, nn.GroupNorm):
        return F.group_norm(x, layer.num_groups, eps=layer.eps)
    assert isinstance(layer, BATCH_NORMS)
    assert layer.running_mean is not None and layer.running_var is not None  # is_direct
    return F.batch_norm(x, layer.running_mean.to(x.dtype), layer.running_var.to(x.dtype), eps=layer.eps)


def by_group(layer: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Order what meets in a weight of a linear layer or convolution.

    Args:
        layer: Has I inputs (channels times kernel) and O outputs in each of its groups; a linear layer has one group.
        x: The layer's input.
        g: The gradient by its output.

    Returns:
        Inputs (N, groups, I, P) and output gradients (N, groups, O, P) at each of P positions.
    """
    if isinstance(layer, nn.Linear):
        return x.flatten(1, -2).mT[:, None], g.flatten(1, -2).mT[:, None]
    assert isinstance(layer, CONVOLUTIONS)
    shape = (len(x), layer.groups, -1, g[0, 0].numel())
    return windows(layer, x).reshape(shape), g.reshape(shape)


def windows(conv: Convolution, x: Tensor) -> Tensor:
    """Return what each weight sees at each position, (N, channels, *kernel, *positions), of an input x."""
    x = F.pad(x, padding_of(conv), "constant" if conv.padding_mode == "zeros" else conv.padding_mode)
    dims = len(conv.kernel_size)
    for dim, (kernel, stride, step) in enumerate(zip(conv.kernel_size, conv.stride, conv.dilation, strict=True)):
        x = x.unfold(2 + dim, step * (kernel - 1) + 1, stride)[..., ::step]
    return x.permute(0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims))


def padding_of(conv: Convolution) -> list[int]:
    """Return the widths before and after each dimension, the last dimension first, as `F.pad` takes them."""
    if conv.padding == "valid":
        return [0, 0] * len(conv.kernel_size)
    if conv.padding == "same":
        spare = [step * (kernel - 1) for kernel, step in zip(conv.kernel_size, conv.dilation, strict=True)]
        return [width for total in reversed(spare) for width in (total // 2, total - total // 2)]
    widths: tuple[int, ...] = conv.padding  # type: ignore[assignment]  # only strings are not tuples
    return [width for width in reversed(widths) for _ in range(2)]


def add_embedding_(
    total: Tensor, layer: nn.Embedding, x: Tensor, g: Tensor, magnitude: Callable[[Tensor], Tensor]
) -> None:
    """Add Σ_i magnitude(sample i's gradient of the table), forming only the rows that a sample looks up.

    Args:
        total: Changed in place, (rows of the table, D).
        layer: The embedding; the row at its `padding_idx` gets no gradient.
        x: Rows that were looked up, (N, …).
        g: The gradient by the output, (N, …, D).
        magnitude: Elementwise, of a gradient.
    """
    sample = torch.arange(len(x), device=x.device).view(-1, *[1] * (x.ndim - 1)).expand_as(x)
    flat_x, flat_g, flat_sample = x.flatten(), g.flatten(0, -2), sample.flatten()
    if layer.padding_idx is not None:
        kept = flat_x != layer.padding_idx
        flat_x, flat_g, flat_sample = flat_x[kept], flat_g[kept], flat_sample[kept]
    pairs, place = torch.unique(flat_sample * layer.num_embeddings + flat_x, return_inverse=True)
    rows = flat_g.new_zeros(len(pairs), flat_g.shape[-1]).index_add_(0, place, flat_g)
    total.index_add_(0, pairs % layer.num_embeddings, magnitude(rows))
