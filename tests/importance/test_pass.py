"""Every route through `alasso.importance`, against a loop over single samples that is too plain to be wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from alasso import EWC, IMM, MAS, SI, KronALASSO, OnlineEWC, Regularizer
from alasso.errors import AlassoError
from alasso.importance import _pass as importance_pass
from alasso.importance import fisher, squared_output_norm

Head = Callable[[Tensor], Tensor]
DOUBLE = torch.float64


def _identity(output: Tensor) -> Tensor:
    return output


def _gradients(value: Tensor, model: nn.Module) -> dict[str, Tensor]:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(value, list(named.values()), retain_graph=True, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}


def reference_fisher(model: nn.Module, x: Tensor, y: Tensor, labels: str, head: Head = _identity) -> dict[str, Tensor]:
    was_training = model.training
    model.eval()
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    for i in range(len(x)):
        z = head(model(x[i : i + 1]))
        if labels == "reversed":  # of the classes that are not ruled out
            z = torch.where(z > -torch.inf, -z, -torch.inf)
        log_p = F.log_softmax(z, dim=1)[0]
        possible = [c for c in range(len(log_p)) if log_p[c] > -torch.inf]
        for c in possible:
            is_true = float(c == y[i])
            weight = {"expected": float(log_p[c].exp()), "uniform": 1 / len(possible)}.get(labels, is_true)
            if weight > 0:
                for name, gradient in _gradients(log_p[c], model).items():
                    total[name] += weight * gradient**2
    model.train(was_training)
    return {name: value / len(x) for name, value in total.items()}


def reference_mas(model: nn.Module, x: Tensor, head: Head = _identity) -> dict[str, Tensor]:
    was_training = model.training
    model.eval()
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    for i in range(len(x)):
        output = head(model(x[i : i + 1]))
        for name, gradient in _gradients(output[output > -torch.inf].square().sum(), model).items():
            total[name] += gradient.abs()
    model.train(was_training)
    return {name: value / len(x) for name, value in total.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            found[name], expected[name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


def batches(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


class Sequence(nn.Module):
    """Embedding, norm and linear layers over positions, a raw parameter, and a head on the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.mix = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((torch.tanh(self.mix(self.norm(self.embedding(x)))) * self.scale).mean(1))


class PositionFirst(nn.Module):
    """Puts positions before samples, so that with as many positions as samples the shapes are of no help."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(x.transpose(0, 1))).mean(0))


class FlatPositions(PositionFirst):
    """Gives the linear layer one row per position instead of one per sample."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(x.flatten(0, 1))).unflatten(0, x.shape[:2]).mean(1))


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.twice, self.head = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.twice(torch.tanh(self.twice(x)))))


class SharedParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class TiedByHand(nn.Module):
    """The decoder reuses the encoder's weight, of which no module call tells."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(5, 4), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(torch.tanh(self.encoder(input=x)) @ self.encoder.weight))


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.ignored = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(5, 3)
        self.loose = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.ignored(x)
        return self.used(x)


class Branching(nn.Module):
    """Control flow on data, which vmap cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(5)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = [row * self.scale if row.sum().item() > 0 else row - self.scale for row in x]
        return self.head(torch.stack(rows).sin())


class OwnForward(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input).sin()


def conv_net() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout(0.5),
        nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1), groups=2),
        nn.GroupNorm(3, 6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 6, (3, 2), padding="same", dilation=(1, 2), groups=6),
        nn.Conv2d(6, 3, (2, 3), padding="same", padding_mode="circular"),
        nn.Conv2d(3, 3, 2, padding="valid"),
        nn.Flatten(),
        nn.LazyLinear(3),
    )
    with torch.no_grad():
        for _ in range(3):
            net(torch.randn(8, 2, 8, 8))
    return net


def parametrized() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3))


