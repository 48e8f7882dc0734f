"""Streams of tasks: what a benchmark shows a learner, one task after another.

A task is a view: the images lie once on the training device, as bytes where they came as bytes, and a task says which
rows of them, in which order of pixels, it is made of. Nothing is loaded by workers, and every permutation and class
order is drawn from the seed when the stream is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alasso.bench import data
from alasso.bench.config import RunConfig, count_of
from alasso.bench.data import ImageSet
from alasso.bench.data.editions import OWN_DATA
from alasso.bench.registry import BENCHMARKS
from alasso.errors import AlassoError

Pair = tuple[Any, Any]
CIFAR10_TASKS = 3  # the first tasks of split-cifar; the others come from CIFAR-100
SAMPLED_EXAMPLES, SAMPLED_VALUES = 32, 1024  # for a fingerprint, of each task's halves; of each of these examples


@dataclass(frozen=True)
class Examples:
    """Labelled examples. ``labels`` are columns of the network's head, ``rows`` picks the examples of a task."""

    images: Tensor
    labels: Tensor
    rows: Tensor | None = None
    pixels: Tensor | None = None  # permutation of the flattened image
    scale: float = 1.0
    size: int | None = None  # images are brought to size × size

    def __len__(self) -> int:
        return len(self.labels if self.rows is None else self.rows)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs as floats and labels of the examples at ``index``."""
        rows = index if self.rows is None else self.rows[index]
        x = self.images[rows]
        if self.pixels is not None:
            x = x[:, self.pixels]
        x = x.float()
        if self.scale != 1.0:
            x = x / self.scale
        if self.size is not None and x.shape[-1] != self.size:
            x = torch.nn.functional.interpolate(x, size=(self.size, self.size), mode="bilinear", antialias=True)
        return x, self.labels[rows]


@dataclass(frozen=True)
class Task:
    """One task: what to learn from, what to be measured on, and which columns of the head it may answer with."""

    name: str
    train: Examples
    test: Examples
    head: slice


@dataclass(frozen=True)
class Stream:
    """All tasks of a benchmark in their order."""

    name: str
    tasks: tuple[Task, ...]
    input_shape: tuple[int, ...]
    classes: int
    editions: dict[str, str]

    def __len__(self) -> int:
        return len(self.tasks)

    @staticmethod
    def of(
        tasks: Sequence[Pair], *, name: str = "own data", heads: str = "shared", device: torch.device | str = "cpu"
    ) -> Stream:
        """Makes a stream of your own data. Results record its name, and a fingerprint of the examples.

        Args:
            tasks: A pair (train, test) for each task, each half a torch Dataset or a pair of tensors (x, y). Inputs are
                taken as they are, as floats.
            name: What results call the data.
            heads: ``"shared"``, all tasks answer with the same classes; or ``"own"``, each task has columns of its own,
                and in training and testing the softmax is over these alone.
            device: Where the examples go, if there is room.

        Returns:
            The stream.

        Raises:
            AlassoError: The data do not go together, or a task is tested on labels that are not trained on.
        """
        return _own_stream(tasks, name, heads, torch.device(device))

    @staticmethod
    def from_hf(
        dataset: Any,
        *,
        image: str = "image",
        label: str = "label",
        test: str = "test",
        classes_per_task: int = 2,
        size: int | None = None,
        seed: int = 0,
        name: str = "own data",
        device: torch.device | str = "cpu",
    ) -> Stream:
        """Makes a stream of a data set of Hugging Face's ``datasets``, so many of its classes a task.

        Each task has columns of its own. Classes that are left over go to the first tasks, one more each.

        Args:
            dataset: A DatasetDict, trained on its split ``"train"``; or one Dataset, of which a fifth of every class,
                always the same, is tested on. Anything that iterates over rows, mappings of columns, does as well.
            image: The column of images: Pillow's; or arrays, grey or in colour, with channels first or last. Whole
                numbers are divided by 255, floats are taken as they are.
            label: The column of labels: whole numbers from 0 on, or texts.
            test: The split that is tested on.
            classes_per_task: Classes in each task.
            size: Images are brought to size × size pixels.
            seed: Of the order of the classes.
            name: What results call the data.
            device: Where the images go, if there is room.

        Returns:
            The stream.

        Raises:
            AlassoError: A split or a column is missing, or does not hold what it should.
        """
        images = data.load_rows(dataset, image=image, label=label, test=test, size=size, name=name)
        count = max(1, len(images.classes) // max(1, classes_per_task))
        stream = split([(images, count)], classes_per_task, seed, name=name, size=size, all_classes=True, device=device)
        return replace(stream, editions={})  # a run adds the fingerprint


def permuted(
    images: ImageSet, count: int, seed: int, *, permute_first: bool = False, device: torch.device | str = "cpu"
) -> Stream:
    """Task t shows every image with its pixels in an order of its own; the first order is the identity by default."""
    train, test = (
        _placed(torch.from_numpy(part), device).flatten(1) for part in (images.train_images, images.test_images)
    )
    y_train, y_test = _labels(images.train_labels, train.device), _labels(images.test_labels, test.device)
    pixels = train.shape[1]
    generator = np.random.default_rng([seed, 0])
    tasks = []
    for t in range(count):
        order = np.arange(pixels) if t == 0 and not permute_first else generator.permutation(pixels)
        at = torch.from_numpy(order).to(train.device)
        tasks.append(
            Task(
                name=f"permutation {t + 1}",
                train=Examples(train, y_train, pixels=at, scale=images.scale),
                test=Examples(test, y_test, pixels=at, scale=images.scale),
                head=slice(0, len(images.classes)),
            )
        )
    return Stream(
        f"permuted-{images.name}", tuple(tasks), (pixels,), len(images.classes), {images.name: images.edition}
    )


def split(
    sources: Sequence[tuple[ImageSet, int]],
    classes_per_task: int,
    seed: int,
    *,
    name: str,
    size: int | None = None,
    all_classes: bool = False,
    device: torch.device | str = "cpu",
) -> Stream:
    """From each source in turn, so many tasks of ``classes_per_task`` classes each; class order from the seed.

    One head for all: task t answers with its own columns, in the order in which the classes come. ``all_classes``:
    classes that are left over go to the first tasks, one more each, and none is dropped.
    """
    if classes_per_task < 2:
        raise AlassoError(f"a task needs at least 2 classes to choose between, not {classes_per_task}")
    tasks: list[Task] = []
    for number, (images, count) in enumerate(sources):
        needed = count * classes_per_task
        if needed > len(images.classes):
            raise AlassoError(
                f"{count_of(count, 'task')} of {classes_per_task} classes need {needed} classes, {images.name} has "
                f"{len(images.classes)}; ask for fewer tasks or classes"
            )
        order = np.random.default_rng([seed, 1, number]).permutation(len(images.classes))
        groups = np.array_split(order if all_classes else order[:needed], count)
        tasks += _class_tasks(images, groups, tasks[-1].head.stop if tasks else 0, size, device)
    first = tasks[0].train.images
    shape = tuple(first.shape[1:]) if size is None else (first.shape[1], size, size)
    editions = {images.name: images.edition for images, _ in sources}
    return Stream(name, tuple(tasks), shape, tasks[-1].head.stop, editions)


def with_validation(stream: Stream, seed: int, share: float = 1 / 6) -> Stream:
    """The same stream with a share of each task's training examples in place of its test examples."""
    tasks = []
    for t, task in enumerate(stream.tasks):
        rows = torch.arange(len(task.train)) if task.train.rows is None else task.train.rows.cpu()
        order = torch.from_numpy(np.random.default_rng([seed, 2, t]).permutation(len(rows)))
        held_out, kept = rows[order].tensor_split([max(1, round(share * len(rows)))])
        on = task.train.images.device
        tasks.append(
            replace(
                task,
                train=replace(task.train, rows=kept.sort().values.to(on)),
                test=replace(task.train, rows=held_out.sort().values.to(on)),
            )
        )
    return replace(stream, tasks=tuple(tasks))


