"""Layers with Gaussian weights, and models made of them: what variational continual learning trains."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alasso.errors import AlassoError

#: Variances stay above this, so that the square root has a finite derivative; noise of 1e-8 is negligible.
SMALLEST_VARIANCE = 1e-16


# -- sampling ------------------------------------------------------------------------------------------------


def reparameterised(mean: Tensor, variance: Tensor) -> Tensor:
    """Return a sample of N(mean, variance), differentiable by both.

    Args:
        mean: Means, of any shape.
        variance: Variances, of the same shape.

    Returns:
        A tensor of that shape.
    """
    # An input of zeros has no variance; √ has an infinite slope there, and the gradient would be 0 · inf.
    smallest = max(SMALLEST_VARIANCE, torch.finfo(variance.dtype).tiny)
    return mean + variance.clamp(min=smallest).sqrt() * torch.randn_like(mean)


# -- layers --------------------------------------------------------------------------------------------------


class BayesLayer(nn.Module):
    """A linear map with Gaussian weights, made from a plain layer; see :class:`BayesLinear` and :class:`BayesConv2d`.

    A forward pass samples, in training and in evaluation mode alike; with the attribute ``sampling`` False it uses the
    means.

    Args:
        layer: The plain layer.
        initial_logvar: Log-variance that every weight begins with.
        from_point_estimate: Whether the means begin at the plain layer's weights, or else at small random values.
        prior_mean: Mean of the first task's prior.
        prior_var: Variance of the first task's prior.

    Raises:
        AlassoError: ``prior_var`` is not above zero.
    """

    sampling = True
    weight_mean: nn.Parameter
    weight_logvar: nn.Parameter
    bias_mean: nn.Parameter | None
    bias_logvar: nn.Parameter | None
    prior_weight_mean: Tensor
    prior_weight_var: Tensor
    prior_bias_mean: Tensor
    prior_bias_var: Tensor

    def __init__(
        self,
        layer: nn.Linear | nn.Conv1d | nn.Conv2d,
        *,
        initial_logvar: float = -6.0,
        from_point_estimate: bool = True,
        prior_mean: float = 0.0,
        prior_var: float = 1.0,
    ) -> None:
        super().__init__()
        if not prior_var > 0:
            raise AlassoError(f"prior_var must be above zero, not {prior_var}")
        for name, value in (("weight", layer.weight), ("bias", layer.bias)):
            if value is None:
                self.register_parameter(f"{name}_mean", None)
                self.register_parameter(f"{name}_logvar", None)
                continue
            mean = value.detach().clone() if from_point_estimate else _small_random(value)
            self.register_parameter(f"{name}_mean", nn.Parameter(mean))
            self.register_parameter(f"{name}_logvar", nn.Parameter(torch.full_like(mean, initial_logvar)))
            self.register_buffer(f"prior_{name}_mean", torch.full_like(mean, prior_mean))
            self.register_buffer(f"prior_{name}_var", torch.full_like(mean, prior_var))

    def linear_map(self, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        """Return Wx + b, for this kind of layer.

        Args:
            x: Input of the layer.
            W: Weight, of the plain layer's shape.
            b: Bias, or None.

        Returns:
            The output of a plain layer with these weights.
        """
        raise AssertionError("each kind of layer has its own")

    def pre_activation(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and variance of the layer's output h.

        Args:
            x: Input of the layer.

        Returns:
            (E[h], Var[h]), each of the output's shape.
        """
        bias_var = None if self.bias_logvar is None else self.bias_logvar.exp()
        mean = self.linear_map(x, self.weight_mean, self.bias_mean)
        return mean, self.linear_map(x.square(), self.weight_logvar.exp(), bias_var)

    def forward(self, x: Tensor) -> Tensor:
        if not self.sampling:
            return self.linear_map(x, self.weight_mean, self.bias_mean)
        return reparameterised(*self.pre_activation(x))

    def posteriors(self) -> Iterator[tuple[nn.Parameter, nn.Parameter, Tensor, Tensor]]:
        """Yield the distributions of the weight and, if there is one, of the bias.

        Yields:
            (mean, logvar, prior_mean, prior_var), each of the weight's or the bias's shape.
        """
        yield self.weight_mean, self.weight_logvar, self.prior_weight_mean, self.prior_weight_var
        if self.bias_mean is not None and self.bias_logvar is not None:
            yield self.bias_mean, self.bias_logvar, self.prior_bias_mean, self.prior_bias_var

    def extra_repr(self) -> str:
        return f"weight={tuple(self.weight_mean.shape)}, bias={self.bias_mean is not None}"