def pruned() -> nn.Module:
    """Weights that are made from others, under other names, before every call."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    prune.random_unstructured(model[0], "weight", 0.4)
    prune.random_unstructured(model[2], "bias", 0.4)
    return model


def overridden() -> nn.Module:
    return nn.Sequential(OwnForward(5, 4), nn.Linear(4, 3))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


def conv1d_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv1d(4, 3, 2, dilation=2),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


def conv3d_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 4, (1, 2, 3), padding=(0, 1, 0), groups=1), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3)
    )


def recurrent_net() -> nn.Module:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    return Last()


def attention_net() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True)
    return nn.Sequential(nn.Linear(2, 4), layer, nn.Flatten(), nn.Linear(28, 3))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...] | None]] = {
    "mlp": (mlp, (5,)),
    "conv": (conv_net, (2, 8, 8)),
    "conv1d": (conv1d_net, (2, 8)),
    "conv3d": (conv3d_net, (1, 3, 3, 5)),
    "sequence": (Sequence, None),
    "position-first": (PositionFirst, (7, 2)),
    "flat-positions": (FlatPositions, (7, 2)),
    "recurrent": (recurrent_net, (7, 2)),
    "attention": (attention_net, (7, 2)),
    "called-twice": (CalledTwice, (5,)),
    "shared-parameter": (SharedParameter, (5,)),
    "tied-by-hand": (TiedByHand, (5,)),
    "unused": (WithUnused, (5,)),
    "branching": (Branching, (5,)),
    "own-forward": (overridden, (5,)),
    "parametrized": (parametrized, (5,)),
    "pruned": (pruned, (5,)),
}


def setting(name: str, samples: int = 7) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    make, shape = NETS[name]
    model = make().to(DOUBLE)
    x = torch.randint(11, (samples, 4)) if shape is None else torch.randn(samples, *shape, dtype=DOUBLE)
    return model, x, torch.randint(3, (samples,))


@pytest.mark.parametrize("labels", ["true", "expected", "uniform", "reversed"])
@pytest.mark.parametrize("name", NETS)
def test_fisher_is_exact(name: str, labels: str) -> None:
    model, x, y = setting(name)
    found = fisher(model, [(x, y)], labels=labels, chunk=3)
    assert_same(found, reference_fisher(model, x, y, labels))


@pytest.mark.parametrize("name", NETS)
def test_squared_output_norm_is_exact(name: str) -> None:
    model, x, _ = setting(name)
    assert_same(squared_output_norm(model, [x], chunk=3), reference_mas(model, x))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("name", ["mlp", "conv1d", "sequence", "position-first"])
def test_batches_do_not_matter(name: str, size: int) -> None:
    model, x, y = setting(name)
    assert_same(fisher(model, batches(x, y, size)), reference_fisher(model, x, y, "true"))
    assert_same(squared_output_norm(model, batches(x, y, size)), reference_mas(model, x))


@pytest.mark.parametrize("name", ["mlp", "conv", "conv1d", "conv3d"])
def test_common_layers_need_no_gradients_of_single_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("went sample by sample")

    monkeypatch.setattr(importance_pass.ImportancePass, "_add_sample_by_sample", refuse)
    model, x, y = setting(name)
    assert_same(fisher(model, [(x, y)]), reference_fisher(model, x, y, "true"))


@pytest.mark.parametrize("name", ["sequence", "called-twice", "shared-parameter", "flat-positions"])
def test_other_parameters_go_through_vmap(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    by_backward = importance_pass.ImportancePass._sum_by_backward

    def watched(self: object, parameters: object, x: object, y: Tensor) -> list[Tensor]:
        rows.append(len(y))
        return by_backward(self, parameters, x, y)  # type: ignore[arg-type]

    monkeypatch.setattr(importance_pass.ImportancePass, "_sum_by_backward", watched)
    model, x, y = setting(name)
    assert_same(fisher(model, [(x, y)]), reference_fisher(model, x, y, "true"))
    assert rows == [2], "more went by ordinary backward passes than the samples that are to show that vmap is right"


def test_memory_bound_splits_layers_without_changing_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importance_pass, "_ELEMENTS_AT_ONCE", 100)
    for name in ("conv", "sequence"):
        model, x, y = setting(name)
        assert_same(fisher(model, [(x, y)]), reference_fisher(model, x, y, "true"))


def fill_others(output: Tensor) -> Tensor:
    return output.masked_fill(torch.tensor([False, True, False]), -torch.inf)


def add_to_others(output: Tensor) -> Tensor:
    return output + torch.tensor([0.0, -torch.inf, 0.0], dtype=DOUBLE)


@pytest.mark.parametrize("name", ["mlp", "sequence", "branching"])
@pytest.mark.parametrize("head", [fill_others, add_to_others])
def test_masked_classes_leave_no_trace(name: str, head: Head) -> None:
    model, x, y = setting(name)
    y = y.where(y != 1, 0)
    for labels in ("true", "expected", "uniform", "reversed"):
        found = fisher(model, [(x, y)], labels=labels, head=head)
        assert_same(found, reference_fisher(model, x, y, labels, fill_others))
    assert_same(squared_output_norm(model, [(x, y)], head=head), reference_mas(model, x, lambda o: o[:, [0, 2]]))


def test_certain_class_gives_zeros_not_nan() -> None:
    model, x, y = setting("mlp")
    found = fisher(model, [(x, y)], labels="expected", head=lambda o: o.masked_fill(torch.arange(3) > 0, -torch.inf))
    assert all(not value.any() for value in found.values())


def test_uniform_labels_do_not_vanish_where_the_model_is_certain() -> None:
    model, x, y = setting("mlp")
    certain = {
        labels: fisher(model, [(x, y)], labels=labels, head=lambda output: 1e6 * output)
        for labels in ("expected", "uniform")
    }
    assert all(float(value.sum()) == 0 for value in certain["expected"].values())
    assert all(float(value.sum()) > 0 for value in certain["uniform"].values())


def test_reversed_labels_do_not_vanish_where_the_model_is_certain_and_right() -> None:
    model, x, _ = setting("mlp")
    y = model(x).argmax(1)
    sure = {one: fisher(model, [(x, y)], labels=one, head=lambda z: 1e6 * z)["4.bias"] for one in ("true", "reversed")}
    assert not sure["true"].any() and sure["reversed"].any()


@pytest.mark.parametrize("make", [EWC, OnlineEWC, lambda model, labels: IMM(model, "mode", labels=labels)])
def test_methods_take_reversed_labels(make: Callable[..., EWC]) -> None:
    model, x, y = setting("mlp")
    reg = make(model, labels="reversed")
    expected = reference_fisher(model, x, y, "reversed")
    reg.consolidate([(x, y)])
    again = make(model, labels="true")
    again.load_state_dict(reg.state_dict())
    assert again.labels == "reversed"
    if not isinstance(reg, IMM):
        assert_same(reg.importance(), expected)


def test_a_warm_start_takes_reversed_labels() -> None:
    model, x, y = setting("mlp")
    reg = SI(model)
    reg.warm_start([(x, y)], labels="reversed", scale=0.5)
    assert_same(reg.importance(), {n: 0.5 * f for n, f in reference_fisher(model, x, y, "reversed").items()})


def test_loss_of_ones_own() -> None:
    model, x, y = setting("mlp")
    loss = lambda output, y: F.cross_entropy(output, y, reduction="none")  # noqa: E731
    assert_same(fisher(model, [(x, y)], loss=loss), reference_fisher(model, x, y, "true"))
    with pytest.raises(AlassoError, match="reduction"):
        fisher(model, [(x, y)], loss=F.cross_entropy)
    with pytest.raises(AlassoError, match='labels="true"'):
        fisher(model, [(x, y)], loss=loss, labels="expected")


@pytest.mark.parametrize("make", [EWC, OnlineEWC])
def test_whose_fisher_it_is_can_be_seen(make: type[EWC]) -> None:
    model, _, _ = setting("mlp")
    assert "lam=2.0" in repr(make(model, lam=2.0)) and "labels=true" in repr(make(model))
    assert make(model, labels="uniform").settings()["labels"] == "uniform"


@pytest.mark.parametrize("make", [EWC, OnlineEWC])
def test_ewc_takes_a_loss_of_ones_own(make: type[EWC]) -> None:
    """½λ Σ F d² with the Fisher of a regression, whose targets are no classes."""
    model, x, _ = setting("mlp")
    target = torch.randn(len(x), 3, dtype=DOUBLE)
    reg = make(model, lam=3.0, loss=lambda output, t: (output - t).square().sum(1) / 2)
    reg.consolidate([(x[:4], target[:4]), (x[4:], target[4:])])
    expected = torch.zeros((), dtype=DOUBLE)
    for x_i, t_i in zip(x, target, strict=True):
        for gradient in _gradients((model(x_i[None])[0] - t_i).square().sum() / 2, model).values():
            expected += 0.5 * 3.0 * (gradient**2 / len(x) * 0.1**2).sum()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    torch.testing.assert_close(reg.penalty().detach(), expected, rtol=1e-10, atol=0)
    with pytest.raises(AlassoError, match='labels="true"'):
        make(model, labels="sampled", loss=F.mse_loss)


def test_mode_imm_takes_a_loss_of_ones_own() -> None:
    """Merged by the Fisher of a regression: Σ F_t θ_t / Σ F_t."""
    model, x, _ = setting("mlp")
    target = torch.randn(len(x), 3, dtype=DOUBLE)
    loss = lambda output, t: (output - t).square().sum(1) / 2  # noqa: E731
    reg = IMM(model, "mode", loss=loss)
    sums = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    for task in (0, 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn(parameter.shape, dtype=DOUBLE) * 0.1
        measured = fisher(model, [(x, target + task)], loss=loss)
        for name, parameter in model.named_parameters():
            sums[name][0].add_(measured[name] * parameter.detach())
            sums[name][1].add_(measured[name])
        reg.consolidate([(x, target + task)])
    for name, parameter in model.named_parameters():
        weighted, weights = sums[name]
        somewhere = weights > 1e-6
        assert somewhere.any()
        torch.testing.assert_close(
            parameter.detach()[somewhere], (weighted / weights)[somewhere], rtol=1e-6, atol=1e-9, msg=name
        )
    with pytest.raises(AlassoError, match="mean-IMM measures nothing"):
        IMM(model, "mean", loss=loss)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.uint16, torch.bool])
def test_labels_may_be_whole_numbers_of_any_kind(dtype: torch.dtype) -> None:
    model, x, y = setting("mlp")
    labels = y.clamp(max=1)
    assert_same(fisher(model, [(x, labels.to(dtype))]), reference_fisher(model, x, labels, "true"))


@pytest.mark.parametrize(
    ("outputs", "labels", "said"),
    [
        (3, torch.tensor([0, 1, 3]), "Label 3 is none of the output's 3 classes, 0 to 2"),
        (3, torch.tensor([0, -100, 2]), "Label -100 is none of the output's 3 classes"),
        (3, torch.tensor([0.0, 1.0, 0.5]), "class indices, not float32: for other targets pass a loss"),
        (3, torch.zeros(3, dtype=torch.complex64), "class indices, not complex64"),
        (3, torch.zeros(3, 3), r"class indices of shape \(N,\), not \(3, 3\): pass a loss"),
        (3, torch.zeros(3, 1, dtype=torch.long), r"of shape \(N,\), not \(3, 1\): give y.squeeze\(1\)"),
        (1, torch.tensor([0, 1, 0]), "One output has no softmax"),
    ],
)
def test_labels_that_the_output_does_not_know_are_refused(outputs: int, labels: Tensor, said: str) -> None:
    with pytest.raises(AlassoError, match=said):
        fisher(nn.Linear(4, outputs), [(torch.randn(3, 4), labels)])


@pytest.mark.parametrize("name", ["mlp", "branching"])
def test_regression_loss_with_targets_of_any_shape(name: str) -> None:
    model, x, _ = setting(name)
    target = torch.randn(len(x), 3, dtype=DOUBLE)
    found = fisher(model, [(x, target)], loss=lambda output, t: (output - t).square().sum(1))
    expected = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for x_i, t_i in zip(x, target, strict=True):
        for n, gradient in _gradients((model(x_i[None])[0] - t_i).square().sum(), model).items():
            expected[n] += gradient**2 / len(x)
    assert_same(found, expected)


def test_sampled_labels_follow_the_generator_alone() -> None:
    model, x, _ = setting("mlp")
    before = torch.get_rng_state()
    first, again = (fisher(model, [x], labels="sampled", generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert_same(first, again)
    assert torch.equal(torch.get_rng_state(), before)
    other = fisher(model, [x], labels="sampled", generator=torch.Generator().manual_seed(6))
    assert not torch.equal(first["0.weight"], other["0.weight"])


@pytest.mark.parametrize("name", ["mlp", "sequence"])
def test_sampled_labels_are_the_expectation_on_average(name: str) -> None:
    model, x, _ = setting(name)
    many = [(x.repeat_interleave(3000, 0))]
    sampled = fisher(model, many, labels="sampled", generator=torch.Generator().manual_seed(0), chunk=10_000)
    for key, value in fisher(model, [x], labels="expected").items():
        torch.testing.assert_close(sampled[key], value, rtol=0.15, atol=0.03 * float(value.max()))


def test_frozen_parameters_are_left_out_unless_asked_for() -> None:
    model, x, y = setting("mlp")
    full = reference_fisher(model, x, y, "true")
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    assert_same(fisher(model, [(x, y)]), reference_fisher(model, x, y, "true"))
    found = fisher(model, [(x, y)], parameters={"mine": model[2].weight, "b": model[0].bias})
    assert_same(found, {"mine": full["2.weight"], "b": full["0.bias"]})
    assert not model[2].weight.requires_grad
    assert model[0].bias.requires_grad


def test_parameters_without_influence_get_zeros() -> None:
    model, x, y = setting("unused")
    found = fisher(model, [(x, y)])
    assert found["used.weight"].any()
    for name in ("unused.weight", "unused.bias", "ignored.weight", "loose"):
        assert not found[name].any()
    assert not any(v.any() for v in fisher(model, [(x, y)], parameters={"u": model.unused.weight}).values())


def test_a_single_batch_is_told_from_a_list_of_them() -> None:
    model, x, y = setting("mlp")
    with pytest.raises(AlassoError, match=r"a list of batches, \[\(x, y\)\], not a single \(x, y\)"):
        fisher(model, (x, y))
    with pytest.raises(AlassoError, match=r"not a single \(x, y\)"):
        squared_output_norm(model, (x, y))
    assert squared_output_norm(model, (x, x))  # two batches of inputs


def test_a_model_with_several_outputs_needs_a_head() -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), x

    model, x, y = Twice(4, 3), torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    with pytest.raises(AlassoError, match="answers with a tuple, not with a tensor: pass a head"):
        fisher(model, [(x, y)])
    assert fisher(model, [(x, y)], head=lambda output: output[0])["weight"].any()


class TwoInputs(nn.Module):
    """A model of several arguments, which answers with several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(5, 4), nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(
        self, left: Tensor, right: Tensor | None = None, gain: float = 1.0, answer: str = "logits"
    ) -> dict[str, Tensor]:
        h = self.left(left) if right is None else self.left(left) * self.right(right)
        return {"hidden": h, answer: self.head(torch.tanh(gain * h))}


