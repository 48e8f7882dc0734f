"""Forward and backward pass of several networks of one shape at once."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from alasso import kernels
from alasso.bench.compiling import compiled_once, compiles_on, structure

NARROW = 16  # outputs up to which a dense layer is made a sum

log = logging.getLogger("alasso")

Weights = dict[str, Tensor]


class LaneBatch(NamedTuple):
    """What one step is made on, gathered: inputs (lanes, batch, …), labels counted from the lane's first column, each
    example's share in the lane's loss, and the columns of the output that are the lane's own.
    """

    x: Tensor
    y: Tensor
    share: Tensor
    columns: Tensor  # (lanes, classes of the task)


class LaneGradients:
    """Gradients of each lane's loss by its weights, and the losses.

    Weights and gradients have a leading axis, a row a lane; one lane alone needs none.
    """

    def __init__(self, network: nn.Module, lanes: int, bf16: bool, device: torch.device) -> None:
        self.plain = gradient_function(network, lanes, bf16)
        self.compiled: Callable[..., Any] | None = None
        if compiles_on(device):
            narrow = copy.deepcopy(network)
            make_sums_of_narrow_layers(narrow)
            known = structure(narrow)
            key = known and f"{lanes} lanes, bf16 {bf16}, {device.type}: {known}"
            self.compiled = compiled_once(lambda: gradient_function(narrow, lanes, bf16), key)

    @torch.no_grad()
    def __call__(self, weights: Weights, batch: LaneBatch, plainly: bool = False) -> tuple[Weights, Tensor]:
        if self.compiled is not None and not plainly:
            try:
                found: tuple[Weights, Tensor] = self.compiled(weights, *batch)
                return found
            except Exception as reason:  # whatever a network of the user's own may hold
                if kernels.is_being_recorded(batch.x.device):
                    raise
                log.info("forward and backward pass are not compiled: %s", kernels.first_line(reason))
                self.compiled = None
        return self.plain(weights, *batch)


def gradient_function(network: nn.Module, lanes: int, bf16: bool) -> Callable[..., tuple[Weights, Tensor]]:
    """What the network computes is in its code; the weights are given. It needs none of its own."""

    def outputs(weights: Weights, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
            if lanes == 1:
                found: Tensor = functional_call(network, weights, x[0])[None]
            else:
                found = vmap(lambda w, inputs: functional_call(network, w, inputs), randomness="different")(weights, x)
        return found if found.dtype == torch.float64 else found.float()

    def losses(weights: Weights, x: Tensor, y: Tensor, share: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """The losses' sum, whose gradient by a lane's weights is that of the lane's own loss; and the losses."""
        answers = outputs(weights, x)
        if columns.shape[1] < answers.shape[2]:
            answers = answers.gather(2, columns[:, None, :].expand(-1, answers.shape[1], -1))
        each = shared_cross_entropy(answers, y, share)
        return each.sum(), each

    def gradients(weights: Weights, x: Tensor, y: Tensor, share: Tensor, columns: Tensor) -> tuple[Weights, Tensor]:
        found: tuple[Weights, Tensor] = torch.func.grad(losses, has_aux=True)(weights, x, y, share, columns)
        return found

    return gradients


def shared_cross_entropy(outputs: Tensor, y: Tensor, share: Tensor) -> Tensor:
    """For each lane the cross-entropy of its examples, each weighed with its share."""
    each = nn.functional.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="none")
    return (each.view_as(share) * share).sum(1)


class NarrowLinear(nn.Linear):
    """A dense layer with few outputs as a weighted sum, which the compiler makes part of what stands beside it; as a
    product, it would keep a GPU waiting for a handful of tiles.
    """

    def forward(self, x: Tensor) -> Tensor:
        sums = (x.unsqueeze(-2) * self.weight).sum(-1)
        return sums if self.bias is None else sums + self.bias


def make_sums_of_narrow_layers(network: nn.Module) -> None:
    """In place. Only where it is compiled: elsewhere all summands would be kept."""
    for layer in network.modules():
        if type(layer) is nn.Linear and layer.out_features <= NARROW:
            layer.__class__ = NarrowLinear
