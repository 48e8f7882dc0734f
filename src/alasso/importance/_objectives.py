"""What an importance pass differentiates: log-likelihoods for the Fisher, the outputs' norm for MAS.

An objective turns a batch's outputs into terms t_ij, J for each sample i, and a magnitude m, square or absolute value;
the importance of parameter k is the mean over samples of Σ_j m(∂t_ij / ∂θ_k):

    labels      targets y_i        terms t_ij               m
    true        the loader's       log p(y_i | x_i)         square
    sampled     drawn from p       log p(y_i | x_i)         square
    expected    –                  √p_c log p(c | x_i)      square
    uniform     –                  √(1/C) log p(c | x_i)    square
    reversed    the loader's       log p⁻(y_i | x_i)        square      with p⁻ = softmax(−z) of the logits z
    – (MAS)     –                  ‖f(x_i)‖²                absolute value
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from alasso.errors import AlassoError

Head = Callable[..., Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]

_LABELS = ("true", "sampled", "expected", "uniform", "reversed")


def no_targets(output: Tensor, y: Tensor | None) -> Tensor:
    """Return a number for each sample, which no term reads."""
    return output.new_zeros(len(output))


@dataclass(frozen=True)
class Objective:
    """What is differentiated: Σ_j magnitude(∂ terms(output, targets)_ij / ∂θ) is sample i's importance.

    Attributes:
        terms: From outputs (N, …) and targets (N, …) to terms (N, J).
        magnitude: Elementwise, of a gradient.
        targets: From outputs and the loader's labels, if any, to targets (N, …).
        check: Raises AlassoError after the last batch if the measurement is worthless.
    """

    terms: Callable[[Tensor, Tensor], Tensor]
    magnitude: Callable[[Tensor], Tensor] = torch.square
    targets: Callable[[Tensor, Tensor | None], Tensor] = no_targets
    check: Callable[[], None] = lambda: None


def objective_of(measure: str, labels: str = "true", loss: Loss | None = None) -> Objective:
    """Return the objective of "fisher" or "mas".

    Raises:
        AlassoError: Labels and loss do not go together.
    """
    return Objective(squared_norm, torch.abs) if measure == "mas" else log_likelihood(labels, loss, None)


def log_likelihood(labels: str, loss: Loss | None, generator: torch.Generator | None) -> Objective:
    """Return the objective of the Fisher information; see :func:`alasso.importance.fisher` for the arguments.

    Raises:
        AlassoError: There is no such kind of labels, or it does not go with a loss.
    """
    if labels not in _LABELS:
        raise AlassoError(f"labels must be one of {', '.join(map(repr, _LABELS))}, not {labels!r}.")
    if loss is not None and labels != "true":
        raise AlassoError(f'A loss needs the labels of the loader: use labels="true", not {labels!r}.')
    if labels == "expected":
        return Objective(weighted_log_probabilities)
    if labels == "uniform":
        return Objective(uniform_log_probabilities)
    if labels == "sampled":
        return Objective(log_probability, targets=lambda output, _: sample_classes(output, generator))
    if loss is not None:
        return Objective(one_column(loss), targets=given_targets)
    targets = ClassTargets()
    terms = reversed_log_probability if labels == "reversed" else log_probability
    return Objective(terms, targets=targets, check=targets.check)


# -- targets -------------------------------------------------------------------------------------------------


def given_targets(output: Tensor, y: Tensor | None) -> Tensor:
    """Return the loader's labels.

    Raises:
        AlassoError: The loader has none.
    """
    if y is None:
        raise AlassoError('These labels are in batches (x, y): yield y too, or use "sampled", "expected" or "uniform".')
    return y


class ClassTargets:
    """The loader's labels, which must be classes that the output knows: on a GPU, others abort the process.

    The labels' extremes stay on the device until :meth:`check` reads them once, at the end of a pass.
    """

    def __init__(self) -> None:
        self.classes = 0
        self.extremes: list[Tensor] = []  # least and largest label of each batch

    def __call__(self, output: Tensor, y: Tensor | None) -> Tensor:
        """Return class indices (N,), all within range.

        Raises:
            AlassoError: The labels are no class indices, or the output has no classes.
        """
        y = given_targets(output, y)
        check_logits(output)
        if y.shape != output.shape[:1]:
            what_to_do = "give y.squeeze(1)" if y.dim() == 2 and y.shape[1] == 1 else "pass a loss"
            raise AlassoError(f"Labels must be class indices of shape (N,), not {tuple(y.shape)}: {what_to_do}.")
        if y.is_floating_point() or y.is_complex():
            raise AlassoError(f"Labels must be class indices, not {str(y.dtype)[6:]}: for other targets pass a loss.")
        self.classes, y = output.shape[1], y.long()
        self.extremes.append(torch.stack(torch.aminmax(y)))
        return y.clamp(0, self.classes - 1)

    def check(self) -> None:
        """Raise AlassoError if a label of any batch was none of the output's classes."""
        if not self.extremes:
            return
        least, _, _, most = torch.stack(torch.stack(self.extremes).aminmax(dim=0)).flatten().tolist()
        wrong = least if least < 0 else most
        if not 0 <= wrong < self.classes:
            raise AlassoError(f"Label {wrong} is none of the output's {self.classes} classes, 0 to {self.classes - 1}.")