def _class_tasks(
    images: ImageSet,
    groups: Sequence[np.ndarray[Any, Any]],
    first_column: int,
    size: int | None,
    device: torch.device | str,
) -> list[Task]:
    train, test = (_placed(torch.from_numpy(part), device) for part in (images.train_images, images.test_images))
    in_order = np.concatenate(groups)
    column = np.full(len(images.classes), -1)
    column[in_order] = np.arange(len(in_order)) + first_column
    y_train, y_test = column[images.train_labels], column[images.test_labels]
    tasks = []
    for group in groups:
        halves = []
        for pixels, labels, known in ((train, images.train_labels, y_train), (test, images.test_labels, y_test)):
            rows = torch.from_numpy(np.flatnonzero(np.isin(labels, group))).to(pixels.device)
            halves.append(Examples(pixels, _labels(known, pixels.device), rows=rows, scale=images.scale, size=size))
        names = ", ".join(images.classes[c] for c in group)
        head = slice(first_column, first_column + len(group))
        first_column = head.stop
        tasks.append(Task(f"{images.name}: {names}", halves[0], halves[1], head))
    return tasks


# -- streams of the benchmarks -----------------------------------------------------------------------------------


def make_stream(config: RunConfig, data_dir: Path | None, device: torch.device) -> Stream:
    """Loads a benchmark's data and lays out its tasks.

    Args:
        config: Names the benchmark, and what of it.
        data_dir: Folder with the data sets; a cache if None.
        device: Where the images go, if there is room.

    Returns:
        The stream.

    Raises:
        AlassoError: The data are not there, or do not make such tasks.
    """
    stream = _stream(config, partial(data.load, data_dir=data_dir), device)
    return with_validation(stream, config.seed) if config.validation else stream