def two_inputs() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    torch.manual_seed(5)
    left, right = torch.randn(6, 5, dtype=DOUBLE), torch.randn(6, 3, dtype=DOUBLE)
    return TwoInputs().to(DOUBLE), left, right, torch.randint(3, (6,))


def reference_of_two(model: nn.Module, left: Tensor, right: Tensor, y: Tensor, gain: float) -> dict[str, Tensor]:
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(len(left)):
        log_p = F.log_softmax(model(left[i : i + 1], right[i : i + 1], gain)["logits"], dim=1)[0, y[i]]
        for name, gradient in _gradients(log_p, model).items():
            total[name] += gradient**2 / len(left)
    return total


@pytest.mark.parametrize(
    "batch",
    [
        lambda left, right, y: ((left, right, 2.0), y),
        lambda left, right, y: [[left, right, 2.0], y],
        lambda left, right, y: ({"right": right, "gain": 2.0, "left": left}, y),
        lambda left, right, y: {"left": left, "labels": y, "right": right, "gain": 2.0},
        lambda left, right, y: {"left": left, "labels": y, "right": right, "gain": torch.tensor(2.0, dtype=DOUBLE)},
    ],
    ids=["tuple", "list", "mapping and labels", "mapping", "number in a tensor"],
)
def test_a_model_may_have_several_arguments_and_answer_with_a_mapping(batch: Callable[..., object]) -> None:
    model, left, right, y = two_inputs()
    expected = reference_of_two(model, left, right, y, gain=2.0)
    loader = [batch(left[:4], right[:4], y[:4]), batch(left[4:], right[4:], y[4:])]
    assert_same(fisher(model, loader), expected)
    reg = EWC(model)
    reg.consolidate(loader)
    assert_same(reg.importance(), expected)
    found = squared_output_norm(model, loader, head=lambda output: output["hidden"])
    assert found["left.weight"].any() and not found["head.weight"].any()


