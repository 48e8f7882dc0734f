"""The variational objective, what ends a task, and predictions: the functions that :mod:`alasso.vcl` offers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from alasso.errors import AlassoError
from alasso.vcl.layers import BayesLayer, at_the_means, bayes_layers, reparameterised

#: Rows (samples times examples) that :func:`predict` sends through the model at once.
ROWS_AT_ONCE = 20_000

#: Layers with the same output for every copy of an example, in training and in evaluation mode.
_ALWAYS_THE_SAME = (nn.Flatten, nn.Unflatten, nn.Identity, nn.ReLU, nn.Tanh, nn.Sigmoid)

Head = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


# -- the equations -------------------------------------------------------------------------------------------


def kl_gaussians(mean: Tensor, logvar: Tensor, prior_mean: Tensor, prior_var: Tensor) -> Tensor:
    r"""Return KL between two diagonal Gaussians.

    .. math:: \tfrac12 \sum_d \frac{\sigma_d^2}{\sigma_{0,d}^2} - 1 - \log \frac{\sigma_d^2}{\sigma_{0,d}^2}
        + \frac{(\mu_d - \mu_{0,d})^2}{\sigma_{0,d}^2}

    Args:
        mean: μ, of any shape.
        logvar: log σ², of the same shape.
        prior_mean: μ₀, of the same shape.
        prior_var: σ₀², of the same shape.

    Returns:
        The sum over all entries, a scalar.
    """
    log_ratio = logvar - prior_var.log()
    # expm1 keeps the sum of the first three terms from cancelling, and from turning negative, near the prior.
    return 0.5 * (log_ratio.expm1() - log_ratio + (mean - prior_mean).square() / prior_var).sum()


# -- training ------------------------------------------------------------------------------------------------


def kl(model: nn.Module) -> Tensor:
    """Return KL(q_t ‖ q_{t−1}), summed over all layers.

    Args:
        model: A model that :func:`~alasso.vcl.layers.convert` returned.

    Returns:
        A differentiable scalar.

    Raises:
        AlassoError: The model has no layers with Gaussian weights.
    """
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
    """Return the loss of a batch: the mean over samples of ``loss(output, y)``, plus KL / N.

    Args:
        model: A model that :func:`~alasso.vcl.layers.convert` returned.
        x: Inputs, (B, …).
        y: Targets, (B, …).
        loss: Averages −log p over the examples.
        data_size: N, the number of the task's training examples.
        samples: Number of samples of the weights.

    Returns:
        A differentiable scalar.

    Raises:
        AlassoError: ``data_size`` or ``samples`` is below one, or the model has no layers with Gaussian weights.
    """
    if data_size < 1:
        raise AlassoError(f"data_size is the number of the task's training examples, which cannot be {data_size}")
    return expected_loss(model, x, y, loss, samples=samples) + kl(model) / data_size


def expected_loss(
    model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, loss: Loss = F.cross_entropy, *, samples: int = 10
) -> Tensor:
    """Return the first term of :func:`negative_elbo`, the loss of the batch itself.

    Args:
        model: Maps inputs to outputs, with independent noise for each row.
        x: Inputs, (B, …).
        y: Targets, (B, …).
        loss: Averages −log p over the examples.
        samples: Number of samples of the weights.

    Returns:
        A differentiable scalar.

    Raises:
        AlassoError: ``samples`` is below one.
    """
    _check_samples(samples)
    # Each row has independent noise, so copies of the batch are the samples.
    return loss(model(_repeated(x, samples)), _repeated(y, samples))


@torch.no_grad()
def update_prior(model: nn.Module) -> None:
    """End a task: the posterior becomes the prior of the next one.

    Args:
        model: A model that :func:`~alasso.vcl.layers.convert` returned.

    Raises:
        AlassoError: The model has no layers with Gaussian weights.
    """
    for layer in bayes_layers(model):
        for mean, logvar, prior_mean, prior_var in layer.posteriors():
            prior_mean.copy_(mean)
            prior_var.copy_(logvar.exp())


# -- predicting ----------------------------------------------------------------------------------------------


@torch.no_grad()
def predict(
    model: nn.Module,
    x: Tensor,
    samples: int = 100,
    *,
    deterministic: bool = False,
    head: Head | None = None,
) -> Tensor:
    """Return class probabilities: the softmax averaged over samples of the weights, or at their means.

    The model runs in evaluation mode and keeps the mode it was in.

    Args:
        model: A model that :func:`~alasso.vcl.layers.convert` returned.
        x: Inputs, (N, …).
        samples: Number of samples of the weights.
        deterministic: Whether to use the means of the weights instead.
        head: Maps the model's output to logits (N, C), for example to keep only the task's own classes.

    Returns:
        Probabilities, (N, C).

    Raises:
        AlassoError: ``samples`` is below one, or the model has no layers with Gaussian weights.
    """
    _check_samples(samples)

    def probabilities(output: Tensor) -> Tensor:
        return (output if head is None else head(output)).softmax(-1)

    with evaluating(model):
        if deterministic:
            with at_the_means(model):
                return probabilities(model(x))
        bayes_layers(model)  # refuses a plain model, whose samples would all be the same
        outputs = sampled_outputs(model, x, _counts_at_once(samples, len(x), ROWS_AT_ONCE))
        return torch.stack([_sum_of_copies(probabilities(output), count) for output, count in outputs]).sum(0) / samples


def _counts_at_once(samples: int, examples: int, rows: int) -> list[int]:
    """Return the number of samples in each pass, so that none exceeds ``rows`` rows (if one sample fits)."""
    at_once = max(1, rows // max(1, examples))
    return [min(at_once, samples - done) for done in range(0, samples, at_once)]


def sampled_outputs(model: nn.Module, x: Tensor, counts: Iterable[int]) -> Iterator[tuple[Tensor, int]]:
    """Yield the model's outputs on several samples at a time.

    Args:
        model: A model that :func:`~alasso.vcl.layers.convert` returned.
        x: Inputs, (N, …).
        counts: Numbers of samples.

    Yields:
        For each count, the outputs (count · N, …) on ``count`` copies of x, with independent noise for each row, and
        the count.
    """
    shared = SharedFirstLayer.of(model)
    if shared is None:
        for count in counts:
            yield model(_repeated(x, count)), count
    else:
        mean, variance = shared.pre_activation(x)
        for count in counts:
            yield shared.outputs(mean, variance, count), count


class SharedFirstLayer(NamedTuple):
    """A plain sequence of layers, split at its first Gaussian layer: until it draws noise, all samples are equal.

    Attributes:
        before: The layers before the first Gaussian one.
        first: The first Gaussian layer.
        after: The layers after it.
    """

    before: nn.Sequential
    first: BayesLayer
    after: nn.Sequential

    @classmethod
    def of(cls, model: nn.Module) -> SharedFirstLayer | None:
        """Return a model's split, where that is safe.

        Args:
            model: A model that :func:`~alasso.vcl.layers.convert` returned.

        Returns:
            None if the model is no plain sequence, or a layer up to the first Gaussian one may be random or modified.
        """
        layers = _in_sequence(model)
        found = next(((i, layer) for i, layer in enumerate(layers) if isinstance(layer, BayesLayer)), None)
        if found is None:
            return None
        place, first = found
        before, after = layers[:place], layers[place + 1 :]
        usual = type(first).forward is BayesLayer.forward and first.sampling and _is_as_written(first)
        if not usual or not all(type(layer) in _ALWAYS_THE_SAME and _is_as_written(layer) for layer in before):
            return None
        return cls(nn.Sequential(*before), first, nn.Sequential(*after))

    def pre_activation(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and variance of the first Gaussian layer's output.

        Args:
            x: Inputs, (N, …).

        Returns:
            (E[h], Var[h]), each (N, …).
        """
        return self.first.pre_activation(self.before(x))

    def outputs(self, mean: Tensor, variance: Tensor, count: int) -> Tensor:
        """Return the model's outputs on several samples.

        Args:
            mean: E[h], (N, …).
            variance: Var[h], (N, …).
            count: Number of samples.

        Returns:
            The samples' outputs one below the other, (count · N, …).
        """
        copies = (part.expand(count, *part.shape) for part in (mean, variance))
        found: Tensor = self.after(reparameterised(*copies).flatten(0, 1))
        return found


def _in_sequence(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a plain sequence in order; of any other model, the model alone."""
    if type(model) is not nn.Sequential or not _is_as_written(model):
        return [model]
    return [layer for child in model for layer in _in_sequence(child)]


def _is_as_written(module: nn.Module) -> bool:
    """Return whether a call runs the class's own forward alone: no hooks, no replaced ``forward``."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, _global_forward_hooks, _global_forward_pre_hooks)
    return not any(hooks) and "forward" not in module.__dict__


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Keep all modules in evaluation mode while the context lasts.

    Args:
        model: Any model.
    """
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


def _repeated(x: Tensor, count: int) -> Tensor:
    """Return ``count`` copies of x (N, …), one below the other: (count · N, …)."""
    return x.repeat(count, *[1] * (x.dim() - 1))


def _sum_of_copies(rows: Tensor, count: int) -> Tensor:
    """Return the sum (N, …) over the copies that :func:`_repeated` made."""
    return rows.reshape(count, len(rows) // count, *rows.shape[1:]).sum(0)


def _check_samples(samples: int) -> None:
    """Refuse an expectation over no samples."""
    if samples < 1:
        raise AlassoError(f"samples must be at least 1, not {samples}")