def _stream(config: RunConfig, load: Callable[[str], ImageSet], device: torch.device) -> Stream:
    if config.benchmark not in BENCHMARKS:
        raise AlassoError(f"{config.benchmark!r} names no built-in benchmark: pass the stream itself")
    if config.tasks is None and config.benchmark != "split-folder":
        raise AlassoError(f"{config.benchmark} needs a number of tasks: --tasks N")
    tasks, per_task = config.tasks or 1, config.classes_per_task or 2
    if BENCHMARKS[config.benchmark].kind == "permuted":
        (name,) = BENCHMARKS[config.benchmark].data
        return permuted(load(name), tasks, config.seed, permute_first=config.permute_first, device=device)
    if config.benchmark == "split-folder":
        assert config.path is not None and config.image_size is not None
        images = data.load_folder(Path(config.path), config.image_size)
        tasks, per_task = _folder_tasks(config, len(images.classes))
        every = config.tasks is None
        return split([(images, tasks)], per_task, config.seed, name=config.benchmark, all_classes=every, device=device)
    if config.benchmark == "split-cifar":
        first = min(tasks, CIFAR10_TASKS)
        sources = [(load("cifar10"), first)]
        if tasks > first:
            sources.append((load("cifar100"), tasks - first))
    else:
        sources = [(load("tiny-imagenet"), tasks)]
    return split(sources, per_task, config.seed, name=config.benchmark, size=config.image_size, device=device)


def left_over(config: RunConfig) -> str | None:
    """A line, before images are read, on classes that do not come out even; None if they do."""
    if config.benchmark != "split-folder" or config.path is None:
        return None
    try:
        classes = len(data.folder_classes(config.path))
    except AlassoError:  # said where the images are needed
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


# -- streams of the user ---------------------------------------------------------------------------------------


def _own_stream(pairs: Sequence[Pair], name: str, heads: str, device: torch.device) -> Stream:
    if heads not in ("shared", "own"):
        raise AlassoError(f"heads must be shared or own, not {heads!r}")
    try:
        pairs = [(train, test) for train, test in pairs]
    except (TypeError, ValueError) as error:
        raise AlassoError("a stream is made of a list of pairs: Stream.of([(train_1, test_1), …])") from error
    if not pairs:
        raise AlassoError("a stream needs at least one (train, test) pair")
    halves = [tuple(_as_tensors(half, f"task {t + 1}") for half in pair) for t, pair in enumerate(pairs)]
    input_shape = _one_shape(halves)
    _refuse_untrained_labels(halves, heads)
    labels = [torch.cat([y for _, y in pair]) for pair in halves]
    head, tasks = slice(0, int(torch.cat(labels).max()) + 1), list[Task]()
    for t, pair in enumerate(halves):
        shift = 0
        if heads == "own":
            start, (lowest, highest) = tasks[-1].head.stop if tasks else 0, map(int, labels[t].aminmax())
            head, shift = slice(start, start + highest - lowest + 1), start - lowest
        train, test = (Examples(_placed(x, device), _placed(y + shift, device)) for x, y in pair)
        tasks.append(Task(f"task {t + 1}", train, test, head))
    return Stream(name, tuple(tasks), input_shape, head.stop, {})


