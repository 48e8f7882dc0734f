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
few samples at a time.  All other parameters are differentiated sample by sample with `torch.func.vmap`.

Samples must not influence one another in eval mode, which holds for batch norm with running statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from alasso._distributed import sharded_like, whole
from alasso.errors import AlassoError
from alasso.importance._objectives import (
    ClassTargets,
    Loss,
    Objective,
    given_targets,
    log_probability,
    no_targets,
    one_column,
    sample_classes,
    squared_norm,
    uniform_log_probabilities,
    weighted_log_probabilities,
)
from alasso.importance._pass import Head, ImportancePass

__all__ = ["fisher", "squared_output_norm"]

_LABELS = ("true", "sampled", "expected", "uniform")


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
    """Diagonal of the Fisher information, F_k = mean_i (∂ log p(y_i | x_i) / ∂θ_k)².

    `labels` says which y: "true" takes those of the loader (the empirical Fisher), "sampled" draws one per
    sample from the model's softmax with `generator`, and "expected" takes the exact expectation
    Σ_c p_c (∂ log p_c / ∂θ_k)² over all classes, at the price of one backward pass per class.  All three
    vanish where the model has become certain, and is right.  "uniform" counts all C classes alike,
    1/C Σ_c (∂ log p_c / ∂θ_k)², at the same price, and does not: strictly, that is no Fisher information.

    The loader yields batches (x, y); unless labels are "true", x alone will do.  A mapping is called as
    model(**batch), less its "labels", which are y.  `head` maps the model's output to logits (N, C), where
    -inf rules a class out (with "uniform", no other number does); an output with an attribute `logits`
    needs none.  With labels "true", `loss(output, y)` of shape (N,) may replace -log p.  `parameters`
    chooses and names the parameters (default: all that require grad).
    At most `chunk` samples have their own gradients in memory at a time.

    In a distributed run each rank passes its own part of the data, and all get the mean over all of it.  A
    model sharded by FSDP2 is made whole on every rank for the time of the pass; the result is sharded again.

    >>> model = nn.Linear(1, 2, bias=False)
    >>> _ = nn.init.zeros_(model.weight)
    >>> fisher(model, [(torch.tensor([[2.0], [4.0]]), torch.tensor([0, 1]))])
    {'weight': tensor([[2.5000],
            [2.5000]])}
    """
    if labels not in _LABELS:
        raise AlassoError(f"labels must be one of {', '.join(map(repr, _LABELS))}, not {labels!r}.")
    if loss is not None and labels != "true":
        raise AlassoError(f'A loss needs the labels of the loader: use labels="true", not {labels!r}.')

    def sampled(output: Tensor, y: Tensor | None) -> Tensor:
        return sample_classes(output, generator)

    if labels == "expected":
        objective = Objective(no_targets, weighted_log_probabilities, torch.square)
    elif labels == "uniform":
        objective = Objective(no_targets, uniform_log_probabilities, torch.square)
    elif labels == "sampled":
        objective = Objective(sampled, log_probability, torch.square)
    elif loss is None:
        targets = ClassTargets()
        objective = Objective(targets, log_probability, torch.square, targets.check)
    else:
        objective = Objective(given_targets, one_column(loss), torch.square)
    return _mean_over(loader, model, objective, parameters, head, chunk)


def squared_output_norm(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    parameters: Mapping[str, nn.Parameter] | None = None,
    head: Head | None = None,
    chunk: int = 64,
) -> dict[str, Tensor]:
    """Memory Aware Synapses, Ω_k = mean_i |∂ ‖f(x_i)‖² / ∂θ_k|, where f is `head` after the model.

    The loader yields x or (x, y), whose y is not used; entries that `head` sets to -inf do not count.  See
    `fisher` for the other arguments.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.ones_(model.weight)
    >>> squared_output_norm(model, [torch.tensor([[1.0], [-3.0]])])
    {'weight': tensor([[10.]])}
    """
    objective = Objective(no_targets, squared_norm, torch.abs)
    return _mean_over(loader, model, objective, parameters, head, chunk)


def _mean_over(
    loader: Iterable[Any],
    model: nn.Module,
    objective: Objective,
    parameters: Mapping[str, nn.Parameter] | None,
    head: Head | None,
    chunk: int,
) -> dict[str, Tensor]:
    own = dict(model.named_parameters())
    if parameters is None:
        parameters = {name: p for name, p in own.items() if p.requires_grad}
    for name, parameter in parameters.items():
        if all(parameter is not p for p in own.values()):
            raise AlassoError(f"Parameter {name!r} is not one of the model's: pass only those that are.")
    with whole(model) as stand_in:
        wholes = {name: stand_in(parameter) for name, parameter in parameters.items()}
        means = ImportancePass(model, objective, wholes, head, chunk).mean_over(loader)
    with torch.inference_mode(False):
        return {name: sharded_like(mean, parameters[name]) for name, mean in means.items()}
