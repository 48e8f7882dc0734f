"""The table and the verdict of reg.summary(), against slow references and trainings that bear it out."""

import logging
import math

import pytest
import torch
from torch import nn

from alasso import ALASSO, EWC, IMM, MAS, SI, KronALASSO, OnlineEWC
from alasso._summary import BALANCED, NEARLY_FROZEN, NO_PENALTY, TOO_WEAK, UNKNOWN, Summary, TensorSummary
from alasso.importance.kronecker import form, sketch, spread

from helpers import mlp, run, step, toy_tasks

TASKS = toy_tasks(3)
METHODS = [KronALASSO, ALASSO, SI, EWC, OnlineEWC, MAS]


def after_one_task(make, model=None, epochs=5, **settings):
    torch.manual_seed(0)
    model = model or mlp(6, 32, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    reg = make(model, **settings).attach(optimizer)
    for _ in range(epochs):
        run(model, optimizer, TASKS[0])
    reg.consolidate(TASKS[0])
    return model, optimizer, reg


# -- the numbers -------------------------------------------------------------------------------------------------


def test_numbers_of_springs_are_those_of_a_slow_reference():
    torch.manual_seed(0)
    model = mlp(6, 5, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = SI(model, c=0.3, xi=0.01).attach(optimizer)
    batches = toy_tasks(1, batches=11, dtype=torch.float64)[0]
    begin = {name: p.detach().clone() for name, p in model.named_parameters()}
    paths = {name: torch.zeros_like(p) for name, p in begin.items()}
    gradients = []
    for batch in batches:
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        step(model, optimizer, batch)
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        for name, p in model.named_parameters():
            paths[name] -= gradients[-1][name] * (p.detach() - before[name])
    reg.consolidate()
    summary = reg.summary()
    ratios = []
    for tensor, (name, p) in zip(summary.tensors, model.named_parameters(), strict=True):
        d = p.detach() - begin[name]
        k = float((0.3 * (paths[name] / (d**2 + 0.01)).clamp(min=0)).mean())
        g = float(gradients[7][name].square().mean().sqrt())  # of the 8th step: the last that is a power of two
        moved = float(d.square().mean().sqrt())
        assert tensor.name == name and tensor.weights == p.numel() and tensor.factors == ""
        assert tensor.stiffness == pytest.approx(k, rel=1e-9)
        assert tensor.moved == pytest.approx(moved, rel=1e-9)
        assert tensor.reach == tensor.reach_elsewhere == pytest.approx(g / k, rel=1e-9)
        ratios.append(g / k / moved)
    assert summary.moves == pytest.approx(len(ratios) / sum(1 / ratio for ratio in ratios), rel=1e-9)
    assert summary.moves_elsewhere == pytest.approx(math.prod(ratios) ** (1 / len(ratios)), rel=1e-9)


def test_stiffness_of_two_sides_is_their_mean():
    reg = ALASSO(nn.Linear(3, 2, bias=False).double(), a=3.0, c=2.0, epsilon=0.5)
    data = [(torch.randn(16, 3, dtype=torch.float64), torch.randint(2, (16,)))]
    reg.warm_start(data)
    sides = reg.surrogate.stiffness(reg.protected.states["weight"])
    mean = float((sides[0] + sides[1]).mean() / 2)
    assert reg.summary().tensors[0].stiffness == pytest.approx(mean, rel=1e-12)


def dense(packed):
    """A factor as a whole matrix, as it is and with the least ρ that counts."""
    B, rho = packed.double()[:, :-1], packed.double()[:, -1]
    least = 1e-6 * (B.square().sum(1) + rho).mean()
    return B @ B.mT + rho.diag(), B @ B.mT + rho.clamp(min=least).diag()


@pytest.mark.parametrize("size", [1, 5, 40])
def test_spread_of_a_factor_is_that_of_its_eigenvalues(size):
    torch.manual_seed(size)
    packed = form(sketch(torch.randn(60, size, dtype=torch.float64), min(size, 8)))
    whole, with_least = map(torch.linalg.eigvalsh, dense(packed))
    geometric, rms = spread(packed)
    torch.testing.assert_close(rms, whole.square().mean().sqrt(), rtol=1e-9, atol=0)
    torch.testing.assert_close(geometric, with_least.log().mean().exp(), rtol=1e-9, atol=0)


def test_a_factor_of_zeros_is_no_stiffness():
    assert [float(value) for value in spread(torch.zeros(4, 3))] == [0.0, 0.0]


def test_stiffness_of_factors_is_that_of_the_whole_matrix():
    """Soft and stiff directions of ½c · L ⊗ R: the eigenvalues' geometric mean and root mean square."""
    model, _, reg = after_one_task(KronALASSO, mlp(6, 12, 4), rank=3, c=0.7)
    tensors = {tensor.name: tensor for tensor in reg.summary().tensors}
    for name in dict(model.named_parameters()):
        s, tensor = reg.protected.states[name], tensors[name]
        (rows, soft_rows), (columns, soft_columns) = dense(s.row_form), dense(s.column_form)
        stiff = 0.35 * torch.linalg.eigvalsh(torch.kron(rows, columns)).square().mean().sqrt()
        soft = 0.35 * torch.linalg.eigvalsh(torch.kron(soft_rows, soft_columns)).log().mean().exp()
        assert tensor.stiffness == pytest.approx(float(stiff), rel=1e-5)
        assert tensor.stiffness * tensor.reach / tensor.reach_elsewhere == pytest.approx(float(soft), rel=1e-4)


def test_the_gradient_is_the_tasks_own_under_a_scaler():
    lengths = []
    for scale in (1.0, 1024.0):
        torch.manual_seed(0)
        model = mlp(6, 8, 4)
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        reg = SI(model).attach(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        x, y = TASKS[0][0]
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        lengths.append([float(value) for value in reg.notes.gradient.values()])
    assert lengths[0] == pytest.approx(lengths[1], rel=1e-5) and min(lengths[0]) > 0


def test_the_farthest_move_counts():
    """A nearly frozen tensor hardly moves: its own last move would call it free."""
    model, optimizer, reg = after_one_task(SI, xi=1e-3, c=1000.0)
    first = [tensor.moved for tensor in reg.summary().tensors]
    run(model, optimizer, TASKS[1])
    reg.consolidate()
    assert [tensor.moved for tensor in reg.summary().tensors] == first
    assert reg.summary().verdict == NEARLY_FROZEN


# -- the verdict ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", METHODS)
def test_the_verdict_follows_the_strength_at_once(make):
    _, _, reg = after_one_task(make)
    strength = "c" if "c" in reg.settings() else "lam"
    verdicts, reaches = [], []
    for factor in (1e-5, 1e-1, 1e1, 1e6):
        setattr(reg, strength, factor)
        verdicts.append(reg.summary().verdict)
        reaches.append(reg.summary().moves)
    assert verdicts[0] == TOO_WEAK and verdicts[-1] == NEARLY_FROZEN
    assert reaches == sorted(reaches, reverse=True)
    assert reaches[0] == pytest.approx(1e4 * reaches[1], rel=0.02)  # ε of ALASSO is not all of it


@pytest.mark.parametrize(
    ("moves", "elsewhere", "verdict"),
    [
        (6.0, 7.0, TOO_WEAK),
        (4.0, 700.0, BALANCED),
        (0.001, 0.11, BALANCED),
        (0.001, 0.09, NEARLY_FROZEN),
        (math.nan, math.nan, UNKNOWN),
    ],
)
def test_the_verdict_is_by_two_bounds(moves, elsewhere, verdict):
    tensor = TensorSummary("weight", 6, 0.5, 0.1, 0.2, 0.3)
    summary = Summary("SI", 1, (tensor,), moves, elsewhere)
    assert summary.verdict == verdict and str(summary).splitlines()[-2 if verdict != UNKNOWN else -1].startswith(
        f"Verdict: {verdict}"
    )


def test_what_it_says_comes_true():
    """Too weak: task 1 is lost as without protection. Nearly frozen: task 2 is not learned. Balanced: neither."""

    def accuracies(c):
        model, optimizer, reg = after_one_task(SI, xi=1e-3, c=c, epochs=20)
        verdict = reg.summary().verdict
        for _ in range(20):
            run(model, optimizer, TASKS[1])
        right = [
            torch.cat([model(x).argmax(1) == y for x, y in task]).float().mean().item() for task in (TASKS[0], TASKS[1])
        ]
        return verdict, *right

    _, lost, learned = accuracies(0.0)
    said, first, _ = accuracies(1e-3)
    assert said == TOO_WEAK and first < lost + 0.1
    said, first, second = accuracies(1.0)
    assert said == BALANCED and first > lost + 0.1 and second > learned - 0.3
    said, first, second = accuracies(1e3)
    assert said == NEARLY_FROZEN and first > 0.9 and second < learned - 0.3


def test_no_penalty_and_no_task():
    assert after_one_task(IMM)[2].summary().verdict == NO_PENALTY
    fresh = SI(mlp(6, 8, 4))
    assert fresh.summary().verdict == NO_PENALTY and "0 tasks" in str(fresh.summary())
    warm = SI(mlp(6, 8, 4))
    warm.warm_start(TASKS[0])
    assert warm.summary().verdict == UNKNOWN
    assert "inf" not in str(warm.summary()) and "nan" not in str(warm.summary())


# -- the table -----------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 5, batch_first=True)
        self.norm = nn.LayerNorm(5)
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)
        self.head = nn.Linear(5, 4)

    def forward(self, x):
        h = self.norm(self.rnn(x.view(len(x), 2, 3))[0])
        return self.head(self.attention(h, h, h, need_weights=False)[0].mean(1))


def test_it_says_where_the_factors_are_from():
    summary = after_one_task(KronALASSO, Mixed())[2].summary()
    factors = {tensor.name: tensor.factors for tensor in summary.tensors}
    assert factors["head.weight"] == "of the layer"
    assert factors["rnn.weight_hh_l0"] == "of its gradient"
    assert factors["attention.out_proj.weight"] == "of its gradient"  # torch never calls that layer
    assert factors["norm.weight"] == factors["head.bias"] == "diagonal"
    row = next(line for line in str(summary).splitlines() if line.startswith("head.weight"))
    assert row.endswith("of the layer")


@pytest.mark.parametrize("make", [KronALASSO, EWC])
def test_the_table_is_narrow_and_short(make):
    model = nn.Sequential()
    for i in range(20):
        model.add_module(f"a_layer_with_quite_a_long_name_inside_a_model_of_many_{i}", nn.Linear(6, 6))
    _, _, reg = after_one_task(make, model, epochs=1)
    lines = str(reg.summary()).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) < 40
    assert "40 tensors, 840 weights" in lines[0]
    rows = [line for line in lines if line.startswith("…")]
    assert len(rows) == 24 and all(row.split()[0].endswith((".weight", ".bias")) for row in rows)
    assert any(line.startswith("and 16 smaller") for line in lines)
    starts = [line.index(line.split()[1]) + len(line.split()[1]) for line in (lines[1], *rows)]
    assert len(set(starts)) == 1  # numbers end below their head


# -- when it is said, and what is kept -----------------------------------------------------------------------------


def test_the_end_of_a_task_logs_the_verdict_where_it_is_wanted(caplog):
    with caplog.at_level(logging.WARNING, "alasso"):
        after_one_task(SI)
    assert not caplog.records
    with caplog.at_level(logging.INFO, "alasso"):
        _, _, reg = after_one_task(SI)
    (record,) = caplog.records
    assert record.getMessage() == f"SI after task 1: {reg.summary().sentence}"


@pytest.mark.parametrize("make", METHODS)
def test_a_saved_regularizer_knows_its_summary(make, tmp_path):
    model, optimizer, reg = after_one_task(make)
    for steps in (0, 5):
        run(model, optimizer, TASKS[1][:steps])
        torch.save(reg.state_dict(), tmp_path / "saved.pt")
        other = make(mlp(6, 32, 16, 4))
        other.load_state_dict(torch.load(tmp_path / "saved.pt", weights_only=True))
        assert str(other.summary()) == str(reg.summary())


def test_a_state_of_an_earlier_version_has_no_notes():
    saved = after_one_task(SI)[2].state_dict()
    del saved["notes"]
    other = SI(mlp(6, 32, 16, 4))
    other.load_state_dict(saved)
    for _ in range(2):  # saved and loaded once more
        assert other.summary().verdict == UNKNOWN and other.summary().tensors[0].stiffness > 0
        assert str(other.summary()).splitlines()[2].split()[2:] == ["-", "-"]
        other.load_state_dict(other.state_dict())


def test_looking_changes_nothing():
    model, optimizer, reg = after_one_task(KronALASSO)
    run(model, optimizer, TASKS[1][:3])
    before = {name: [t.clone() for t in state] for name, state in reg.protected.states.items()}
    str(reg.summary())
    assert all(
        torch.equal(a, b)
        for name, state in reg.protected.states.items()
        for a, b in zip(before[name], state, strict=True)
    )
    assert reg.steps == 3