def test_arguments_that_are_none_are_passed_on() -> None:
    model, left, _, y = two_inputs()
    found = fisher(model, [((left, None), y)])
    assert found["left.weight"].any() and not found["right.weight"].any()


def test_a_mapping_without_logits_needs_a_head() -> None:
    model, left, right, y = two_inputs()
    batch = ({"left": left, "right": right, "answer": "y"}, y)
    with pytest.raises(AlassoError, match=r"answers with a dict.*head=lambda output: output\['hidden'\]"):
        fisher(model, [batch])
    assert_same(
        fisher(model, [batch], head=lambda output: output["y"]), reference_of_two(model, left, right, y, gain=1.0)
    )


def test_inputs_of_different_lengths_are_refused() -> None:
    model, left, right, y = two_inputs()
    with pytest.raises(AlassoError, match="a row for each sample"):
        fisher(model, [((left, right[:2]), y)])
    with pytest.raises(AlassoError, match="Labels must be a tensor, not list"):
        fisher(model, [((left, right), y.tolist())])


def test_a_head_for_each_task_is_chosen_by_a_word() -> None:
    class Heads(nn.Module):
        def __init__(self, parts: nn.ModuleDict) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: Tensor, task: str) -> Tensor:
            return self.parts[task](torch.tanh(self.parts["body"](x)))

    torch.manual_seed(2)
    parts = nn.ModuleDict({"body": nn.Linear(5, 4), "a": nn.Linear(4, 3), "b": nn.Linear(4, 2)}).to(DOUBLE)
    x, y = torch.randn(6, 5, dtype=DOUBLE), torch.tensor([0, 1, 2, 0, 1, 2])
    with pytest.raises(AlassoError, match=r"ModuleDict has no forward\(\)"):
        EWC(parts).consolidate([(x, y)])
    found = fisher(Heads(parts), [({"x": x, "task": "a"}, y)])
    expected = reference_fisher(nn.Sequential(parts["body"], nn.Tanh(), parts["a"]), x, y, "true")
    assert_same(
        {n: f for n, f in found.items() if ".b." not in n}, dict(zip(list(found)[:4], expected.values(), strict=True))
    )
    assert not found["parts.b.weight"].any()


