"""alasso.tune: the climb on made-up hills, and on a small stream against a fine grid."""

import math

import pytest
import torch

import alasso
from alasso import ALASSO, EWC, SI, AlassoError, KronALASSO
from alasso._tune import Trial, climb, strength_among

from helpers import mlp, run, toy_tasks

TASKS = toy_tasks(3)


def start():
    model = mlp(6, 24, 4)
    return model, torch.optim.Adam(model.parameters(), lr=5e-3)


def train(model, optimizer, task):
    for _ in range(8):
        run(model, optimizer, task)


@torch.no_grad()
def score(model, task):
    return torch.cat([model(x).argmax(1) == y for x, y in task]).float().mean().item()


def climbed(hill, begin, trainings):
    trials = [Trial(begin, hill(begin), ())]
    climb(trials, lambda strength: Trial(strength, hill(strength), ()), trainings)
    return trials


@pytest.mark.parametrize("peak", [0.02, 0.3, 1.0, 2.2, 40.0])
def test_the_climb_comes_near_the_top_of_a_hill(peak):
    trials = climbed(lambda strength: -abs(math.log10(strength / peak)), 1.0, 6)
    assert len(trials) <= 6
    best = max(trials, key=lambda trial: trial.score).strength
    assert abs(math.log10(best / peak)) < 0.5


def test_a_long_climb_is_finer_and_ends_by_itself():
    trials = climbed(lambda strength: -abs(math.log10(strength / 2.2)), 1.0, 100)
    best = max(trials, key=lambda trial: trial.score).strength
    assert len(trials) < 15 and abs(math.log10(best / 2.2)) <= 0.13
    assert len({round(trial.strength, 6) for trial in trials}) == len(trials)


def test_on_a_plain_it_stays():
    assert max(climbed(lambda _: 1.0, 3.0, 10), key=lambda trial: trial.score).strength == 3.0


@pytest.mark.parametrize("method", [KronALASSO, SI, lambda model: ALASSO(model, xi=1e-3)])
def test_six_trainings_come_near_the_best_of_a_fine_grid(method):
    found = alasso.tune(start, train, score, TASKS, method)
    assert len(found.trials) <= 6

    def with_strength(strength):
        torch.manual_seed(0)
        model, optimizer = start()
        reg = method(model).attach(optimizer)
        reg.c = strength
        for task in TASKS:
            train(model, optimizer, task)
            reg.consolidate()
        return sum(score(model, task) for task in TASKS) / len(TASKS)

    grid = [found.strength * 10 ** (i / 3) for i in range(-5, 6)]
    assert found.best.score > max(map(with_strength, grid)) - 0.02
    assert found.best.score == pytest.approx(with_strength(found.strength), abs=1e-6)  # what it says is what one gets


def test_it_returns_the_regularizer_to_use():
    found = alasso.tune(start, train, score, TASKS[:2], trainings=2)
    model, _ = start()
    reg = found.regularizer(model)
    assert isinstance(reg, KronALASSO) and reg.c == found.strength and reg.tasks == 0 and not reg.is_attached
    lines = str(found).splitlines()
    assert len(lines) == 3 and sum("<- best" in line for line in lines) == 1


def test_methods_that_need_data_are_given_it():
    found = alasso.tune(start, train, score, TASKS[:2], EWC, trainings=2, end=lambda reg, task: reg.consolidate(task))
    assert found.setting == "lam" and found.best.score > 0


def test_an_optuna_study_chooses_the_strengths():
    optuna = pytest.importorskip("optuna", reason="pip install optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    found = alasso.tune(start, train, score, TASKS[:2], trainings=4, study=study)
    asked = [trial.params["c"] for trial in study.trials]
    assert asked == pytest.approx([trial.strength for trial in found.trials]) and len(asked) == 4
    assert study.best_value == found.best.score


def test_it_leaves_random_numbers_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    alasso.tune(start, train, score, TASKS[:2], trainings=1)
    assert torch.equal(torch.rand(2), expected)


def test_diverged_trainings_are_not_chosen():
    def diverges(model, optimizer, task):
        with torch.no_grad():
            next(model.parameters()).fill_(math.nan)
        run(model, optimizer, task[:1])

    with pytest.raises(AlassoError, match="all 6 trainings diverged"):
        alasso.tune(start, diverges, score, TASKS[:2])

    strengths = []

    def too_stiff(reg, task):
        strengths.append(reg.c)
        if reg.c > 5:
            raise alasso.DivergedError("too stiff")
        reg.consolidate()

    found = alasso.tune(start, train, score, TASKS[:2], lambda model: KronALASSO(model, c=1.0), end=too_stiff)
    assert max(strengths) > 5 > found.strength and "diverged" in str(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks": TASKS[:1]}, "needs two tasks or more"),
        ({"trainings": 0}, "one or more, not 0"),
    ],
)
def test_what_cannot_be_tuned_is_said(arguments, message):
    with pytest.raises(AlassoError, match=message):
        alasso.tune(**{"start": start, "train": train, "score": score, "tasks": TASKS[:2], **arguments})


def test_a_method_without_a_strength_is_refused():
    with pytest.raises(AlassoError, match="L0 has no strength to search"):
        strength_among("L0", {"xi"})


def test_no_method_is_left_attached():
    optimizers = []

    def noted():
        model, optimizer = start()
        optimizers.append(optimizer)
        return model, optimizer

    alasso.tune(noted, train, score, TASKS[:2], trainings=2)
    assert len(optimizers) == 2 and not any(optimizer._optimizer_step_pre_hooks for optimizer in optimizers)