def _refuse_untrained_labels(halves: Sequence[tuple[tuple[Tensor, Tensor], ...]], heads: str) -> None:
    """Test labels that the network cannot know would only lower the accuracy, without a word.

    Where tasks share a head, a task may be tested on classes that another one trains; but not on such alone as only
    later ones do.
    """
    trained, tested = ([set(pair[half][1].tolist()) for pair in halves] for half in (0, 1))
    for t, (own, asked) in enumerate(zip(trained, tested, strict=True)):
        apart = not asked & set().union(*trained[: t + 1]) or heads == "own"
        unknown = asked - own if apart else asked - set().union(*trained)
        if unknown:
            untrained = "it is not trained" if apart else "no task is trained"
            raise AlassoError(
                f"task {t + 1} is tested on labels {sorted(unknown)[:8]}, on which {untrained}: "
                "number classes alike in train and test, or leave these examples out"
            )


def _one_shape(halves: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> tuple[int, ...]:
    """That of an input: one network takes those of all tasks."""
    expected = tuple(halves[0][0][0].shape[1:])
    for t, pair in enumerate(halves):
        for which, (x, _) in zip(("trained", "tested"), pair, strict=True):
            if (shape := tuple(x.shape[1:])) != expected:
                said = f"task {t + 1} is {which} on inputs of the shape {shape}, and task 1 trained on {expected}"
                raise AlassoError(f"{said}: bring all to one shape")
    return expected


def _as_tensors(half: Any, where: str) -> tuple[Tensor, Tensor]:
    """(x, y) of a torch Dataset, a TensorDataset or a pair of tensors or arrays."""
    if isinstance(half, torch.utils.data.TensorDataset):
        half = half.tensors
    elif isinstance(half, torch.utils.data.Dataset):
        items = [half[i] for i in range(len(half))]  # type: ignore[arg-type]
        half = torch.stack([torch.as_tensor(x) for x, _ in items]), torch.tensor([int(y) for _, y in items])
    try:
        x, y = (torch.as_tensor(part) for part in half)
    except (TypeError, ValueError, RuntimeError) as error:
        raise AlassoError(f"{where} is neither a torch Dataset nor a pair of tensors (x, y)") from error
    if len(x) != len(y) or len(x) == 0:
        raise AlassoError(f"{where} has {len(x)} inputs and {len(y)} labels; it needs as many of each, and some")
    if y.is_floating_point() or y.dim() != 1 or int(y.min()) < 0:
        raise AlassoError(f"{where}: labels must be class numbers 0, 1, …, one an example")
    return x, y.long()


def with_edition(stream: Stream) -> Stream:
    """One that says which data it is made of: of tasks from Python, how many there are, and a fingerprint."""
    if stream.editions:
        return stream
    examples = sum(len(half) for task in stream.tasks for half in (task.train, task.test))
    what = f"{count_of(examples, 'example')} in {count_of(len(stream), 'task')}"
    return replace(stream, editions={stream.name: f"{OWN_DATA}, {what}, {fingerprint(stream)}"})


def fingerprint(stream: Stream) -> str:
    """Eight hex digits of shapes, columns of the head, how often each label comes, and a sample of the values: to read
    all values would take long, and longer from a GPU.
    """
    known = hashlib.sha256(repr((stream.input_shape, stream.classes)).encode())
    for task in stream.tasks:
        for half in (task.train, task.test):
            labels = half.labels if half.rows is None else half.labels[half.rows]
            known.update(repr((task.head, len(half), labels.bincount().tolist())).encode())
            for values in sample(half):
                known.update(values.cpu().contiguous().numpy().tobytes())
    return known.hexdigest()[:8]


def sample(examples: Examples) -> tuple[Tensor, Tensor]:
    """Some values of some examples, and their labels, the same ones every time; from the first to the last."""
    count = min(len(examples), SAMPLED_EXAMPLES)
    at = [i * (len(examples) - 1) // max(count - 1, 1) for i in range(count)]
    x, y = examples.batch(torch.tensor(at, device=examples.images.device))
    flat = x.flatten(1) if x.dim() > 1 else x[:, None]
    return flat[:, :: -(-flat.shape[1] // SAMPLED_VALUES)], y


def _labels(labels: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.asarray(labels, dtype=np.int64)).to(device)


def _placed(tensor: Tensor, device: torch.device | str) -> Tensor:
    """On the device, unless it would take more than a quarter of it: then batches travel one by one."""
    device = torch.device(device)
    if device.type == "cuda" and tensor.nbytes > torch.cuda.get_device_properties(device).total_memory // 4:
        return tensor
    return tensor.to(device)
