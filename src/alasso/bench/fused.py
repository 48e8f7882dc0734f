"""A linear layer of stacked runs whose weights move within the backward pass. GPU only; hand-written for a reason.

The gradient of a large weight matrix is cheap to compute and dear to carry: writing it and reading it back is a fifth
of all memory traffic of a step, and while it is computed memory stands idle. Here each tile of the matrix gets its
gradient from the tensor cores and is moved at once, by the arithmetic of :func:`alasso.bench.lanes.spring_and_adam_`,
against which the tests hold it. The gradient is never written down.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

PLAIN_LAYERS = (nn.Flatten, nn.Linear, nn.ReLU, nn.Dropout)

Move = Callable[[Tensor, Tensor], None]


def can_fuse(network: nn.Module, device: torch.device) -> bool:
    """Whether the network is a chain of layers that are written out here, on a device with a kernel compiler."""
    chain = isinstance(network, nn.Sequential) and all(type(layer) in PLAIN_LAYERS for layer in network)
    return chain and device.type == "cuda" and importlib.util.find_spec("triton") is not None


def outputs(network: nn.Sequential, weights: Mapping[str, Tensor], x: Tensor, moves: Mapping[str, Move]) -> Tensor:
    """The network over (lanes, batch, …).

    ``moves`` has, by name, what to do with (input, gradient by the output) of a linear layer in the backward pass, in
    place of handing its weights a gradient.
    """
    for name, layer in network.named_children():
        if isinstance(layer, nn.Linear):
            weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
            x = MovingLinear.apply(x, weight, bias, moves[f"{name}.weight"])
        elif isinstance(layer, nn.Flatten):
            x = x.flatten(2)
        else:
            x = layer(x)
    return x


class MovingLinear(torch.autograd.Function):
    """x·Wᵀ + b for each lane; the backward pass moves W and gives gradients to x and b alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, move: Move) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.move, ctx.has_bias = move, bias is not None
        if bias is None:
            return torch.bmm(x, weight.mT)
        return torch.baddbmm(bias[:, None], x, weight.mT)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.bmm(dy, weight) if ctx.needs_input_grad[0] else None  # with the weights as they were
        ctx.move(x, dy)
        return dx, None, dy.sum(1) if ctx.has_bias else None, None


def move_weights_(
    x: Tensor,
    dy: Tensor,
    theta: Tensor,
    m: Tensor,
    v: Tensor,
    anchor: Tensor,
    k_minus: Tensor,
    k_plus: Tensor,
    path: Tensor,
    step_size: Tensor,
    root: Tensor,
    active: Tensor,
    *,
    betas: tuple[float, float],
    epsilon: float,
    exact: bool,
) -> None:
    """One step of (lanes, out, in) weights under the gradient dyᵀ·x, in place. ``exact``: products in full float32."""
    import triton

    from alasso.bench.fused_kernel import move_tile

    lanes, batch, inputs = x.shape
    outs = dy.shape[2]
    tile = {"BM": 64, "BN": 64, "BK": 32}
    grid = (triton.cdiv(outs, tile["BM"]) * triton.cdiv(inputs, tile["BN"]), lanes)
    tensors = (dy, x, theta, m, v, anchor, k_minus, k_plus, path, step_size, root, active)
    assert all(tensor.is_contiguous() for tensor in tensors)
    precision = "ieee" if exact else "tf32"
    move_tile[grid](
        *tensors, batch, outs, inputs, *betas, epsilon, PRECISION=precision, num_warps=8, num_stages=3, **tile
    )
