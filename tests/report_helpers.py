"""Made-up results, probes and logs for tests of the report."""

from dataclasses import replace

import numpy as np

from alasso.bench import metrics
from alasso.bench.config import RunConfig
from alasso.bench.probe import Measured, Plan
from alasso.bench.results import Result

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"


def made_up(method="alasso", seed=0, tasks=6, benchmark="permuted-digits", fading=0.05, environment=None, **changes):
    """A result whose accuracies fade with the age of a task."""
    if method == "alasso":
        changes.setdefault("c", 1.0)  # whatever a search may have chosen for the benchmark
    config = RunConfig.for_benchmark(benchmark, method, tasks=tasks, seed=seed, **changes)
    noise = np.random.default_rng([seed, tasks]).uniform(-0.02, 0.0, (tasks, tasks))
    rows = [[round(0.97 - fading * (t - j) + float(noise[t, j]), 4) for j in range(t + 1)] for t in range(tasks)]
    ahead, untrained = [0.1] * (tasks - 1), [0.1] * tasks
    return Result(
        config=config,
        environment={"cpu": "abacus", "finished": f"2025-01-0{seed + 1}", **(environment or {})},
        data={"digits": "1"},
        accuracy=rows,
        ahead=ahead,
        untrained=untrained,
        metrics=metrics.summary(rows, ahead=ahead, untrained=untrained),
        seconds=12.5 + seed,
        peak_memory=10**6,
    )


def several(**changes):
    """Three methods, two seeds, and every variant of ALASSO the paper shows."""
    found = []
    for seed in (0, 1):
        found += [made_up(m, seed, fading=f, **changes) for m, f in (("sgd", 0.1), ("si", 0.06), ("alasso", 0.01))]
        found.append(made_up("alasso", seed, fading=0.04, omega_rule="si", **changes))
        found.append(made_up("alasso", seed, fading=0.03, a=1.0, epsilon=0.0, **changes))
        found.append(made_up("alasso", seed, fading=0.02, a_prime=1.8, c_prime=1.0, **changes))
        found += [made_up("alasso", seed, fading=0.02 + 0.001 * a, a=a, **changes) for a in (0.8, 1.0, 5.0)]
    return found


def several_settings():
    """Further settings of one method, and of a named variant of it, beside other methods."""
    results = [made_up(a=a) for a in (0.8, 1.8, 2.0, 3.0, 4.0, 5.0)] + [made_up(adam_eps=1e-7)]
    results += [made_up(a=1.0, epsilon=0.0, c=c) for c in (0.5, 1.0)]
    return [*results, *map(made_up, ("si", "ewc", "single-task"))]


def measured(lines, **changes):
    """A probe of these lines at the offsets −1, 0 and 1."""
    found = Measured(
        config={"model": "mlp", "benchmark": "x", "seed": 0},
        plan=Plan(weights=len(lines), offsets=3),
        seconds=1.0,
        accuracy=0.9,
        offsets=[-1.0, 0.0, 1.0],
        weights=[f"w[{k}]" for k in range(len(lines))],
        losses=lines,
        importance=[0.5] * len(lines),
        came_from=[0.1] * len(lines),
        springs=[[0.5, 0.9]] * len(lines),
        environment={},
        examples=100,
    )
    return replace(found, **changes)


LOG = """seconds,task,epoch,loss,penalty,learned,mean_accuracy
1,1,1,0.9,0,,
2,1,2,0.5,0,,
2.1,1,,,,0.9,0.9
3,2,1,0.8,0.1,,
0.5,1,2,0.4,0,,
0.6,1,,,,0.95,0.95
0.9,2,1,0.7,0.2,,
1.1,2,2,0.6"""