@pytest.mark.parametrize("method", [EWC, MAS, KronALASSO])
def test_a_model_without_forward_is_measured_through_its_head(method: type[Regularizer]) -> None:
    """Heads in a ModuleDict, picked by key in the loop; the body is called twice, which no fast route takes."""
    torch.manual_seed(2)
    parts = nn.ModuleDict({"body": nn.Linear(5, 5), "a": nn.Linear(5, 3), "b": nn.Linear(5, 2)}).to(DOUBLE)
    x, y = torch.randn(6, 5, dtype=DOUBLE), torch.tensor([0, 1, 2, 0, 1, 2])

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.a, self.b = parts["body"], parts["a"], parts["b"]

        def forward(self, x: Tensor) -> Tensor:
            return self.a(torch.tanh(self.body(torch.tanh(self.body(x)))))  # type: ignore[no-any-return]

    whole = Whole()
    found = []
    for model, head in ((parts, whole.forward), (whole, None)):
        reg = method(model)
        importance = "mas" if method is MAS else "fisher"
        reg.warm_start([(x, y)], importance, head=head)
        found.append(reg.importance())
    assert_same(*found)
    assert found[0]["body.weight"].all() and not found[0]["b.weight"].any()


def test_a_batch_takes_one_backward_pass_for_each_class_and_no_more() -> None:
    model, counts = nn.Linear(4, 7), []
    x = torch.randn(5, 4)
    for batches in (1, 3):
        passes: list[Tensor] = []

        def count(layer: nn.Module, args: object, output: Tensor, passes: list[Tensor] = passes) -> None:
            output.register_hook(passes.append)

        handle = model.register_forward_hook(count)
        fisher(model, [x] * batches, labels="expected")
        handle.remove()
        counts.append(len(passes))
    assert counts[1] - counts[0] == 2 * 7


