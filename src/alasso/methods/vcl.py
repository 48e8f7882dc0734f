r"""Variational continual learning (Nguyen, Li, Bui and Turner, ICLR 2018) with mean-field Gaussian weights.

What is known of the weights is a distribution, and the posterior after one task is the prior of the next:

.. math::

    q_t(\theta) &= \arg\min_q \mathrm{KL}\big( q(\theta) \,\big\|\, q_{t-1}(\theta)\, p(\mathcal D_t|\theta) / Z_t \big)

    q_t(\theta) &= \prod_d \mathcal N(\theta_d;\, \mu_d, \sigma_d^2)

which is to minimise, over the N examples of the task and divided by N,

.. math::

    -\tfrac{1}{N} \mathrm{ELBO} = \mathrm E_{q_t}\Big[ -\tfrac{1}{N} \sum_n \log p(y_n | \theta, x_n) \Big]
        + \tfrac{1}{N} \mathrm{KL}(q_t \| q_{t-1})

The expectation is estimated by sampling. A layer's pre-activation h = Wx + b is Gaussian under q, so it is sampled in
place of the weights (local reparameterisation, Kingma et al. 2015), which gives gradients of far smaller variance:

.. math:: \mathrm E[h] = \mu_W x + \mu_b, \qquad \mathrm{Var}[h] = \sigma_W^2 x^2 + \sigma_b^2

A life with it: ``model = convert(net)`` once; for each task, minimise :func:`negative_elbo`, then :func:`update_prior`;
answer with :func:`predict`. All memory is in parameters and buffers, so ``state_dict`` saves it. Coresets are in
:mod:`alasso.coresets`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alasso.errors import AlassoError

#: Variances are kept above this, where the square root still has a finite derivative; a noise of 1e-8 is none.
SMALLEST_VARIANCE = 1e-16

#: Rows (samples times examples) that :func:`predict` sends through the model at once.
ROWS_AT_ONCE = 20_000

Head = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


# -- the equations -------------------------------------------------------------------------------------------


def kl_gaussians(mean: Tensor, logvar: Tensor, prior_mean: Tensor, prior_var: Tensor) -> Tensor:
    r"""KL between two diagonal Gaussians, summed:

    .. math:: \tfrac12 \sum_d \frac{\sigma_d^2}{\sigma_{0,d}^2} - 1 - \log \frac{\sigma_d^2}{\sigma_{0,d}^2}
        + \frac{(\mu_d - \mu_{0,d})^2}{\sigma_{0,d}^2}
    """
    log_ratio = logvar - prior_var.log()
    # expm1 keeps the sum of the first three terms from cancelling, and from turning negative, near the prior.
    return 0.5 * (log_ratio.expm1() - log_ratio + (mean - prior_mean).square() / prior_var).sum()


def kl_stiffness(prior_var: Tensor, data_size: int) -> Tensor:
    r"""As far as a mean goes, KL / N is a spring anchored at the prior's mean, :math:`k (\mu_d - \mu_{0,d})^2` with

    .. math:: k = \frac{1}{2 N \sigma_{0,d}^2}
    """
    return 0.5 / (data_size * prior_var)


def kl_grad_by_logvar(logvar: Tensor, prior_logvar: Tensor, half_share: float | Tensor) -> Tensor:
    r"""Derivative of KL / N by each log-variance; ``half_share`` is 1 / 2N:

    .. math:: \frac{1}{2N} \Big( \frac{\sigma_d^2}{\sigma_{0,d}^2} - 1 \Big)
    """
    return half_share * (logvar - prior_logvar).expm1()


def standard_noise(like: Tensor) -> Tensor:
    """What makes a forward pass random: a number of N(0, 1) for each one of ``like``."""
    return torch.randn_like(like)


def reparameterised(mean: Tensor, variance: Tensor) -> Tensor:
    """A sample of N(mean, variance), differentiable by both."""
    # An input of zeros has no variance; there √ has an infinite slope, and the gradient would be 0 · inf.
    smallest = max(SMALLEST_VARIANCE, torch.finfo(variance.dtype).tiny)
    return mean + variance.clamp(min=smallest).sqrt() * standard_noise(mean)


# -- layers --------------------------------------------------------------------------------------------------


class BayesLayer(nn.Module):
    """A linear map with Gaussian weights, made from a plain layer; see :class:`BayesLinear` and :class:`BayesConv2d`.

    Means begin at the plain layer's weights, or near zero, all log-variances at ``initial_logvar``. The first task's
    prior is N(``prior_mean``, ``prior_var``). A forward pass samples, in training and in evaluation mode alike; with
    ``sampling`` False it uses the means. With ``given_variances`` True a forward pass takes what stands for the
    log-variances for the variances themselves, for one who keeps both and wants gradients by the variances.
    """

    sampling = True
    given_variances = False
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
            mean = value.detach().clone() if from_point_estimate else small_random(value)
            self.register_parameter(f"{name}_mean", nn.Parameter(mean))
            self.register_parameter(f"{name}_logvar", nn.Parameter(torch.full_like(mean, initial_logvar)))
            self.register_buffer(f"prior_{name}_mean", torch.full_like(mean, prior_mean))
            self.register_buffer(f"prior_{name}_var", torch.full_like(mean, prior_var))

    def linear_map(self, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        """Wx + b, for this kind of layer."""
        raise AssertionError("each kind of layer has its own")

    def pre_activation(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """E[h] and Var[h] of the layer's output h for an input x."""
        bias_var = None if self.bias_logvar is None else self.variance(self.bias_logvar)
        mean = self.linear_map(x, self.weight_mean, self.bias_mean)
        return mean, self.linear_map(x.square(), self.variance(self.weight_logvar), bias_var)

    def variance(self, logvar: Tensor) -> Tensor:
        return logvar if self.given_variances else logvar.exp()

    def forward(self, x: Tensor) -> Tensor:
        if not self.sampling:
            return self.linear_map(x, self.weight_mean, self.bias_mean)
        return reparameterised(*self.pre_activation(x))

    def posteriors(self) -> Iterator[tuple[nn.Parameter, nn.Parameter, Tensor, Tensor]]:
        """(mean, logvar, prior_mean, prior_var) of the weight, and of the bias if there is one."""
        yield self.weight_mean, self.weight_logvar, self.prior_weight_mean, self.prior_weight_var
        if self.bias_mean is not None and self.bias_logvar is not None:
            yield self.bias_mean, self.bias_logvar, self.prior_bias_mean, self.prior_bias_var

    def extra_repr(self) -> str:
        return f"weight={tuple(self.weight_mean.shape)}, bias={self.bias_mean is not None}"


