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
answer with :func:`predict`. All memory is in parameters and buffers, so ``state_dict`` saves it. The layers are in
:mod:`alasso.vcl.layers`, coresets in :mod:`alasso.vcl.coresets`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from alasso.errors import AlassoError
from alasso.vcl.layers import BayesLayer, at_the_means, bayes_layers, convert, reparameterised

__all__ = [
    "convert",
    "evaluating",
    "expected_loss",
    "kl",
    "kl_gaussians",
    "kl_grad_by_logvar",
    "kl_stiffness",
    "negative_elbo",
    "predict",
    "update_prior",
]

#: Rows (samples times examples) that :func:`predict` sends through the model at once.
ROWS_AT_ONCE = 20_000

#: Layers that say the same to every copy of an example, in training and in evaluation mode.
ALWAYS_THE_SAME = (nn.Flatten, nn.Unflatten, nn.Identity, nn.ReLU, nn.Tanh, nn.Sigmoid)

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


# -- a model's life -----------------------------------------------------------------------------------------


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

    def probabilities(output: Tensor) -> Tensor:
        return (output if head is None else head(output)).softmax(-1)

    with evaluating(model):
        if deterministic:
            with at_the_means(model):
                return probabilities(model(x))
        bayes_layers(model)  # 100 passes of a plain model would be 100 times the same
        outputs = sampled_outputs(model, x, counts_at_once(samples, len(x), ROWS_AT_ONCE))
        return torch.stack([sum_of_copies(probabilities(output), count) for output, count in outputs]).sum(0) / samples


def counts_at_once(samples: int, examples: int, rows: int) -> list[int]:
    """How many samples to ask at once, one lot after another, so that there are not too many rows in any."""
    at_once = max(1, rows // max(1, examples))
    return [min(at_once, samples - done) for done in range(0, samples, at_once)]


def sampled_outputs(model: nn.Module, x: Tensor, counts: Iterable[int]) -> Iterator[tuple[Tensor, int]]:
    """For each count the model's outputs on so many copies of x, one below the other, each row with its own noise."""
    shared = SharedFirstLayer.of(model)
    if shared is None:
        for count in counts:
            yield model(repeated(x, count)), count
    else:
        mean, variance = shared.pre_activation(x)
        for count in counts:
            yield shared.outputs(mean, variance, count), count


class SharedFirstLayer(NamedTuple):
    """A plain sequence of layers, parted behind its first Gaussian layer's products: up to there, all samples have the
    same numbers.
    """

    before: nn.Sequential
    first: BayesLayer
    after: nn.Sequential

    @classmethod
    def of(cls, model: nn.Module) -> SharedFirstLayer | None:
        """None if it is no such sequence, or if what comes first may be random, or another than it looks."""
        layers = in_sequence(model)
        found = next(((i, layer) for i, layer in enumerate(layers) if isinstance(layer, BayesLayer)), None)
        if found is None:
            return None
        place, first = found
        before, after = layers[:place], layers[place + 1 :]
        usual = type(first).forward is BayesLayer.forward and first.sampling and is_as_written(first)
        if not usual or not all(type(layer) in ALWAYS_THE_SAME and is_as_written(layer) for layer in before):
            return None
        return cls(nn.Sequential(*before), first, nn.Sequential(*after))

    def pre_activation(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the first layer's."""
        return self.first.pre_activation(self.before(x))

    def outputs(self, mean: Tensor, variance: Tensor, count: int) -> Tensor:
        """Of so many samples, one below the other."""
        copies = (part.expand(count, *part.shape) for part in (mean, variance))
        found: Tensor = self.after(reparameterised(*copies).flatten(0, 1))
        return found


def in_sequence(model: nn.Module) -> list[nn.Module]:
    """The layers of a plain sequence, one after another; of any other model, itself alone."""
    if type(model) is not nn.Sequential or not is_as_written(model):
        return [model]
    return [layer for child in model for layer in in_sequence(child)]


def is_as_written(module: nn.Module) -> bool:
    """Whether calling it does what its class says: no hooks, and no other ``forward`` in its place."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, _global_forward_hooks, _global_forward_pre_hooks)
    return not any(hooks) and "forward" not in module.__dict__


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