def test_samples_that_influence_one_another_are_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3, affine=False, track_running_stats=False), nn.ReLU())
    model += nn.Sequential(nn.Flatten(), nn.Linear(27, 3))
    x, y = torch.randn(6, 2, 4, 4), torch.randint(3, (6,))
    with pytest.raises(AlassoError, match="by itself otherwise than within a batch"):
        fisher(model, [(x, y)])


def test_a_model_that_answers_by_chance_is_measured() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.rand_like(x[:, :1])

    torch.manual_seed(0)
    assert fisher(Noisy(5, 3), [(torch.randn(6, 5), torch.randint(3, (6,)))])["weight"].any()


def test_hooks_that_act_on_gradients_are_not_called() -> None:
    """An optimizer may step within backward, by hooks on its parameters."""
    model, x, y = setting("branching")
    calls: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(calls.append)
        parameter.register_hook(calls.append)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    fisher(model, [(x, y)])
    assert not calls and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
    model(x).sum().backward()
    assert len(calls) == 2 * len(expected), "the hooks are there again"


def test_foreign_parameter_is_refused() -> None:
    model, x, y = setting("mlp")
    with pytest.raises(AlassoError, match="'stray'"):
        fisher(model, [(x, y)], parameters={"stray": nn.Parameter(torch.ones(1))})