class BayesLinear(BayesLayer):
    """A linear layer with Gaussian weights.

    Exact for inputs (N, D). Inputs (N, T, D) get a noise of their own at each position t, as positions in
    :class:`BayesConv2d` do.

    >>> BayesLinear(nn.Linear(3, 2))(torch.ones(5, 3)).shape
    torch.Size([5, 2])
    """

    def linear_map(self, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        return F.linear(x, W, b)


class _BayesConv(BayesLayer):
    """Geometry of a convolution, taken over from the plain layer."""

    conv: ClassVar[Any]

    def __init__(self, layer: nn.Conv1d | nn.Conv2d, **settings: Any) -> None:
        super().__init__(layer, **settings)
        self.geometry = {"stride": layer.stride, "dilation": layer.dilation, "groups": layer.groups}
        # Zeros are padded by the convolution itself, all else before it. Padding copies inputs, or adds zeros, so the
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
    """A one-dimensional convolution with Gaussian weights; its output positions are sampled independently."""

    conv = staticmethod(F.conv1d)


class BayesConv2d(_BayesConv):
    """A two-dimensional convolution with Gaussian weights; its output positions are sampled independently."""

    conv = staticmethod(F.conv2d)


def small_random(value: Tensor) -> Tensor:
    """The authors' start without a point estimate: N(0, 0.1²), redrawn beyond two standard deviations."""
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
    """A copy of the model whose linear and convolutional layers have Gaussian weights, with its own weights as means.

    The authors train the plain model on the first task and then convert it; ``from_point_estimate=False`` starts the
    means at small random values instead. Any other module with parameters is refused: it would change without a prior.

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
    # A module used in two places stays one module.
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
    """Refuse a model with parameters that would get no distribution, or two."""
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
    """The model's layers with Gaussian weights; an error if there are none."""
    layers = [layer for layer in model.modules() if isinstance(layer, BayesLayer)]
    if not layers:
        raise AlassoError("the model has no Bayesian layers; pass it through convert() first")
    return layers


class NamedPosterior(NamedTuple):
    """The Gaussians of one weight or bias: the names of its two parameters, and its prior."""

    mean: str
    logvar: str
    prior_mean: Tensor
    prior_var: Tensor


def named_posteriors(model: nn.Module) -> Iterator[NamedPosterior]:
    """Of all layers with Gaussian weights; the names are those of ``model.named_parameters()``."""
    for prefix, layer in model.named_modules():
        if isinstance(layer, BayesLayer):
            names = {parameter: f"{prefix}.{name}" if prefix else name for name, parameter in layer.named_parameters()}
            for mean, logvar, prior_mean, prior_var in layer.posteriors():
                yield NamedPosterior(names[mean], names[logvar], prior_mean, prior_var)


def kl(model: nn.Module) -> Tensor:
    """KL(q_t ‖ q_{t−1}), summed over all layers."""
    terms = [kl_gaussians(*posterior) for layer in bayes_layers(model) for posterior in layer.posteriors()]
    return torch.stack(terms).sum()


def negative_elbo(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Loss = F.cross_entropy,
    *,
    data_size: int,
    samples: int = 10,
) -> Tensor:
    """Loss of a batch: mean over the samples of ``loss(output, y)``, plus KL / N, where N is the task's ``data_size``.

    ``loss`` must average over examples, as −log p of each.
    """
    if data_size < 1:
        raise AlassoError(f"data_size is the number of the task's training examples, which cannot be {data_size}")
    return expected_loss(model, x, y, loss, samples=samples) + kl(model) / data_size


def expected_loss(
    model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, loss: Loss = F.cross_entropy, *, samples: int = 10
) -> Tensor:
    """The first term of :func:`negative_elbo`: what the batch itself costs."""
    check_samples(samples)
    # Every row has a noise of its own, so copies of the batch are the samples.
    return loss(model(repeated(x, samples)), repeated(y, samples))


@torch.no_grad()
def update_prior(model: nn.Module) -> None:
    """End of a task: the posterior becomes the prior of the next one."""
    for layer in bayes_layers(model):
        for mean, logvar, prior_mean, prior_var in layer.posteriors():
            prior_mean.copy_(mean)
            prior_var.copy_(logvar.exp())


@torch.no_grad()
def predict(
    model: nn.Module,
    x: Tensor,
    samples: int = 100,
    *,
    deterministic: bool = False,
    head: Head | None = None,
) -> Tensor:
    """Class probabilities (N, C): the softmax averaged over samples of the weights, or at their means.

    ``head`` post-processes the model's output, for example to keep only the task's own classes. The model answers in
    evaluation mode, and is left in the mode it was in.
    """
    check_samples(samples)

    def probabilities(rows: Tensor) -> Tensor:
        output = model(rows)
        return (output if head is None else head(output)).softmax(-1)

    with evaluating(model):
        if deterministic:
            with at_the_means(model):
                return probabilities(x)
        bayes_layers(model)  # 100 passes of a plain model would be 100 times the same
        at_once = max(1, ROWS_AT_ONCE // max(1, len(x)))
        counts = [min(at_once, samples - done) for done in range(0, samples, at_once)]
        sums = [sum_of_copies(probabilities(repeated(x, count)), count) for count in counts]
        return torch.stack(sums).sum(0) / samples


@contextmanager
def at_the_means(model: nn.Module) -> Iterator[None]:
    """Within, forward passes use the means of the weights and do not sample."""
    layers = bayes_layers(model)
    before = [layer.sampling for layer in layers]
    try:
        for layer in layers:
            layer.sampling = False
        yield
    finally:
        for layer, sampling in zip(layers, before, strict=True):
            layer.sampling = sampling


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within, all modules are in evaluation mode."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


def repeated(x: Tensor, count: int) -> Tensor:
    """x, count times below itself."""
    return x.repeat(count, *[1] * (x.dim() - 1))


def sum_of_copies(rows: Tensor, count: int) -> Tensor:
    """What :func:`repeated` laid below itself, added up."""
    return rows.reshape(count, len(rows) // count, *rows.shape[1:]).sum(0)


def check_samples(samples: int) -> None:
    """Refuse an expectation over no samples."""
    if samples < 1:
        raise AlassoError(f"samples must be at least 1, not {samples}")