def sample_classes(output: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw a class for each sample from the softmax of the logits (N, C)."""
    probabilities = log_softmax(output.detach()).exp()
    device = probabilities.device if generator is None else generator.device
    return torch.multinomial(probabilities.to(device), 1, generator=generator)[:, 0].to(output.device)


# -- terms ---------------------------------------------------------------------------------------------------


def log_probability(output: Tensor, y: Tensor) -> Tensor:
    """Return log p(y_i | x_i), (N, 1)."""
    return log_softmax(output).gather(1, y.long()[:, None])


def reversed_log_probability(output: Tensor, y: Tensor) -> Tensor:
    """Return log softmax(−z_i) at y_i, (N, 1); a class that z = −inf rules out stays ruled out."""
    return log_probability(output.masked_fill(output == -torch.inf, torch.inf).neg(), y)


def weighted_log_probabilities(output: Tensor, _: Tensor) -> Tensor:
    """Return √p_c log p_c, (N, C), with p_c held constant, so that the squared gradient is p_c (∂ log p_c)²."""
    log_p = log_softmax(output)
    p = log_p.detach().exp()
    return log_p.masked_fill(p == 0, 0) * p.sqrt()  # 0 · log 0 would be NaN


def uniform_log_probabilities(output: Tensor, _: Tensor) -> Tensor:
    """Return √u log p_c, (N, C), with u = 1 / C, where C counts the classes that are not ruled out."""
    log_p = log_softmax(output)
    ruled_out = log_p == -torch.inf
    classes = (~ruled_out).sum(1, keepdim=True).to(log_p.dtype)
    return log_p.masked_fill(ruled_out, 0) * classes.rsqrt()


def one_column(loss: Loss) -> Callable[[Tensor, Tensor], Tensor]:
    """Turn a loss of shape (N,) into terms (N, 1), and raise AlassoError if it has another shape."""

    def terms(output: Tensor, y: Tensor) -> Tensor:
        values = loss(output, y)
        if values.shape != output.shape[:1]:
            raise AlassoError('The loss must return one value per sample, shape (N,): use reduction="none".')
        return values[:, None]

    return terms


def squared_norm(output: Tensor, _: Tensor) -> Tensor:
    """Return ‖f(x_i)‖², (N, 1), without the entries that are -inf."""
    flat = at_least_single(output).reshape(len(output), -1)
    return flat.masked_fill(flat == -torch.inf, 0).square().sum(1, keepdim=True)


def log_softmax(output: Tensor) -> Tensor:
    """Return log p, (N, C), in single precision at least."""
    check_logits(output)
    return F.log_softmax(at_least_single(output), dim=1)


def check_logits(output: Tensor) -> None:
    """Raise AlassoError if outputs are no logits (N, C) of two classes or more."""
    if output.ndim != 2:
        shape = tuple(output.shape)
        raise AlassoError(f"The Fisher needs logits (N, C), not {shape}: pass a head, or a custom loss.")
    if output.shape[1] == 1:
        raise AlassoError("One output has no softmax, its only class is certain: pass a custom loss.")


def at_least_single(values: Tensor) -> Tensor:
    """Return half precision as single, and all else as it is."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
