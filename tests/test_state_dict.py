"""Saving and loading, and failures that must be loud."""

import copy
import subprocess
import sys
import textwrap
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import alasso.optim
from alasso import ALASSO, EWC, IMM, MAS, SI, AlassoError, KronALASSO, OnlineEWC, _digest

from helpers import mlp, run, same, toy_tasks, weights

TASKS = toy_tasks(3)
KINDS = [ALASSO, SI, EWC, OnlineEWC, MAS]


def end_of_task(reg, task):
    reg.consolidate() if reg.surrogate.observes_path else reg.consolidate(task)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_saved_in_the_middle_of_a_task_goes_on_bit_for_bit(kind, tmp_path):
    model = mlp(6, 12, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    reg = kind(model).attach(optimizer)
    run(model, optimizer, TASKS[0])
    end_of_task(reg, TASKS[0])
    run(model, optimizer, TASKS[1][:4])
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "reg": reg.state_dict()}
    torch.save(saved, tmp_path / "checkpoint.pt")

    other = mlp(6, 12, 4)
    other_optimizer = torch.optim.Adam(other.parameters(), lr=5e-3)
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    other.load_state_dict(loaded["model"])
    other_optimizer.load_state_dict(loaded["optimizer"])
    other_reg = kind(other).attach(other_optimizer)
    other_reg.load_state_dict(loaded["reg"])

    for m, o, r in ((model, optimizer, reg), (other, other_optimizer, other_reg)):
        run(m, o, TASKS[1][4:])
        end_of_task(r, TASKS[1])
        run(m, o, TASKS[2])
        end_of_task(r, TASKS[2])
    assert same(weights(model), weights(other))
    assert same(reg.importance().values(), other_reg.importance().values())


@pytest.mark.parametrize("kind", [ALASSO, SI, OnlineEWC, MAS])
@pytest.mark.parametrize("optimizer_kind", [torch.optim.Adam, torch.optim.RMSprop, alasso.optim.Adam])
def test_a_past_without_the_weights_it_is_of_is_warned_of_at_the_first_step(kind, optimizer_kind, recwarn):
    model = mlp(6, 12, 4)
    optimizer = optimizer_kind(model.parameters(), lr=5e-3)
    reg = kind(model).attach(optimizer)
    run(model, optimizer, TASKS[0])
    end_of_task(reg, TASKS[0])

    def goes_on(change, past):
        other = mlp(6, 12, 4)
        other_optimizer = optimizer_kind(other.parameters(), lr=5e-3)
        other_reg = kind(other).attach(other_optimizer)
        other_reg.load_state_dict(past)
        change(other)
        recwarn.clear()
        run(other, other_optimizer, TASKS[1])
        return [str(one.message) for one in recwarn]

    said = goes_on(lambda other: None, reg.state_dict())
    assert len(said) == 1 and said[0].startswith("the model's weights differ from the anchors in the loaded state")
    assert goes_on(lambda other: other.load_state_dict(model.state_dict()), reg.state_dict()) == []

    def with_a_new_head(other):
        other.load_state_dict({**model.state_dict(), "2.weight": torch.randn(4, 12), "2.bias": torch.randn(4)})

    said = goes_on(with_a_new_head, reg.state_dict())
    assert len(said) == 1 and said[0].startswith("2.weight, 2.bias differ from the anchors in the loaded state")
    assert "reg.forget(p) for parameters that should start fresh" in said[0]
    with_forgotten = kind(mlp(6, 12, 4))
    with_forgotten.load_state_dict(reg.state_dict())
    for parameter in with_forgotten.model[2].parameters():
        with_forgotten.forget(parameter)
    assert goes_on(with_a_new_head, with_forgotten.state_dict()) == []
    run(model, optimizer, TASKS[1])  # in the middle of a task, weights are elsewhere
    assert goes_on(lambda other: None, reg.state_dict()) == []


