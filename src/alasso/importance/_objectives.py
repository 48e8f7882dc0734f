"""What an importance pass differentiates: log-likelihoods for the Fisher, the outputs' norm for MAS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from alasso.errors import AlassoError

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Objective:
    """What is differentiated: Σ_j magnitude(∂ terms(output, targets)_ij / ∂θ) is sample i's importance."""

    targets: Callable[[Tensor, Tensor | None], Tensor]
    terms: Callable[[Tensor, Tensor], Tensor]  # (N, …), targets -> (N, J)
    magnitude: Callable[[Tensor], Tensor]
    check: Callable[[], None] = lambda: None  # after the last batch


def given_targets(output: Tensor, y: Tensor | None) -> Tensor:
    if y is None:
        raise AlassoError('labels="true" needs batches (x, y): yield y too, or use "sampled", "expected" or "uniform".')
    return y


def check_logits(output: Tensor) -> None:
    if output.ndim != 2:
        shape = tuple(output.shape)
        raise AlassoError(f"The Fisher needs logits (N, C), not {shape}: pass a head, or a loss of your own.")
    if output.shape[1] == 1:
        raise AlassoError("One output has no softmax, its only class is certain: pass a loss of your own.")


class ClassTargets:
    """The given labels, which must be classes that the output knows; a GPU that is asked for others is of no use after.

    What was seen stays on the device, and is asked for once, at the end of a pass.
    """

    def __init__(self) -> None:
        self.classes = 0
        self.extremes: list[Tensor] = []  # least and largest label of each batch

    def __call__(self, output: Tensor, y: Tensor | None) -> Tensor:
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
        """After the last batch: what was measured is worth nothing if some label was none."""
        if not self.extremes:
            return
        least, _, _, most = torch.stack(torch.stack(self.extremes).aminmax(dim=0)).flatten().tolist()
        wrong = least if least < 0 else most
        if not 0 <= wrong < self.classes:
            raise AlassoError(f"Label {wrong} is none of the output's {self.classes} classes, 0 to {self.classes - 1}.")


def no_targets(output: Tensor, y: Tensor | None) -> Tensor:
    return output.new_zeros(len(output))


def sample_classes(output: Tensor, generator: torch.Generator | None) -> Tensor:
    probabilities = log_softmax(output.detach()).exp()
    device = probabilities.device if generator is None else generator.device
    return torch.multinomial(probabilities.to(device), 1, generator=generator)[:, 0].to(output.device)


def log_softmax(output: Tensor) -> Tensor:
    check_logits(output)
    return F.log_softmax(at_least_single(output), dim=1)


def log_probability(output: Tensor, y: Tensor) -> Tensor:
    return log_softmax(output).gather(1, y.long()[:, None])


def weighted_log_probabilities(output: Tensor, _: Tensor) -> Tensor:
    """√p_c log p_c with p_c held constant, so that the squared gradient is p_c (∂ log p_c)²."""
    log_p = log_softmax(output)
    p = log_p.detach().exp()
    return log_p.masked_fill(p == 0, 0) * p.sqrt()  # 0 · log 0 would be NaN


def uniform_log_probabilities(output: Tensor, _: Tensor) -> Tensor:
    """√u log p_c with u = 1 / C, where C counts the classes that are not ruled out."""
    log_p = log_softmax(output)
    ruled_out = log_p == -torch.inf
    classes = (~ruled_out).sum(1, keepdim=True).to(log_p.dtype)
    return log_p.masked_fill(ruled_out, 0) * classes.rsqrt()


def one_column(loss: Loss) -> Callable[[Tensor, Tensor], Tensor]:
    def terms(output: Tensor, y: Tensor) -> Tensor:
        values = loss(output, y)
        if values.shape != output.shape[:1]:
            raise AlassoError('The loss must return one value per sample, shape (N,): use reduction="none".')
        return values[:, None]

    return terms


def squared_norm(output: Tensor, _: Tensor) -> Tensor:
    flat = at_least_single(output).reshape(len(output), -1)
    return flat.masked_fill(flat == -torch.inf, 0).square().sum(1, keepdim=True)


def at_least_single(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