class BayesLinear(BayesLayer):
    """A linear layer with Gaussian weights; :class:`BayesLayer` explains the arguments.

    Exact for inputs (N, D). Inputs (N, T, D) get independent noise at each position t, as in :class:`BayesConv2d`.

    >>> BayesLinear(nn.Linear(3, 2))(torch.ones(5, 3)).shape
    torch.Size([5, 2])
    """

    def linear_map(self, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        return F.linear(x, W, b)


class _BayesConv(BayesLayer):
    """A convolution with Gaussian weights and the plain layer's geometry."""

    conv: ClassVar[Any]

    def __init__(self, layer: nn.Conv1d | nn.Conv2d, **settings: Any) -> None:
        super().__init__(layer, **settings)
        self.geometry = {"stride": layer.stride, "dilation": layer.dilation, "groups": layer.groups}
        # The convolution itself pads zeros; other padding comes before it. Padding copies inputs, or adds zeros, so the
        # square of the padded input is the padded square.
        zeros = layer.padding_mode == "zeros"
        self.geometry["padding"] = layer.padding if zeros else 0
        self.padding_mode = layer.padding_mode
        self.widths: list[int] = [] if zeros else list(layer._reversed_padding_repeated_twice)

    def linear_map(self, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        if self.widths:
            x = F.pad(x, self.widths, self.padding_mode)
        # Var[h] is exact at each position, but positions share W and so are correlated; local reparameterisation draws
        # their noise independently. This is the usual approximation for convolutions.
        h: Tensor = type(self).conv(x, W, b, **self.geometry)
        return h


class BayesConv1d(_BayesConv):
    """A one-dimensional convolution with Gaussian weights, which samples each output position independently.

    Args:
        layer: The plain layer.
        **settings: As in :class:`BayesLayer`.
    """

    conv = staticmethod(F.conv1d)


class BayesConv2d(_BayesConv):
    """A two-dimensional convolution with Gaussian weights, which samples each output position independently.

    Args:
        layer: The plain layer.
        **settings: As in :class:`BayesLayer`.
    """

    conv = staticmethod(F.conv2d)


def _small_random(value: Tensor) -> Tensor:
    """Return the authors' start without a point estimate: N(0, 0.1²), truncated at two standard deviations."""
    return nn.init.trunc_normal_(torch.empty_like(value), std=0.1, a=-0.2, b=0.2).detach()


# -- models --------------------------------------------------------------------------------------------------

_BAYESIAN: dict[type[nn.Module], type[BayesLayer]] = {
    nn.Linear: BayesLinear,
    nn.Conv1d: BayesConv1d,
    nn.Conv2d: BayesConv2d,
}


def convert(
    model: nn.Module,
    *,
    initial_logvar: float = -6.0,
    from_point_estimate: bool = True,
    prior_mean: float = 0.0,
    prior_var: float = 1.0,
) -> nn.Module:
    """Return a copy of the model whose linear and convolutional layers have Gaussian weights.

    The authors train the plain model on the first task and then convert it.

    Args:
        model: A model of linear and convolutional layers and layers without parameters.
        initial_logvar: Log-variance that every weight begins with.
        from_point_estimate: Whether the means begin at the model's weights, or else at small random values.
        prior_mean: Mean of the first task's prior.
        prior_var: Variance of the first task's prior.

    Returns:
        The copy, in the same mode.

    Raises:
        AlassoError: Another module has parameters (it would change without a prior), two layers share one, no layer has
            any, or ``prior_var`` is not above zero.

    >>> convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    Sequential(
      (0): BayesLinear(weight=(8, 4), bias=True)
      (1): ReLU()
      (2): BayesLinear(weight=(2, 8), bias=True)
    )
    """
    check_convertible(model)
    settings: dict[str, Any] = {
        "initial_logvar": initial_logvar,
        "from_point_estimate": from_point_estimate,
        "prior_mean": prior_mean,
        "prior_var": prior_var,
    }
    model = copy.deepcopy(model)
    # A module in two places stays one module.
    made = {
        layer: _BAYESIAN[type(layer)](layer, **settings).train(layer.training)  # type: ignore[arg-type]
        for layer in model.modules()
        if type(layer) in _BAYESIAN
    }
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in made:
                setattr(parent, name, made[child])
    return made.get(model, model)


def check_convertible(model: nn.Module) -> None:
    """Refuse a model that :func:`convert` cannot convert.

    Args:
        model: A plain model.

    Raises:
        AlassoError: A parameter would get no distribution, or two, or there is none.
    """
    owners: dict[nn.Parameter, str] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if type(module) not in _BAYESIAN:
                raise AlassoError(
                    f"{name or 'the model itself'} is a {type(module).__name__} with parameters, which has no Gaussian "
                    "form here; build the model of Linear, Conv1d and Conv2d layers and layers without parameters"
                )
            if parameter in owners:
                raise AlassoError(f"{name} and {owners[parameter]} share a parameter; give each layer its own")
            owners[parameter] = name
    if not owners:
        raise AlassoError("the model has no linear or convolutional layer to make Bayesian")


def bayes_layers(model: nn.Module) -> list[BayesLayer]:
    """Return the model's layers with Gaussian weights.

    Args:
        model: A model that :func:`convert` returned.

    Returns:
        The layers, in the order of ``model.modules()``.

    Raises:
        AlassoError: There are none.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, BayesLayer)]
    if not layers:
        raise AlassoError("the model has no Bayesian layers; pass it through convert() first")
    return layers


@contextmanager
def at_the_means(model: nn.Module) -> Iterator[None]:
    """Let forward passes use the means of the weights, without sampling, while the context lasts.

    Args:
        model: A model that :func:`convert` returned.

    Raises:
        AlassoError: The model has no layers with Gaussian weights.
    """
    layers = bayes_layers(model)
    before = [layer.sampling for layer in layers]
    try:
        for layer in layers:
            layer.sampling = False
        yield
    finally:
        for layer, sampling in zip(layers, before, strict=True):
            layer.sampling = sampling
