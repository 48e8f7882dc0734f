"""Importance of parameters from one pass over data, exact for every single sample.

Each measure is a mean over samples of a per-sample gradient whose entries are squared or made absolute:

    Fisher (EWC)    F_k = 1/N Σ_i (∂ log p(y_i | x_i) / ∂θ_k)²
    MAS             Ω_k = 1/N Σ_i |∂ ‖f(x_i)‖² / ∂θ_k|

so the gradient of a batch, which has already been summed over its samples, is of no use.  The gradient with
respect to a layer's *output*, however, keeps its samples apart, and for the common layers it is enough.  For
a linear layer with input x_i and output gradient g_i, sample i has the weight gradient g_i x_iᵀ, and

    Σ_i (g_i x_iᵀ)² = (G²)ᵀ X²        Σ_i |g_i x_iᵀ| = |G|ᵀ |X|        (elementwise powers)

which costs one matrix product and no per-sample gradient at all.  Layers that share their weight over
positions (convolutions, linear layers on sequences) need Σ_p g_ip x_ipᵀ first, formed layer by layer and a
few samples at a time.  All other parameters are differentiated sample by sample with `torch.func.vmap`.  What both
cannot follow (parameters in a plain list or in a reentrant checkpoint, say) shows in the first batch, and takes an
ordinary backward pass for each sample.

Samples must not influence one another in eval mode, which holds for batch norm with running statistics.

A batch is x, (x, y), or a mapping whose "labels" are y and whose other entries are the model's keywords, as Hugging
Face has it.  A model of several arguments takes x as a tuple of them, ((x1, x2), y), or as a mapping.  Each tensor
among them has a row for each sample; None, numbers and words are passed on as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from alasso._distributed import sharded_like, whole
from alasso.errors import AlassoError
from alasso.importance._objectives import Head, Loss, Objective, log_likelihood, objective_of
from alasso.importance._pass import ImportancePass

__all__ = ["fisher", "squared_output_norm"]


def fisher(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    labels: str = "true",
    parameters: Mapping[str, nn.Parameter] | None = None,
    head: Head | None = None,
    loss: Loss | None = None,
    generator: torch.Generator | None = None,
    chunk: int = 64,
) -> dict[str, Tensor]:
    """Return the diagonal of the Fisher information, F_k = mean_i (∂ log p(y_i | x_i) / ∂θ_k)².

    In a distributed run each rank passes its own part of the data, and all get the mean over all of it.  The pass
    gathers a model sharded by FSDP2 on every rank; the result is sharded again.

    >>> model = nn.Linear(1, 2, bias=False)
    >>> _ = nn.init.zeros_(model.weight)
    >>> fisher(model, [(torch.tensor([[2.0], [4.0]]), torch.tensor([0, 1]))])
    {'weight': tensor([[2.5000],
            [2.5000]])}

    Args:
        model: Maps x to logits (N, C), where -inf rules a class out (with "uniform", no other number does).  It runs
            in evaluation mode, and keeps the mode it was in.
        loader: Yields batches (x, y); unless labels are "true" or "reversed", x alone is enough.
        labels: Which y.  "true" takes those of the loader (the empirical Fisher), "sampled" draws one per sample from
            the model's softmax, and "expected" takes the exact expectation Σ_c p_c (∂ log p_c / ∂θ_k)² over all
            classes, at the price of one backward pass per class.  All three vanish where the model is certain and
            right.  "uniform" counts all C classes alike, 1/C Σ_c (∂ log p_c / ∂θ_k)², at the same price.  It does
            not vanish there, and strictly it is no Fisher information.  "reversed" takes the loader's labels and
            negated logits z, (∂ log softmax(−z)_y / ∂θ_k)²: the reversal of EWC-DR (Liu and Chang, CVPR 2026) in the
            definition above.  It does not vanish where the model is certain and right, and costs no more than "true".
        parameters: Chooses and names the parameters; None for all that require grad.
        head: Maps the model's output to logits; an output with an attribute or a key `logits` needs none. Of a model
            without forward(), such as a ModuleDict, it maps the inputs.
        loss: With labels "true", `loss(output, y)` of shape (N,) replaces -log p.
        generator: Draws the sampled labels.
        chunk: At most so many samples have their own gradients in memory at once.

    Returns:
        A tensor for each name of `parameters`, shaped like the parameter, in single precision at least.

    Raises:
        AlassoError: Loader, labels and outputs do not fit together, or there are no samples.
    """
    return mean_over(loader, model, log_likelihood(labels, loss, generator), parameters, head, chunk)


def squared_output_norm(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    parameters: Mapping[str, nn.Parameter] | None = None,
    head: Head | None = None,
    chunk: int = 64,
) -> dict[str, Tensor]:
    """Return Memory Aware Synapses, Ω_k = mean_i |∂ ‖f(x_i)‖² / ∂θ_k|, where f is `head` after the model.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.ones_(model.weight)
    >>> squared_output_norm(model, [torch.tensor([[1.0], [-3.0]])])
    {'weight': tensor([[10.]])}

    Args:
        model: Maps x to outputs (N, …).
        loader: Yields x or (x, y), whose y is not used.
        parameters: Chooses and names the parameters; None for all that require grad.
        head: Applied to the model's output; entries that it sets to -inf do not count.
        chunk: At most so many samples have their own gradients in memory at once.

    Returns:
        A tensor for each name of `parameters`, shaped like the parameter, in single precision at least.

    Raises:
        AlassoError: Loader and model do not fit together, or there are no samples.
    """
    return mean_over(loader, model, objective_of("mas"), parameters, head, chunk)


def mean_over(
    loader: Iterable[Any],
    model: nn.Module,
    objective: Objective,
    parameters: Mapping[str, nn.Parameter] | None,
    head: Head | None,
    chunk: int = 64,
    strength: float | None = None,
) -> dict[str, Tensor]:
    r"""Return the mean over samples of any objective; `fisher` tells the arguments.

    The steeper the terms t are by the outputs f, the larger is what was measured, and that differs a millionfold: a
    model that has learned its data by heart has next to no log-likelihood to lose. With a strength, Σ Ω d² is so many
    times an estimate of the outputs' squared change, whatever measured it. The Fisher is divided by

        s = 1/N Σ_i Σ_j ‖∂t_ij / ∂f_i‖²,

    and MAS, whose entries are no squares, is brought to the total that squares have: Ω_k · Σ_l Ω_l² / (s Σ_l Ω_l).
    """
    own = dict(model.named_parameters())
    if parameters is None:
        parameters = {name: p for name, p in own.items() if p.requires_grad}
    for name, parameter in parameters.items():
        if all(parameter is not p for p in own.values()):
            raise AlassoError(f"Parameter {name!r} is not one of the model's: pass only those that are.")
    with whole(model) as stand_in:
        wholes = {name: stand_in(parameter) for name, parameter in parameters.items()}
        one = ImportancePass(model, objective, wholes, head, chunk, strength is not None)
        means = one.mean_over(loader)
    with torch.inference_mode(False):
        if strength is not None:
            factor = strength / one.steepness
            if objective.magnitude is torch.abs:
                sums = [torch.stack([mean.square().sum(), mean.sum()]) for mean in means.values()]
                squares, total = torch.stack(sums).sum(0)
                factor *= squares / total.clamp(min=torch.finfo(total.dtype).tiny)
            means = {name: mean * factor for name, mean in means.items()}
        return {name: sharded_like(mean, parameters[name]) for name, mean in means.items()}
