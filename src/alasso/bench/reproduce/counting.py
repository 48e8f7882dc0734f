"""How much there is to do in a run: optimizer steps, and answers to test examples. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterable

from alasso.bench.config import RunConfig
from alasso.bench.registry import BENCHMARKS

#: Training examples of a task, by benchmark; split CIFAR's first three tasks come from CIFAR-10.
EXAMPLES = {name: one.examples[0] for name, one in BENCHMARKS.items() if one.examples}
#: Test examples likewise.
TESTED = {name: one.examples[1] for name, one in BENCHMARKS.items() if one.examples}


def task_sizes(config: RunConfig, each: int) -> list[int]:
    """Examples of every task, of which there are ``each`` in a task, or in a class where tasks split the classes."""
    tasks = config.tasks or 1
    if BENCHMARKS[config.benchmark].kind == "permuted":
        return [each] * tasks
    sizes = [each * (config.classes_per_task or 1)] * tasks
    if config.benchmark == "split-cifar":
        sizes[:3] = [10 * size for size in sizes[:3]]
    return sizes


def batches(examples: int, config: RunConfig) -> int:
    return -(-examples // config.batch_size)


def steps_of(config: RunConfig) -> int:
    """Optimizer steps of a whole run, on a benchmark whose size is known beforehand."""
    return config.epochs * sum(batches(size, config) for size in task_sizes(config, EXAMPLES[config.benchmark]))


def steps_in(trained: Iterable[RunConfig]) -> int:
    return sum(steps_of(config) for config in trained)


# -- beside the steps ---------------------------------------------------------------------------------------------


def is_variational(config: RunConfig) -> bool:
    return config.method.startswith("vcl")


def slow_kind(config: RunConfig) -> str:
    """Methods of a kind take about as long a step; these, several times as long as the others, of which it is empty."""
    if not is_variational(config):
        return ""
    return "VCL with coresets" if coreset_steps(config) else "VCL"


def answers_of(config: RunConfig) -> int:
    """Test examples answered: of each task before all training, before its own, and after it and each that follows."""
    sizes = task_sizes(config, TESTED[config.benchmark])
    once = config.method == "single-task"  # the networks of earlier tasks stay as they are
    return sum(size * (1 + (t > 0) + (1 if once else len(sizes) - t)) for t, size in enumerate(sizes))


def coreset_steps(config: RunConfig) -> int:
    """Of VCL's training on the coresets of all tasks so far, which comes before the answers after each task."""
    epochs, size = (int(config.settings.get(name, 0)) for name in ("coreset_epochs", "coreset"))
    return epochs * sum(batches(size * (t + 1), config) for t in range(config.tasks or 1))


def plain_steps(config: RunConfig) -> int:
    """Of the plain network whose weights VCL starts from, on the first task."""
    first = task_sizes(config, EXAMPLES[config.benchmark])[0]
    return int(config.settings.get("point_epochs", 0)) * batches(first, config)