@pytest.mark.parametrize("name", ["mlp", "conv", "sequence", "branching"])
def test_model_is_left_as_it_was(name: str) -> None:
    model, x, y = setting(name)
    model.train()
    list(model.modules())[1].eval()
    modes = [m.training for m in model.modules()]
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    grads = [p.grad for p in model.parameters()]
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with torch.no_grad():
        fisher(model, [(x, y)], labels="expected")
        squared_output_norm(model, [(x, y)])
        assert not torch.is_grad_enabled()
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is g and bool((g == 3).all()) for p, g in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), rng)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])


@pytest.mark.parametrize("outer", [torch.no_grad, torch.inference_mode])
def test_result_does_not_depend_on_the_surrounding_grad_mode(outer: Callable[[], torch.no_grad]) -> None:
    model, x, y = setting("sequence")
    with outer():
        found = fisher(model, [(x, y)])
    assert not any(value.is_inference() for value in found.values())
    assert_same(found, reference_fisher(model, x, y, "true"))


def test_mode_and_hooks_are_restored_when_forward_raises() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.dropout = nn.Linear(5, 3), nn.Dropout()

        def forward(self, x: Tensor) -> Tensor:
            self.layer(x)
            raise RuntimeError("broken")

    model = Broken()
    model.dropout.eval()
    model.layer.bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match="broken"):
        fisher(model, [(torch.ones(2, 5), torch.zeros(2))], parameters=dict(model.named_parameters()))
    assert [m.training for m in model.modules()] == [True, True, False]
    assert not model.layer._forward_hooks
    assert not model.layer.bias.requires_grad


