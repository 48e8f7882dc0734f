"""What a user may write. `mypy --strict` reads it, so that each call keeps its types, and the tests run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

import alasso
from alasso import (
    ALASSO,
    EWC,
    IMM,
    MAS,
    SI,
    AlassoError,
    DivergedError,
    Gauge,
    KronALASSO,
    OnlineEWC,
    Regularizer,
    Surrogate,
)
from alasso.bench import Result, RunConfig, Stream, chosen_settings, run
from alasso.bench.metrics import average_accuracy, backward_transfer, forgetting
from alasso.bench.results import read, write
from alasso.importance import fisher, squared_output_norm
from alasso.methods.imm import DropTransfer
from alasso.vcl import convert, evaluating, expected_loss, kl, kl_gaussians, negative_elbo, predict, update_prior
from alasso.vcl.coresets import k_center_coreset, random_coreset

Batch = tuple[Tensor, Tensor]
Task = list[Batch]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def tasks(count: int = 2) -> list[Task]:
    return [[(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)] for _ in range(count)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, task: Task) -> None:
    for x, y in task:
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()


def accuracy(model: nn.Module, task: Task) -> float:
    with torch.no_grad(), evaluating(model):
        right = [int((model(x).argmax(1) == y).sum()) for x, y in task]
    return sum(right) / sum(len(y) for _, y in task)


def squared_error(output: Tensor, y: Tensor) -> Tensor:
    return (output - nn.functional.one_hot(y, 3)).square().sum(1) / 2


def all_methods(model: nn.Module) -> list[Regularizer]:
    return [
        KronALASSO(model, c=1.0, rank=16, every=5, scale="path", gamma=0.9, include=["0.*", "2.weight"]),
        ALASSO(model, a=1.8, c=1.0, a_prime=1.0, c_prime=1.0, epsilon=1e-6, epsilon_prime=0.0, xi="auto"),
        ALASSO(model, xi=0.1, monotone=False, unmoved="unobserved", omega_rule="si"),
        ALASSO.as_the_authors_ran_it(model, c=0.5),
        ALASSO.as_the_paper_states_it(model),
        ALASSO.asymmetric_only(model),
        ALASSO.accurate_only(model),
        SI(model, c=0.1, xi=0.1, exclude="2.*"),
        EWC(model, lam=10.0, labels="uniform", exclude=["2.weight", "2.bias"]),
        EWC(model, loss=squared_error),
        OnlineEWC(model, 10.0, 0.9, labels="sampled"),
        MAS(model, lam=0.5, include="*.weight", exclude="2.*"),
        IMM(model, "mode", transfer="l2", lam=1e-3, last_weight=0.5, start="last"),
    ]


def a_loop(make: Callable[[nn.Module], Regularizer], file: Path) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    with make(model).attach(optimizer, compile=False) as reg:
        for task in tasks():
            if isinstance(reg, IMM):
                reg.begin_task()
            train(model, optimizer, task)
            reg.consolidate(task, head=None)
        penalty: Tensor = reg.penalty()
        stiffness: dict[str, Tensor] = reg.importance()
        anchors: dict[str, Tensor] = reg.anchor()
        assert penalty.dim() == 0 and stiffness.keys() == anchors.keys() and reg.tasks == 2
    assert not reg.is_attached and reg.model is model
    torch.save(reg.state_dict(), file)
    reg.load_state_dict(torch.load(file))
    surrogate: Surrogate[object] = reg.surrogate
    assert surrogate is reg.surrogate and reg.settings()
    reg.forget(next(iter(model.parameters())))


def settings_are_attributes() -> float:
    model = network()
    reg = KronALASSO(model).attach(torch.optim.SGD(model.parameters()))
    reg.c = 3.0
    reg.rank = 8
    return reg.c


def a_summary(reg: Regularizer) -> str:
    summary: alasso.Summary = reg.summary()
    tensors: Iterable[alasso.TensorSummary] = summary.tensors
    return f"{summary.verdict}: {summary.sentence}, {[one.name for one in tensors]}"


def a_gauge() -> dict[str, float]:
    model, said = network(), list[dict[str, float]]()
    gauge = Gauge(model, every=2, report=lambda values, step: said.append(values))
    gauge.add("first", tasks()[0])
    gauge.step()
    gauge.load_state_dict(gauge.state_dict())
    values: dict[str, float] = gauge.step()
    assert said == [values] and Gauge(model, accuracy_of, label="accuracy", larger_is_better=True).read() == {}
    return values


def accuracy_of(model: nn.Module, batch: Batch) -> float:
    return accuracy(model, [batch])


def a_pretrained_model() -> Regularizer:
    model = network()
    reg = ALASSO(model)
    reg.warm_start(tasks()[0], "fisher", labels="true", head=lambda output: output, scale=0.5)
    f: dict[str, Tensor] = fisher(model, tasks()[0], labels="expected", generator=torch.Generator(), chunk=8)
    omega: dict[str, Tensor] = squared_output_norm(model, tasks()[0], parameters=dict(model.named_parameters()))
    assert f.keys() == omega.keys()
    return reg


def fused_optimizers() -> float | None:
    model = network()
    reg = SI(model)
    alasso.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, regularizer=reg)
    optimizer = alasso.optim.Adam([{"params": model.parameters(), "lr": 1e-3}], betas=(0.9, 0.99), regularizer=reg)

    def closure() -> float:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(2, 4)).square().mean()
        torch.autograd.backward(loss)
        return loss.item()

    return optimizer.step(closure)


def a_search() -> Regularizer:
    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = network()
        return model, torch.optim.Adam(model.parameters())

    found: alasso.Tuned = alasso.tune(start, train, accuracy, tasks(), SI, trainings=2, seed=1)
    best: alasso.Trial = found.best
    assert best.strength == found.strength and len(best.scores) == 2
    return found.regularizer(network())


def variational() -> Tensor:
    model = convert(network())
    optimizer = torch.optim.Adam(model.parameters())
    x, y = tasks()[0][0]
    torch.autograd.backward(negative_elbo(model, x, y, data_size=24, samples=2))
    optimizer.step()
    assert kl(model).item() >= 0 and expected_loss(model, x, y, samples=2).dim() == 0
    update_prior(model)
    assert kl_gaussians(torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.ones(1)).item() == 0
    index: Tensor = torch.cat([random_coreset(8, 2), k_center_coreset(x, 2)])
    return predict(model, x[index], samples=3)


def drop_transfer() -> Tensor:
    model = network()
    with DropTransfer(model, p=0.5):
        output: Tensor = model(torch.ones(1, 4))
    return output


def the_laboratory(folder: Path) -> Result:
    config = RunConfig.for_benchmark("permuted-digits", "kron-alasso", tasks=2, epochs=1, hidden=8)
    result: Result = run(config, device="cpu")
    file = write(result, folder)
    rows = read(file).accuracy
    assert average_accuracy(rows) >= 0 and forgetting(rows) == -backward_transfer(rows)
    own = Stream.of([(task[0], task[1]) for task in tasks()], name="my-own")
    return run(RunConfig.own("sgd", epochs=1, hidden=8), stream=own, device="cpu")


def what_a_search_chose(file: Path) -> object:
    return chosen_settings(file, "permuted-digits")["si"]


def mistakes() -> list[str]:
    said = []
    for wrong in (
        lambda: ALASSO(network(), c=-1.0),
        lambda: SI(network(), exclude="nothing"),
        lambda: SI(network(), include="no"),
    ):
        try:
            wrong()
        except DivergedError:
            raise
        except AlassoError as error:
            said.append(str(error))
    return said
