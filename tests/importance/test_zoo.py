"""Importance of many architectures, against one ordinary backward pass for each sample, in double precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alasso import EWC, IMM, MAS
from alasso.importance._objectives import Objective, log_likelihood, squared_norm
from alasso.importance._pass import ImportancePass
from zoo import CLASSES, HIDDEN, MODELS

SAMPLES = 5
MEASURES: dict[str, tuple[Objective, Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "true": (log_likelihood("true", None, None), lambda z, y: F.log_softmax(z, 1)[0, y], torch.square),
    "mas": (Objective(squared_norm, torch.abs), lambda z, _: z.square().sum(), torch.abs),
}


def set_up(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    make, shape = {**MODELS, **HIDDEN}[name]
    torch.manual_seed(1)
    model = make().double()
    x = torch.randint(11, (SAMPLES, 4)) if shape is None else torch.randn(SAMPLES, *shape, dtype=torch.float64)
    return model, x, torch.randint(CLASSES, (SAMPLES,))


def reference(model: nn.Module, x: Tensor, y: Tensor, measure: str) -> dict[str, Tensor]:
    _, scalar, magnitude = MEASURES[measure]
    model.eval()
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    for i in range(len(x)):
        model.zero_grad()
        scalar(model(x[i : i + 1]), y[i]).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                total[name] += magnitude(p.grad.to_dense()) / len(x)
    model.zero_grad()
    return total


def measured(model: nn.Module, x: Tensor, y: Tensor, measure: str) -> tuple[dict[str, Tensor], set[nn.Parameter]]:
    """The importance, and the parameters of which the first batch has shown that the fast routes are wrong."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    one_pass = ImportancePass(model, MEASURES[measure][0], trained, None, 64)
    means = one_pass.mean_over([(x[:4], y[:4]), (x[4:], y[4:])])
    assert one_pass.missed is not None
    return means, one_pass.missed


def check(name: str, measure: str) -> set[nn.Parameter]:
    model, x, y = set_up(name)
    found, missed = measured(model, x, y, measure)
    expected = reference(model, x, y, measure)
    assert any(value.any() for value in expected.values())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-14, msg=lambda m, n=name: f"{n}: {m}")
    return missed


def test_the_zoo_is_large() -> None:
    assert len(MODELS) >= 70


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("name", MODELS)
def test_importance_is_exact_and_the_fast_routes_are_trusted(name: str, measure: str) -> None:
    assert not check(name, measure), "a false alarm: what the fast routes say is right"


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("name", HIDDEN)
def test_what_the_fast_routes_cannot_follow_is_exact_nevertheless(name: str, measure: str) -> None:
    assert check(name, measure)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["relu", "conv, batch norm", "encoder", "words, encoder", "vision transformer"])
def test_rounding_is_no_alarm(name: str, dtype: torch.dtype) -> None:
    model, x, y = set_up(name)
    x = x.to(dtype) if x.is_floating_point() else x
    for measure in MEASURES:
        assert not measured(model.to(dtype), x, y, measure)[1]


def test_what_the_first_samples_do_not_reach_is_found_by_the_rest_of_the_batch() -> None:
    class Rare(nn.Module):
        """A weight out of reach of the fast routes, which only samples with a positive sum use."""

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.head = nn.Parameter(torch.ones(5, dtype=torch.float64)), nn.Linear(5, 3).double()
            self.kept = [self.weight]

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.where(x.sum(1, keepdim=True) > 0, x * self.kept[0], x))

    torch.manual_seed(0)
    model, x, y = Rare(), -torch.rand(4, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    x[3] = 1.0
    found, missed = measured(model, x, y, "true")
    assert missed == {model.weight}
    torch.testing.assert_close(found["weight"], reference(model, x, y, "true")["weight"])


@pytest.mark.parametrize("make", [EWC, MAS, lambda model: IMM(model, "mode")], ids=["EWC", "MAS", "IMM"])
@pytest.mark.parametrize("name", HIDDEN)
def test_methods_protect_what_is_hidden(name: str, make: Callable[[nn.Module], EWC]) -> None:
    model, x, y = set_up(name)
    reg = make(model)
    reg.consolidate([(x, y)])
    assert all(omega.any() for omega in reg.importance().values())
