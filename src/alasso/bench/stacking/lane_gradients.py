"""Forward and backward pass of several networks of one shape at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from alasso.bench.learners.losses import cross_entropies
from alasso.bench.training.compiling import compiled_once, compiles_on
from alasso.vcl.layers import BayesLinear

LARGE_IMAGE = 128 * 128  # pixels
NARROW = 16  # outputs up to which a dense layer is made a sum
#: Sums over so few terms are written out term by term; the compiler's own limit is half of that.
WRITTEN_OUT = {"unroll_reductions_threshold": NARROW + 1}

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

    Weights and gradients have a leading axis, a row a lane; one lane alone needs none. ``built_as`` is equal for
    networks that were built alike, which share what is compiled; None where that is not known. A network that is random
    may be asked several times a step: the loss is the mean over so many ``samples`` of what it says. What it is given
    ``beside`` its weights has a leading axis, too, and no gradient.
    """

    def __init__(
        self,
        network: nn.Module,
        built_as: Hashable,
        lanes: int,
        bf16: bool,
        clip: float,
        device: torch.device,
        samples: int = 1,
    ) -> None:
        self.network, self.built_as, self.how = network, built_as, (lanes, bf16, clip, samples)
        self.alone = lanes == 1
        self.compiles = compiles_on(device)
        self.plain = gradient_function(network, *self.how)
        self.of_shapes: dict[Hashable, Callable[..., Any]] = {}

    @torch.no_grad()
    def __call__(
        self, weights: Weights, batch: LaneBatch, plainly: bool = False, beside: Weights | None = None
    ) -> tuple[Weights, Tensor]:
        run = self.compiled(batch) if self.compiles and not plainly else self.plain
        found: tuple[Weights, Tensor] = run(weights, *batch) if beside is None else run(weights, *batch, beside)
        return found

    def compiled(self, batch: LaneBatch) -> Callable[..., Any]:
        shapes = (batch.x.shape, batch.columns.shape)
        if shapes not in self.of_shapes:
            device = batch.x.device.type
            key = self.built_as and (self.built_as, self.how, device, shapes)
            self.of_shapes[shapes] = compiled_once(self.function, self.plain, key, WRITTEN_OUT)
        return self.of_shapes[shapes]

    def function(self) -> Callable[..., Any]:
        """What is compiled. The products of several lanes fill a GPU, however narrow; those of one alone do not."""
        network = copy.deepcopy(self.network)
        if self.alone:
            make_sums_of_narrow_layers(network)
        return gradient_function(network, *self.how)


def gradient_function(
    network: nn.Module, lanes: int, bf16: bool, clip: float, samples: int = 1
) -> Callable[..., tuple[Weights, Tensor]]:
    """What the network computes is in its code; the weights are given. It needs none of its own."""

    def outputs(weights: Weights, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
            if lanes == 1:
                found: Tensor = functional_call(network, *laid_out_for_convolutions(weights, x[0]))[None]
            else:
                found = vmap(lambda w, inputs: functional_call(network, w, inputs), randomness="different")(weights, x)
        return found if found.dtype == torch.float64 else found.float()

    def losses(
        weights: Weights, x: Tensor, y: Tensor, share: Tensor, columns: Tensor, beside: Weights | None = None
    ) -> tuple[Tensor, Tensor]:
        """The losses' sum, whose gradient by a lane's weights is that of the lane's own loss; and the losses."""
        if samples > 1:
            x, y, share = (repeated_in_lanes(part, samples) for part in (x, y, share / samples))
        answers = outputs(weights if beside is None else {**weights, **beside}, x)
        if columns.shape[1] < answers.shape[2]:
            answers = answers.gather(2, columns[:, None, :].expand(-1, answers.shape[1], -1))
        each = shared_cross_entropy(answers, y, share, clip)
        return each.sum(), each

    def gradients(
        weights: Weights, x: Tensor, y: Tensor, share: Tensor, columns: Tensor, *beside: Weights
    ) -> tuple[Weights, Tensor]:
        found: tuple[Weights, Tensor] = torch.func.grad(losses, has_aux=True)(weights, x, y, share, columns, *beside)
        return found

    return gradients


def laid_out_for_convolutions(weights: Weights, x: Tensor) -> tuple[Weights, Tensor]:
    """Large images, and filters for them, with the channels last in memory: a GPU convolves them in this order, and
    would have to bring them into it, and its answers out of it, at every layer.
    """
    if x.dim() != 4 or x[0, 0].numel() < LARGE_IMAGE:
        return weights, x

    def channels_last(tensor: Tensor) -> Tensor:
        return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor

    return {name: channels_last(weight) for name, weight in weights.items()}, channels_last(x)


def repeated_in_lanes(batch: Tensor, count: int) -> Tensor:
    """Each lane's examples, count times below themselves."""
    return batch.repeat(1, count, *[1] * (batch.dim() - 2))


def shared_cross_entropy(outputs: Tensor, y: Tensor, share: Tensor, clip: float) -> Tensor:
    """For each lane the cross-entropy of its examples, each weighed with its share."""
    each = cross_entropies(outputs.flatten(0, 1), y.flatten(), clip)
    return (each.view_as(share) * share).sum(1)


class NarrowLinear(nn.Linear):
    """A dense layer with few outputs as a weighted sum, which the compiler makes part of what stands beside it; as a
    product, it would keep a GPU waiting for a handful of tiles.
    """

    def forward(self, x: Tensor) -> Tensor:
        return linear_map_as_sums(x, self.weight, self.bias)


class NarrowBayesLinear(BayesLinear):
    """The same of a layer whose weights are Gaussians."""

    def linear_map(self, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        return linear_map_as_sums(x, W, b)


def linear_map_as_sums(x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
    sums = (x.unsqueeze(-2) * W).sum(-1)
    return sums if b is None else sums + b


def make_sums_of_narrow_layers(network: nn.Module) -> None:
    """In place. Only where it is compiled: elsewhere all summands would be kept."""
    for layer in network.modules():
        if type(layer) is nn.Linear and layer.out_features <= NARROW:
            layer.__class__ = NarrowLinear
        if type(layer) is BayesLinear and len(layer.weight_mean) <= NARROW:
            layer.__class__ = NarrowBayesLinear