def test_weights_that_do_not_matter_cannot_stand_for_those_that_do():
    def made():
        torch.manual_seed(0)
        return nn.ModuleDict({"body": nn.Linear(6, 4), "spare": nn.Linear(4, 2)})

    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = ALASSO(model).attach(optimizer)
    run(model["body"], optimizer, TASKS[0])
    reg.consolidate()
    other = made()  # the spare layer is the same, and has no importance
    ALASSO(other).attach(other_optimizer := torch.optim.SGD(other.parameters(), lr=0.1)).load_state_dict(
        reg.state_dict()
    )
    with pytest.warns(UserWarning, match="the model's weights differ from the anchors"):
        run(other["body"], other_optimizer, TASKS[1])


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_layer_remembers_goes_along_when_pruning_renames_its_weight(kind):
    model = mlp(6, 12, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = kind(model).attach(optimizer)
    run(model, optimizer, TASKS[0])
    end_of_task(reg, TASKS[0])
    omega = reg.importance()["0.weight"]
    assert omega.any()
    prune.random_unstructured(model[0], "weight", 0.2)
    reg.attach(optimizer)
    assert "0.weight" not in reg.importance() and torch.equal(reg.importance()["0.weight_orig"], omega)
    run(model, optimizer, TASKS[1])
    end_of_task(reg, TASKS[1])
    omega = reg.importance()["0.weight_orig"]
    prune.remove(model[0], "weight")
    reg.attach(optimizer)
    assert torch.equal(reg.importance()["0.weight"], omega)
    other = kind(mlp(6, 12, 4))
    other.load_state_dict(reg.state_dict())
    assert same(other.importance().values(), (reg.importance()[name] for name in other.importance()))


def test_a_layer_that_was_frozen_when_a_state_was_saved_is_told_of():
    model = mlp(6, 12, 4)
    model[0].requires_grad_(False)
    saved = ALASSO(model).state_dict()
    with pytest.raises(AlassoError, match=r"which the state lacks .*load first and unfreeze it then"):
        ALASSO(mlp(6, 12, 4)).load_state_dict(saved)
    reg = ALASSO(model)
    reg.load_state_dict(saved)
    model[0].requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg.attach(optimizer)
    run(model, optimizer, TASKS[0])
    reg.consolidate()
    assert reg.importance()["0.weight"].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_from_before_layers_were_frozen_comes_back_in_a_model_that_has_them_frozen(kind):
    model = mlp(6, 12, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = kind(model).attach(optimizer)
    run(model, optimizer, TASKS[0])
    end_of_task(reg, TASKS[0])
    model[0].requires_grad_(False)
    other = mlp(6, 12, 4)
    other.load_state_dict(model.state_dict())
    other[0].requires_grad_(False)
    other_reg = kind(other)
    other_reg.load_state_dict(reg.state_dict())
    assert set(other_reg.importance()) == set(reg.importance()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert same(other_reg.importance().values(), reg.importance().values())


@pytest.mark.parametrize("kind", [EWC, OnlineEWC])
def test_whose_labels_the_fisher_is_of_comes_back_with_the_strength_that_fits_it(kind):
    saved = kind(mlp(6, 12, 4), lam=0.3, labels="uniform").state_dict()
    other = kind(mlp(6, 12, 4))
    other.load_state_dict(saved)
    assert other.settings() == saved["settings"] and other.labels == "uniform" and other.surrogate.lam == 0.3
    with_loss = kind(mlp(6, 12, 4), loss=lambda output, y: (output - y).square().sum(1) / 2)
    with pytest.raises(AlassoError, match="leave labels=\"true\", not 'uniform'"):
        with_loss.load_state_dict(saved)
    assert with_loss.surrogate.lam == kind(mlp(6, 12, 4)).surrogate.lam  # refused whole
    del saved["settings"]["labels"]  # as states were at first
    other = kind(mlp(6, 12, 4), labels="expected")
    other.load_state_dict(saved)
    assert other.labels == "expected" and other.surrogate.lam == 0.3
    with pytest.raises(AlassoError, match="the state's settings are"):
        other.load_state_dict({**saved, "settings": {**saved["settings"], "color": 1}})


def test_going_on_in_a_new_process_gives_the_same_weights(tmp_path):
    script = textwrap.dedent("""
        import sys, torch
        sys.path.insert(0, sys.argv[2])
        from helpers import mlp, run, toy_tasks
        from alasso import ALASSO
        torch.set_num_threads(1)
        torch.manual_seed(0)
        folder, part = sys.argv[1], sys.argv[3]
        tasks = toy_tasks(3)
        model = mlp(6, 12, 4)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        reg = ALASSO(model).attach(optimizer)
        if part == "second":
            saved = torch.load(folder + "/middle.pt", weights_only=True)
            model.load_state_dict(saved["model"]); optimizer.load_state_dict(saved["optimizer"])
            reg.load_state_dict(saved["reg"])
        else:
            run(model, optimizer, tasks[0]); reg.consolidate(); run(model, optimizer, tasks[1][:3])
        if part == "first":
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "reg": reg.state_dict()},
                       folder + "/middle.pt")
            sys.exit()
        run(model, optimizer, tasks[1][3:]); reg.consolidate(); run(model, optimizer, tasks[2])
        torch.save(model.state_dict(), folder + f"/{part}.pt")
    """)
    tests = str(__import__("pathlib").Path(__file__).parent)
    for part in ("first", "second", "undisturbed"):
        subprocess.run([sys.executable, "-c", script, str(tmp_path), tests, part], check=True)
    second = torch.load(tmp_path / "second.pt", weights_only=True)
    undisturbed = torch.load(tmp_path / "undisturbed.pt", weights_only=True)
    assert same(second.values(), undisturbed.values())


def test_state_dict_is_a_snapshot_and_restores_settings():
    model = mlp(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = ALASSO(model, a=2.5, xi=0.02).attach(optimizer)
    run(model, optimizer, TASKS[0])
    saved = reg.state_dict()
    kept = copy.deepcopy(saved)
    run(model, optimizer, TASKS[1])
    assert same(saved["parameters"]["0.weight"].values(), kept["parameters"]["0.weight"].values())
    assert saved["steps"] == len(TASKS[0]) and saved["tasks"] == 0
    other = ALASSO(mlp(6, 4))
    other.load_state_dict(saved)
    assert (other.surrogate.a, other.surrogate.xi) == (2.5, 0.02)


def fresh(kind=ALASSO, *sizes):
    return kind(mlp(*(sizes or (6, 4))))


def broken(**changes):
    return {**fresh().state_dict(), **changes}


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (lambda: fresh(SI).state_dict(), "saved by SI, it cannot be loaded into ALASSO"),
        (
            lambda: fresh(ALASSO, 6, 5).state_dict(),
            r"0.weight has shape \(4, 6\), but the saved state is for \(5, 6\)",
        ),
        (lambda: fresh(ALASSO, 6, 5, 4).state_dict(), "the state has 2.bias, which the model lacks"),
        (lambda: broken(version=99), "version 99"),
        (lambda: broken(settings={"a": 1.0}), "settings"),
        (lambda: broken(parameters={}), "the model has 0.bias, which the state lacks"),
        (lambda: {"model": 1}, "not a saved regularizer"),
    ],
)
def test_loading_what_does_not_fit_is_refused_whole(saved, message):
    reg = fresh()
    before = reg.state_dict()
    with pytest.raises(AlassoError, match=message):
        reg.load_state_dict(saved())
    after = reg.state_dict()
    assert same(after["parameters"]["0.weight"].values(), before["parameters"]["0.weight"].values())


def test_consolidate_without_an_observed_step_is_loud():
    model = mlp(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = ALASSO(model)
    run(model, optimizer, TASKS[0])
    with pytest.raises(AlassoError, match="has seen no optimizer step"):
        reg.consolidate()
    reg.attach(optimizer)
    run(model, copy.deepcopy(optimizer), TASKS[0])  # a copy loses its hooks, silently
    with pytest.raises(AlassoError, match="a copied optimizer loses its hooks"):
        reg.consolidate()


def test_importance_that_is_zero_everywhere_is_loud_and_keeps_the_state():
    model = mlp(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    reg = ALASSO(model).attach(optimizer)
    run(model, optimizer, TASKS[0])
    with pytest.raises(AlassoError, match="zero for every weight"):
        reg.consolidate()
    assert reg.tasks == 0 and reg.steps == len(TASKS[0])


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("inf"), "infinite|NaN")])
def test_importance_that_is_not_finite_is_named_and_keeps_the_state(value, word):
    model = mlp(6, 5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = ALASSO(model).attach(optimizer)
    run(model, optimizer, TASKS[0])
    reg.consolidate()
    kept = reg.importance()
    run(model, optimizer, TASKS[1])
    with torch.no_grad():
        model[2].bias[1] = value
    with pytest.raises(AlassoError, match=rf"importance of 2\.bias is ({word})"):
        reg.consolidate()
    assert reg.tasks == 1 and same(kept.values(), reg.importance().values())


@pytest.mark.parametrize("kind", [EWC, OnlineEWC, MAS])
def test_an_empty_loader_is_loud(kind):
    reg = fresh(kind)
    with pytest.raises(AlassoError, match=r"empty|no batch|no sample"):
        reg.consolidate([])
    assert reg.tasks == 0


@pytest.mark.parametrize("kind", [EWC, OnlineEWC, MAS])
def test_a_method_that_measures_on_data_says_so_without_a_loader(kind):
    with pytest.raises(AlassoError, match="pass consolidate"):
        fresh(kind).consolidate()


def test_a_path_method_takes_a_loader_and_does_not_touch_it():
    model = mlp(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = ALASSO(model).attach(optimizer)
    run(model, optimizer, TASKS[0])

    def untouchable():
        raise AssertionError("read")
        yield

    reg.consolidate(untouchable())
    assert reg.tasks == 1


def test_fisher_labels_are_checked_when_the_method_is_made():
    with pytest.raises(AlassoError, match="labels must be one of true, sampled, expected"):
        EWC(mlp(2, 2), labels="guess")


def test_a_model_without_parameters_is_refused():
    with pytest.raises(AlassoError, match="no parameters"):
        ALASSO(nn.ReLU())


def test_a_layer_that_was_taken_out_of_the_model_stays_in_the_memory():
    model = nn.ModuleDict({"body": nn.Linear(6, 4), "old_head": nn.Linear(4, 2)})
    reg = ALASSO(model)
    before = set(reg.state_dict()["parameters"])
    del model["old_head"]
    reg.look()
    assert set(reg.importance()) == set(reg.anchor()) == before
    saved = reg.state_dict()
    assert set(saved["parameters"]) == {"body.weight", "body.bias"}  # the model that loads it has no such layer
    reg.load_state_dict(saved)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_state_that_is_not_finite_is_refused(broken):
    model = mlp(6, 12, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    reg = ALASSO(model).attach(optimizer)
    run(model, optimizer, TASKS[0])
    reg.consolidate()
    run(model, optimizer, TASKS[1])
    saved = copy.deepcopy(reg.state_dict())
    before = reg.penalty().item()
    name = next(iter(saved["parameters"]))
    saved["parameters"][name]["omega"] = torch.full_like(saved["parameters"][name]["omega"], broken)
    with pytest.raises(AlassoError, match=f"omega of {name} is not finite"):
        reg.load_state_dict(saved)
    assert reg.penalty().item() == before
    with pytest.raises(AlassoError, match="not a saved regularizer but NoneType"):
        reg.load_state_dict(None)
    with pytest.raises(AlassoError, match="its parameters are a NoneType, not a mapping"):
        reg.load_state_dict({**saved, "parameters": None})
    with pytest.raises(AlassoError, match="its settings are a NoneType, not a mapping"):
        reg.load_state_dict({**saved, "settings": None})
    with pytest.raises(AlassoError, match="its number of tasks is nan"):
        reg.load_state_dict({**saved, "tasks": float("nan")})
    with pytest.raises(AlassoError, match=f"the state of {name} holds NoneType"):
        reg.load_state_dict({**saved, "parameters": {**saved["parameters"], name: None}})
    with pytest.raises(AlassoError, match=rf"{name} has shape \(12, 6\), .* for \(3, 3\) \(omega\)"):
        wrong = {**saved["parameters"][name], "omega": torch.ones(3, 3)}
        reg.load_state_dict({**saved, "parameters": {**saved["parameters"], name: wrong}})
    saved["parameters"][name]["omega"] = 3
    with pytest.raises(AlassoError, match=f"omega of {name} is a int in the saved state, not a tensor"):
        reg.load_state_dict(saved)
    assert reg.penalty().item() == before


def learned(kind):
    """A regularizer in the middle of its second task."""
    torch.manual_seed(0)
    model = mlp(6, 12, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    reg = kind(model).attach(optimizer)
    run(model, optimizer, TASKS[0])
    reg.consolidate(TASKS[0])
    run(model, optimizer, TASKS[1][:4])
    return reg


ALL_KINDS = [*KINDS, IMM, KronALASSO]
FIELDS = [(kind, field) for kind in ALL_KINDS for field in fresh(kind).surrogate.State._fields]


def numbers(like, fill):
    return torch.full_like(like, fill)


WRONG = {
    "complex": lambda t: t.to(torch.complex64),
    "bool": lambda t: t.bool(),
    "int": lambda t: t.int(),
    "float8": lambda t: t.float().to(torch.float8_e5m2),
    "sparse": lambda t: t.to_sparse(),
    "meta": lambda t: t.to("meta"),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "one number": lambda t: torch.zeros(1, dtype=t.dtype),
    "one row more": lambda t: torch.zeros(len(t) + 1 if t.dim() else 2, *t.shape[1:], dtype=t.dtype),
    "not finite": lambda t: torch.full(t.shape, torch.nan),
    "a list": lambda t: t.tolist(),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(("kind", "field"), FIELDS, ids=lambda one: getattr(one, "__name__", one))
def test_a_field_of_another_kind_or_shape_is_refused_and_nothing_changes(kind, field):
    reg, other = learned(kind), fresh(kind, 6, 12, 4)
    saved, before = reg.state_dict(), other.state_dict()
    for what, wrong in WRONG.items():
        for name, tensors in saved["parameters"].items():
            changed = {**saved, "parameters": {**saved["parameters"], name: {**tensors, field: wrong(tensors[field])}}}
            with pytest.raises(AlassoError, match=name) as refused:
                other.load_state_dict(changed)
            assert "\n" not in str(refused.value), what
    assert content(other.state_dict()) == content(before)
    other.load_state_dict(saved)
    assert content(other.state_dict()) == content(saved)


def content(state):
    found = _digest.digest_of(state)
    assert found
    return found


NEVER_NEGATIVE = [
    *((kind, "omega") for kind in ALL_KINDS if kind is not KronALASSO),
    (EWC, "constant"),
    (IMM, "precision"),
    *(
        (KronALASSO, field)
        for field in ("unit", "steps", "tasks", "above", "below", "rows", "row_form", "past_columns")
    ),
]


@pytest.mark.parametrize(("kind", "field"), NEVER_NEGATIVE, ids=lambda one: getattr(one, "__name__", one))
def test_what_is_never_negative_is_refused_if_it_is(kind, field):
    """A spring of negative stiffness pushes away."""
    saved, other = learned(kind).state_dict(), fresh(kind, 6, 12, 4)
    before = other.state_dict()
    saved["parameters"]["2.weight"][field] = numbers(saved["parameters"]["2.weight"][field], -1)
    with pytest.raises(AlassoError, match=r"2\.weight must be 0 or more|2\.weight must be from 0|contradicts itself"):
        other.load_state_dict(saved)
    assert content(other.state_dict()) == content(before)


TOO_LARGE = [
    *((kind, "omega", 3e38) for kind in ALL_KINDS if kind not in (IMM, KronALASSO)),
    *((kind, "anchor", 3e38) for kind in ALL_KINDS if kind is not KronALASSO),
    (EWC, "constant", 3e38),
    (KronALASSO, "row_form", 1e30),
]


@pytest.mark.parametrize(("kind", "field", "value"), TOO_LARGE, ids=lambda one: getattr(one, "__name__", one))
def test_a_past_whose_penalty_overflows_is_refused_and_nothing_changes(kind, field, value):
    saved, other = learned(kind).state_dict(), fresh(kind, 6, 12, 4)
    before = other.state_dict()
    saved["parameters"]["2.weight"][field] = numbers(saved["parameters"]["2.weight"][field], value)
    with pytest.raises(AlassoError, match=r"the penalty of 2\.weight overflows with the saved state"):
        other.load_state_dict(saved)
    assert content(other.state_dict()) == content(before)


def test_numbers_that_overflow_in_the_models_precision_are_refused():
    saved = learned(SI).state_dict()
    saved["parameters"]["0.bias"]["path"] = numbers(saved["parameters"]["0.bias"]["path"].double(), 1e300)
    with pytest.raises(AlassoError, match=r"path of 0\.bias is not finite"):
        fresh(SI, 6, 12, 4).load_state_dict(saved)
    SI(mlp(6, 12, 4).double()).load_state_dict(saved)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_strong_past_and_huge_weights_that_never_mattered_come_back(kind):
    """Ω is large where xi = 0 and weights hardly moved; a mask of the least number trains along, and never moves."""
    saved, other = learned(kind).state_dict(), fresh(kind, 6, 12, 4)
    for tensors in saved["parameters"].values():
        if kind is not KronALASSO:
            says = "precision" if kind is IMM else "omega"
            tensors[says] = numbers(tensors[says], 1e30)
            tensors[says].view(-1)[0] = 0.0
            tensors["anchor"].view(-1)[0] = torch.finfo(torch.float32).min
    other.load_state_dict(saved)
    assert content(other.state_dict()) == content(saved)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_state_of_an_earlier_version_comes_back_whatever_the_settings_are_now(kind):
    """The first states held neither labels nor notes; what is strong is judged by the saved settings."""
    saved = learned(kind).state_dict()
    saved["settings"].pop("labels", None)
    del saved["notes"]
    for tensors in saved["parameters"].values():
        if "omega" in tensors and kind is not IMM:
            tensors["omega"] = numbers(tensors["omega"], 1e30)
    other = fresh(partial(kind, **{"c" if "c" in saved["settings"] else "lam": 1e15}), 6, 12, 4)
    other.load_state_dict(saved)
    assert other.settings() == learned(kind).settings()
    assert content(other.state_dict()["parameters"]) == content(saved["parameters"])


def test_codes_that_alasso_does_not_know_are_refused():
    saved = learned(ALASSO).state_dict()
    for code in (-2, 3, 127):
        saved["parameters"]["0.bias"]["side"] = numbers(saved["parameters"]["0.bias"]["side"], code)
        with pytest.raises(AlassoError, match=r"side of 0\.bias must be from -1 to 2 everywhere"):
            fresh(ALASSO, 6, 12, 4).load_state_dict(saved)


def test_sketches_of_another_rank_than_the_setting_come_back_and_those_that_contradict_each_other_do_not():
    saved = learned(partial(KronALASSO, rank=3)).state_dict()
    other = KronALASSO(mlp(6, 12, 4), rank=8)
    other.load_state_dict({**saved, "settings": other.settings()})
    assert other.rank == 8 and other.protected.states["0.weight"].rows.shape == (12, 4)
    of_one = saved["parameters"]["0.weight"]
    for field in ("rows", "past_columns"):
        wider = {**of_one, field: torch.zeros(len(of_one[field]), 6)}
        with pytest.raises(AlassoError, match=r"the state of 0\.weight contradicts itself"):
            other.load_state_dict({**saved, "parameters": {**saved["parameters"], "0.weight": wider}})
    for columns in (0, 14):
        odd = {**of_one, "row_form": torch.zeros(12, columns)}
        with pytest.raises(AlassoError, match=r"0\.weight has shape .*\(row_form\)"):
            other.load_state_dict({**saved, "parameters": {**saved["parameters"], "0.weight": odd}})


NUMBERS = [-1, True, "1", None, 10**400, float("nan"), torch.ones(3), [1], 1j]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_settings_and_counts_of_another_kind_are_refused_and_nothing_changes(kind):
    saved, other = learned(kind).state_dict(), fresh(kind, 6, 12, 4)
    before = other.state_dict()

    def refused(**changes):
        with pytest.raises(AlassoError) as error:
            other.load_state_dict({**saved, **changes})
        assert "\n" not in str(error.value)

    for name, now in saved["settings"].items():
        for wrong in NUMBERS:
            allowed = {True: isinstance(now, bool), None: name == "last_weight"}
            if not (isinstance(wrong, bool | None) and allowed[wrong]):
                refused(settings={**saved["settings"], name: wrong})
    for wrong in (*(w for w in NUMBERS if w is not None), 1.0, 2**63):
        refused(tasks=wrong)
        refused(steps=wrong)
        refused(notes=wrong)
    for wrong in NUMBERS:
        refused(version=wrong)
        refused(method=wrong)
        refused(parameters=wrong)
        refused(settings=wrong)
        refused(parameters={**saved["parameters"], 5: wrong})
        refused(settings={**saved["settings"], 5: wrong})
    note = saved["notes"]["0.bias"]
    for changes in (
        {"gradient": torch.tensor(-1.0)},
        {"gradient": torch.ones(2)},
        {"gradient": torch.tensor(1)},
        {"moved": torch.tensor(torch.inf)},
        {"moved": 0.5},
        {"factors": None},
        {"more": 1},
    ):
        refused(notes={**saved["notes"], "0.bias": {**note, **changes}})
    refused(notes={"nowhere": note})
    refused(notes={"0.bias": {}})
    assert content(other.state_dict()) == content(before)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_saved_state_that_would_be_trained_is_taken_as_numbers(kind):
    """A tensor that wants gradients could not be written to in a step."""
    saved = learned(kind).state_dict()
    for tensors in saved["parameters"].values():
        for tensor in tensors.values():
            tensor.requires_grad_(tensor.is_floating_point())
    model = mlp(6, 12, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reg = kind(model).attach(optimizer)
    reg.load_state_dict(saved)
    assert not any(t.requires_grad for state in reg.protected.states.values() for t in state)
