"""Experiments, results and probes with made-up numbers, and a small paper folder that can be run."""

import json
from dataclasses import replace

from alasso.bench import metrics
from alasso.bench.probe import Measured, Plan
from alasso.bench.reproduce.claims import Claim
from alasso.bench.reproduce.experiments import Evidence, Experiment
from alasso.bench.reproduce.statistics import COMPUTATIONS
from alasso.bench.results import Result

SMALL = {"tasks": 3, "epochs": 1, "hidden": 8}
PROBED = {"weights": 3, "offsets": 3, "examples": 5}


def experiment(name="x", **changes):
    runs = {"alasso": {}, "si": {}, "ewc": {}, "single-task": {}}
    given = {"title": "X", "paper": "Fig. 1", "benchmark": "permuted-digits", "seeds": 2, "runs": runs, "fields": SMALL}
    return Experiment(id=name, **{**given, **changes})


def result(config, final, *, learned=0.9, halfway=None, data=None):
    """Accuracies that end in ``final``: a number for all tasks, or one for each."""
    tasks = config.tasks
    last = final if isinstance(final, list) else [final] * tasks
    rows = [[learned] * (t + 1) for t in range(tasks - 1)] + [last]
    if halfway is not None:
        rows[tasks // 2 - 1] = [halfway] * (tasks // 2)
    return of_rows(config, rows, data)


def of_rows(config, rows, data=None):
    ahead, untrained = [0.1] * (len(rows) - 1), [0.1] * len(rows)
    return Result(
        config=config,
        environment={"cpu": "abacus", "torch": "2", "commit": "0123456789", "finished": "2025"},
        data=data or {"digits": "scikit-learn"},
        accuracy=rows,
        ahead=ahead,
        untrained=untrained,
        metrics=metrics.summary(rows, ahead=ahead, untrained=untrained),
        seconds=10.0,
        peak_memory=1,
    )


def evidence(finals, one=None, **changes):
    """``finals``: run → final accuracy of each seed, or seed → final accuracy."""
    one = one or experiment()
    seeds = {run: dict(enumerate(of)) if isinstance(of, list) else of for run, of in finals.items()}
    found = [result(one.config(run, s), f, **changes) for run, of in seeds.items() for s, f in of.items()]
    return Evidence({one.id: one}, found)


def probe(one, seed=0, came_from=(-0.5, -0.5, 0.5), **changes):
    """Two weights from the left, one from the right: losses over offsets −1, 0, 1."""
    found = Measured(
        config=one.config("alasso", seed).to_json(),
        plan=Plan(**one.probe),
        seconds=1.0,
        accuracy=0.9,
        offsets=[-1.0, 0.0, 1.0],
        weights=["a[0]", "a[1]", "a[2]"],
        losses=[[1.2, 1.0, 2.0], [1.4, 1.0, 2.0], [3.0, 1.0, 1.2]],
        importance=[0.5, 1.5, 1.0],
        came_from=list(came_from),
        springs=[[2.0, 2.0]] * 3,
        environment={},
        examples=5,
    )
    return replace(found, **changes)


def computed(how, known, **arguments):
    return COMPUTATIONS[how](known, **arguments)


def claim(**changes):
    given = {"id": "c", "topic": "T", "where": "Table 1", "says": "it is", "why": "so", "how": "mean"}
    return Claim(**{**given, "arguments": {"of": "x/si"}, "paper": 0.6, **changes})


# -- a folder that can be run -------------------------------------------------------------------------------------

FIELDS = """benchmark = "permuted-digits"
[fields]
tasks = 3
epochs = 1
hidden = 8
[runs]
"""
EXPERIMENT = f"""
title = "Small"
paper = "Fig. 1"
seeds = 1
{FIELDS}alasso = {{}}
si = {{}}
"a=3" = {{ method = "alasso", a = 3.0 }}
"""
SHARING = f"""
title = "Shares two runs with the other one"
seeds = 2
{FIELDS}plain = {{ method = "alasso" }}
si = {{}}
sgd = {{}}
"""
PROBE = f"""
title = "Probe"
{FIELDS}alasso = {{}}
[probe]
weights = 3
offsets = 3
examples = 5
"""
CLAIMS = """
[[claim]]
id = "gap"
topic = "Small"
where = "Fig. 1"
says = "ALASSO is above SI"
paper = 0.1
at_least = -1.0
why = "anything is"
how = "difference"
of = "small/alasso"
less = "small/si"

[[claim]]
id = "loss"
topic = "Small"
where = "Fig. 2"
says = "losses are uneven"
at_most = 2.0
why = "anything is"
how = "probe_evenness"
of = "probe/alasso"

[[untested]]
where = "Fig. 3"
says = "It is nice."
why = "A matter of taste."
"""
TEMPLATE = "# Small\n\n{{tally}}\n\n{{verdicts}}\n\n{{table small}}\n\n{{figure mean-accuracy small}}\n"


def small_paper(folder):
    """Experiments, claims and template, small enough to run."""
    (folder / "experiments").mkdir(parents=True)
    for name, text in (("small", EXPERIMENT), ("sharing", SHARING), ("probe", PROBE)):
        (folder / "experiments" / f"{name}.toml").write_text(text)
    (folder / "claims.toml").write_text(CLAIMS)
    (folder / "template.md").write_text(TEMPLATE)
    return folder


def as_lines(results, path):
    """Several results in one JSON-lines file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one.to_json()) + "\n" for one in results))
    return path
