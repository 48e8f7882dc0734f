"""DDP and FSDP2 on real processes over gloo, against one process that sees the same batches whole."""

import pytest
import torch

from alasso import ALASSO

import distributed_cases as cases
from helpers import mlp, run, same, toy_tasks, weights

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")

CASES = [
    ("three tasks", kind, dtype, wrap)
    for wrap in ("ddp", "fsdp")
    for kind, dtype in [
        ("ALASSO", "float32"),
        ("ALASSO", "float64"),
        ("SI", "float32"),
        ("EWC", "float64"),
        ("OnlineEWC", "float32"),
        ("MAS", "float32"),
        ("IMM", "float64"),
    ]
] + [("warm start", "ALASSO", "float32", wrap) for wrap in ("ddp", "fsdp")]
KRON = [("KronALASSO", "ddp"), ("KronALASSO, path", "ddp"), ("KronALASSO, path", "fsdp")]
CASES += [("three tasks", kind, dtype, wrap) for kind, wrap in KRON for dtype in ("float32", "float64")]
CASES += [("experts", kind, "float64", "ddp") for kind in ("KronALASSO", "KronALASSO, path")]
CASES += [("evaluated", kind, "float32", wrap) for wrap in ("ddp", "fsdp-as-one") for kind in ("ALASSO", "EWC")]


def relative_difference(found, expected):
    """Largest difference in any tensor, relative to that tensor's largest entry."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-30))
        for name, value in expected.items()
    )


KINDS = ["ALASSO", "EWC"]  # EWC has a number a parameter in its state, beside numbers a weight


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    cases.launch(2, cases.case_all_on_two_ranks, folder, CASES, KINDS)
    return folder


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_two_ranks_equal_one_process(case, on_two_ranks, capsys):
    scenario, kind, dtype, wrap = case
    found = torch.load(on_two_ranks / f"{CASES.index(case)}.pt", weights_only=True)
    is_cut = (kind, wrap) == ("KronALASSO, path", "fsdp")  # into matrices of their own
    expected = cases.SCENARIOS[scenario](kind, dtype, "cut" if is_cut else "plain")
    if is_cut:
        expected["summary"] = cases.summary_of_wholes(expected["summary"], expected["importance"])
        expected |= {field: cases.whole_again(expected[field]) for field in ("weights", "importance", "anchor")}
    differences = {
        field: relative_difference(found[field], expected[field])
        for field in ("weights", "importance", "anchor", "summary")
    }
    with capsys.disabled():
        print(f"\n{' '.join(case):40} Ω {differences['importance']:.1e}, weights {differences['weights']:.1e}", end="")
    assert max(differences.values()) <= 1e-5
    assert any(value.any() for value in expected["importance"].values())
    assert float(found["penalty"]) == pytest.approx(float(expected["penalty"]), rel=1e-4)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_state_saved_by_two_ranks_goes_on_with_another_number(ranks, on_two_ranks):
    cases.launch(ranks, cases.case_load_and_go_on, on_two_ranks, KINDS)
    for kind in KINDS:
        expected = cases.three_tasks(kind, "float64", "plain")
        found = torch.load(on_two_ranks / f"{kind}_{ranks}.pt", weights_only=True)
        for field in ("weights", "importance", "anchor", "summary"):
            assert relative_difference(found[field], expected[field]) <= 1e-12, (kind, field)
        assert float(found["penalty"]) == pytest.approx(float(expected["penalty"]), rel=1e-10)


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_a_compiled_model_learns_as_the_plain_one(how):
    """The aot_eager backend runs all of torch.compile but the C++ compiler, and rounds as the plain model does."""
    outcomes = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = called = mlp(6, 12, 4)
        if compiled and how == "wrapped":
            called = torch.compile(model, backend="aot_eager")
        elif compiled:
            model.compile(backend="aot_eager")
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        reg = ALASSO(called, c=5.0).attach(optimizer)
        for task in toy_tasks(3):
            run(called, optimizer, task)
            reg.consolidate()
        outcomes.append((weights(model), list(reg.importance().values())))
    assert same(outcomes[0][0], outcomes[1][0]) and same(outcomes[0][1], outcomes[1][1])
