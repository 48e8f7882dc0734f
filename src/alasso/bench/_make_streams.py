"""From a config to its stream of tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import torch

from alasso.bench import data
from alasso.bench.config import RunConfig
from alasso.bench.data import ImageSet
from alasso.bench.labels import count_of
from alasso.bench.registry import BENCHMARKS
from alasso.bench.streams import Shelf, Stream, permuted, split, with_validation
from alasso.errors import AlassoError

CIFAR10_TASKS = 3  # the first tasks of split-cifar; the others come from CIFAR-100


def make_stream(config: RunConfig, data_dir: Path | None, device: torch.device) -> Stream:
    """Load the benchmark's data and lay out its tasks."""
    return make_streams([config], data_dir, device)[0]


def make_streams(configs: Sequence[RunConfig], data_dir: Path | None, device: torch.device) -> list[Stream]:
    """A stream for each config; data sets that several need are loaded once and lie on the device once."""
    shelf, load = Shelf(device), cache(partial(data.load, data_dir=data_dir))
    streams = [_stream(config, load, shelf) for config in configs]
    return [
        with_validation(stream, config.seed) if config.validation else stream
        for config, stream in zip(configs, streams, strict=True)
    ]


def _stream(config: RunConfig, load: Callable[[str], ImageSet], shelf: Shelf) -> Stream:
    if config.benchmark not in BENCHMARKS:
        raise AlassoError(f"{config.benchmark!r} names no built-in benchmark: pass the stream itself")
    if BENCHMARKS[config.benchmark].kind == "permuted":
        (name,) = BENCHMARKS[config.benchmark].data
        images = load(name)
        return permuted(images, _count(config), config.seed, permute_first=config.permute_first, device=shelf)
    if config.benchmark == "split-folder":
        assert config.path is not None and config.image_size is not None
        images = data.load_folder(Path(config.path), config.image_size)
        tasks, per_task = _folder_tasks(config, len(images.classes))
        every = config.tasks is None
        return split([(images, tasks)], per_task, config.seed, name=config.benchmark, all_classes=every, device=shelf)
    tasks, per_task = _count(config), config.classes_per_task or 2
    if config.benchmark == "split-cifar":
        first = min(tasks, CIFAR10_TASKS)
        sources = [(load("cifar10"), first)]
        if tasks > first:
            sources.append((load("cifar100"), tasks - first))
    else:
        sources = [(load("tiny-imagenet"), tasks)]
    return split(sources, per_task, config.seed, name=config.benchmark, size=config.image_size, device=shelf)


def inputs_and_classes(config: RunConfig) -> tuple[tuple[int, ...], int]:
    """Shape of an input, and how many classes there are, in the config's stream; no data are read for it."""
    if config.benchmark == "split-folder":
        assert config.path is not None and config.image_size is not None
        classes = len(data.folder_classes(config.path))
        tasks, per_task = _folder_tasks(config, classes)
        return (3, config.image_size, config.image_size), classes if config.tasks is None else tasks * per_task
    images = data.data_set(BENCHMARKS[config.benchmark].data[0])
    if BENCHMARKS[config.benchmark].kind == "permuted":
        return (math.prod(images.shape),), len(images.classes)
    channels, height, width = images.shape
    size = config.image_size
    return (channels, size or height, size or width), _count(config) * (config.classes_per_task or 2)


def left_over(config: RunConfig) -> str | None:
    """A line, before images are read, on classes of one's own that do not come out even; None if they do."""
    if config.benchmark != "split-folder" or config.path is None:
        return None
    try:
        classes = len(data.folder_classes(config.path))
    except AlassoError:  # said when the images are needed, which they are not if all runs are finished
        return None
    tasks, per_task = _folder_tasks(config, classes)
    over = classes - tasks * per_task
    if over <= 0:
        return None
    fate = "added to the tasks there are" if config.tasks is None else f"not used in {count_of(tasks, 'task')}"
    return f"{over} of {classes} classes left over, at {per_task} a task: {fate}"


def _folder_tasks(config: RunConfig, classes: int) -> tuple[int, int]:
    """How many tasks, of how many classes."""
    per_task = config.classes_per_task or 2
    return config.tasks or max(1, classes // per_task), per_task


def _count(config: RunConfig) -> int:
    if config.tasks is None:
        raise AlassoError(f"{config.benchmark} needs a number of tasks: --tasks N")
    return config.tasks
