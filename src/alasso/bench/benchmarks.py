"""From a config to its stream of tasks."""

from __future__ import annotations

from pathlib import Path

import torch

from alasso.bench import data
from alasso.bench.catalog import BENCHMARKS
from alasso.bench.config import RunConfig
from alasso.bench.streams import Stream, permuted, split, with_validation
from alasso.errors import AlassoError

CIFAR10_TASKS = 3  # the first tasks of split-cifar; the others come from CIFAR-100


def make_stream(config: RunConfig, data_dir: Path | None, device: torch.device) -> Stream:
    """Load the benchmark's data and lay out its tasks."""
    stream = _stream(config, data_dir, device)
    return with_validation(stream, config.seed) if config.validation else stream


def _stream(config: RunConfig, data_dir: Path | None, device: torch.device) -> Stream:
    if config.benchmark not in BENCHMARKS:
        raise AlassoError(f"{config.benchmark!r} names no built-in benchmark: pass the stream itself")
    if config.benchmark.startswith("permuted-"):
        (name,) = BENCHMARKS[config.benchmark].data
        images = data.load(name, data_dir)
        return permuted(images, _count(config), config.seed, permute_first=config.permute_first, device=device)
    if config.benchmark == "split-folder":
        assert config.path is not None and config.image_size is not None
        images = data.load_folder(Path(config.path), config.image_size)
        per_task = config.classes_per_task or 2
        tasks = config.tasks or max(1, len(images.classes) // per_task)
        every = config.tasks is None
        return split([(images, tasks)], per_task, config.seed, name=config.benchmark, all_classes=every, device=device)
    tasks, per_task = _count(config), config.classes_per_task or 2
    if config.benchmark == "split-cifar":
        first = min(tasks, CIFAR10_TASKS)
        sources = [(data.load("cifar10", data_dir), first)]
        if tasks > first:
            sources.append((data.load("cifar100", data_dir), tasks - first))
    else:
        sources = [(data.load("tiny-imagenet", data_dir), tasks)]
    return split(sources, per_task, config.seed, name=config.benchmark, size=config.image_size, device=device)


def _count(config: RunConfig) -> int:
    if config.tasks is None:
        raise AlassoError(f"{config.benchmark} needs a number of tasks: --tasks N")
    return config.tasks