def test_hooks_of_the_user_are_honoured() -> None:
    model, x, y = setting("mlp")
    model[0].register_forward_hook(lambda _module, _args, output: output * 2)
    model[2].register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
    assert_same(fisher(model, [(x, y)]), reference_fisher(model, x, y, "true"))


@pytest.mark.parametrize("name", ["mlp", "sequence", "branching"])
def test_gradient_hooks_on_parameters_do_not_interfere(name: str) -> None:
    model, x, y = setting(name)
    expected = reference_fisher(model, x, y, "true")
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 100)
    assert_same(fisher(model, [(x, y)]), expected)


def test_layer_input_changed_afterwards_is_not_trusted() -> None:
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = x.clone()
            output = self.layer(hidden)
            hidden.zero_()
            return output

    x, y = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0])
    with pytest.raises(RuntimeError, match="inplace operation"):  # as training it would
        fisher(Overwrites(), [(x, y)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_result_is_at_least_single_precision(dtype: torch.dtype) -> None:
    model, x, y = setting("mlp")
    exact = fisher(model, [(x, y)])
    for found in (
        fisher(model.to(dtype), [(x.to(dtype), y)]),
        fisher(model, [(x.to(dtype), y)], labels="expected"),
    ):
        assert {value.dtype for value in found.values()} == {torch.float32}
    torch.testing.assert_close(
        fisher(model, [(x.to(dtype), y)])["4.weight"].double(), exact["4.weight"], rtol=0.1, atol=0.01
    )


def test_autocast_does_not_cost_precision() -> None:
    model, x, y = setting("tied-by-hand")
    model, x = model.float(), x.float()
    plain = fisher(model, [(x, y)])
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(fisher(model, [(x, y)]), plain)


@pytest.mark.parametrize("loader", [[], [(torch.ones(0, 5, dtype=DOUBLE), torch.ones(0))]])
def test_empty_loader_is_an_error(loader: list[tuple[Tensor, Tensor]]) -> None:
    model, _, _ = setting("mlp")
    for measure in (fisher, squared_output_norm):
        with pytest.raises(AlassoError, match="no samples"):
            measure(model, loader)


def test_a_loader_may_have_no_more_than_items() -> None:
    model, x, y = setting("mlp")

    class OfOldStyle:
        def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
            return [(x, y)][number]

    class OfBatches(torch.utils.data.TensorDataset):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return iter([(x, y)])

    class Broken:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            raise TypeError("cannot pickle '_thread.lock'")

    for loader in (OfOldStyle(), OfBatches(x, y)):
        assert_same(fisher(model, loader), fisher(model, [(x, y)]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot pickle"):
        fisher(model, Broken())


def test_mistakes_are_named() -> None:
    model, x, y = setting("mlp")
    with pytest.raises(AlassoError, match="'true', 'sampled', 'expected'"):
        fisher(model, [(x, y)], labels="empirical")
    with pytest.raises(AlassoError, match="yield y"):
        fisher(model, [x])
    with pytest.raises(AlassoError, match=r"shape \(N,\)"):
        fisher(model, [(x, y[:, None])])
    with pytest.raises(AlassoError, match="logits"):
        fisher(model, [(x, y)], head=lambda output: output[:, :, None])
    with pytest.raises(AlassoError, match="a DataLoader or a list of batches, not Tensor"):
        fisher(model, x)
    with pytest.raises(AlassoError, match="a DataLoader or a list of batches, not TensorDataset"):
        fisher(model, torch.utils.data.TensorDataset(x, y))
    with pytest.raises(AlassoError, match="a DataLoader or a list of batches, not int"):
        fisher(model, 3)  # type: ignore[arg-type]
    with pytest.raises(AlassoError, match="row for each"):
        squared_output_norm(model, [x], head=torch.sum)
    with pytest.raises(AlassoError, match="tensors as x, not list"):
        squared_output_norm(model, [{"x": [1, 2]}])
    with pytest.raises(AlassoError, match="tensors as x, not nothing"):
        squared_output_norm(model, [{"labels": y}])
    with pytest.raises(AlassoError, match="chunk"):
        squared_output_norm(model, [x], chunk=0)
