"""What is missing is planned once, estimated by the slowest run that is known, and carried out part by part."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from alasso import AlassoError
from alasso.bench.config import RunConfig
from alasso.bench.reproduce import plan as plans
from alasso.bench.reproduce.experiments import Evidence, read_experiments
from alasso.bench.reproduce.plan import carry_out, check_data, estimate, make_plan, roughly
from alasso.bench.results import Divergence
from alasso.bench.training.sweep import Options, SomeDiverged, Stopped

from made_up import experiment, probe, result, small_paper


@pytest.fixture
def experiments(tmp_path):
    return read_experiments(small_paper(tmp_path / "paper"))


def planned(experiments, found=(), seeds=None, shard=None, **known):
    return make_plan(experiments.values(), Evidence(experiments, found, **known), seeds, shard)


def test_shared_runs_are_planned_once_and_finished_ones_not_at_all(experiments):
    nothing = planned(experiments)
    (part,) = nothing.parts
    # small: alasso, si, a=3; sharing: the same alasso and si with a second seed, and sgd with two.
    assert (len(part.missing), part.present, part.title) == (7, 0, "permuted-digits, 3 tasks")
    assert len({config.name for config in part.missing}) == 7 and part.used_by == ["sharing", "small"]
    assert nothing.to_do() == "7 runs and 1 probe" and not nothing.empty
    assert len(planned(experiments, seeds=3).missing) == 4 * 3

    found = [result(config, 0.5) for config in part.missing]
    done = planned(experiments, found, probes=[probe(experiments["probe"])])
    assert done.empty and done.present == 8
    again = planned(experiments, found[:2] + found[3:], probes=[probe(experiments["probe"], seed=1)])
    assert again.missing == [found[2].config] and again.to_do() == "1 run and 1 probe" and again.present == 6


def test_shards_share_what_there_is_to_do_whoever_begins(experiments):
    """A shard stays the same while the others finish their runs."""
    nothing, early = planned(experiments), planned(experiments, shard="1/3").missing
    found = [result(config, 0.5) for config in early]
    shares = [planned(experiments, found, shard=f"{i}/3") for i in (1, 2, 3)]
    assert not shares[0].missing and shares[0].parts[0].present == len(early)
    names = [config.name for config in early] + [c.name for share in shares for c in share.missing]
    assert sorted(names) == sorted(config.name for config in nothing.missing)
    assert [probe for share in shares for probe in share.probes] == nothing.probes
    assert sum(share.present for share in shares) == len(early)


def test_parts_differ_in_benchmark_or_tasks(experiments):
    more = {**experiments, "more": experiment("more", fields={"tasks": 5, "hidden": 8}, runs={"si": {}})}
    assert [(part.title, len(part.missing)) for part in planned(more, seeds=1).parts] == [
        ("permuted-digits, 3 tasks", 4),
        ("permuted-digits, 5 tasks", 1),
    ]


def test_a_run_that_diverged_is_not_tried_again(experiments):
    early = experiments["small"].config("si")
    found = planned(experiments, notes=[Divergence(early, 2, "it grew")])
    assert found.diverged == [early] and early not in found.missing and len(found.missing) == 6


# -- how long it takes ----------------------------------------------------------------------------------------------


def test_the_estimate_is_the_slowest_known_run_by_tasks_and_epochs():
    one = experiment()
    slow = replace(result(one.config("si"), 0.5), seconds=30.0)  # 10 s a task of one epoch
    fast = replace(result(one.config("si", 1), 0.5), seconds=3.0, environment={"gpu": "loom"})
    more = RunConfig.for_benchmark("permuted-digits", "si", tasks=4, epochs=2)
    assert estimate([more], [fast, slow]) == (80.0, "abacus")
    assert estimate([more, one.config("si")], [fast]) == (4 * 2 + 3, "loom")
    assert estimate([more, one.config("ewc")], [fast, slow]) is None  # of EWC nothing is known
    assert estimate([], []) == (0.0, "")
    assert roughly(89) == "89 s" and roughly(91) == "1.5 min" and roughly(6000) == "1.7 h"


# -- carrying out ---------------------------------------------------------------------------------------------------


@pytest.fixture
def carried(monkeypatch):
    """What is trained and measured, with nothing trained."""
    seen = SimpleNamespace(trained=[], probed=[], sweep=lambda configs: None)

    def train(configs, options, console):
        seen.trained.append(list(configs))
        seen.sweep(configs)

    def measure(config, plan, **options):
        seen.probed.append((config, plan))
        return SimpleNamespace(as_file=lambda: b"measured")

    monkeypatch.setattr(plans.sweep, "carry_out", train)
    monkeypatch.setattr(plans, "probe_first_task", measure)
    return seen


def test_parts_come_first_and_probes_last(experiments, carried, tmp_path):
    lines = []
    found = planned(experiments)
    carry_out(found, Options(tmp_path / "out"), Console(), lines.append)
    assert carried.trained == [found.missing] and lines == ["permuted-digits, 3 tasks: 7 runs"]
    ((config, plan),) = carried.probed
    assert (config, plan.weights) == (experiments["probe"].config("alasso"), 3)
    assert (tmp_path / "out" / f"{config.name}.probe.json").read_bytes() == b"measured"


def test_a_run_that_diverges_does_not_stop_the_others_but_ctrl_c_does(experiments, carried, tmp_path, capsys):
    more = {**experiments, "more": experiment("more", fields={"tasks": 5, "hidden": 8}, runs={"si": {}})}

    def diverge_then_stop(configs):
        if len(carried.trained) == 1:
            raise SomeDiverged("alasso, seed 0: the training diverged", [])
        raise Stopped("task 2, epoch 1, step 3")

    carried.sweep = diverge_then_stop
    with pytest.raises(Stopped, match="task 2"):
        carry_out(planned(more), Options(tmp_path), Console(), lambda line: None)
    assert len(carried.trained) == 2 and not carried.probed
    assert "alasso, seed 0: the training diverged" in capsys.readouterr().out


def test_a_stop_in_the_last_moments_of_a_part_is_heard(experiments, carried, tmp_path, monkeypatch):
    import signal

    carried.sweep = lambda configs: signal.raise_signal(signal.SIGINT)
    with pytest.raises(Stopped, match="the end of a part"):
        carry_out(planned(experiments), Options(tmp_path), Console(), lambda line: None)
    assert len(carried.trained) == 1 and not carried.probed


def test_missing_data_are_named_with_what_to_do(experiments, tmp_path):
    check_data(planned(experiments), list(experiments.values()), tmp_path)  # the digits come with scikit-learn
    mnist = experiment("mnist", benchmark="permuted-mnist", fields={"tasks": 2})
    both = {**experiments, "mnist": mnist}
    with pytest.raises(AlassoError) as caught:
        check_data(planned(both), list(both.values()), tmp_path / "nowhere")
    said = "data not found: mnist; name their folder with --data-dir, or run `alasso data fetch mnist`"
    assert str(caught.value) == f"{said}; or do without: --skip mnist"
