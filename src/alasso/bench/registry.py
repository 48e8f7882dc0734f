"""One entry a method and one a benchmark: all that the laboratory knows of them. Imports nothing heavy.

A method's settings are the arguments of its class: their names, defaults and allowed words are read from its signature
at first use. An entry adds what the class does not say: what is searched, and how the method is called and drawn.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from alasso.errors import AlassoError


@dataclass(frozen=True)
class Look:
    """How a line is drawn: colour on light and on dark, matplotlib's marker, and the lengths of its dashes.

    ``further``: for a method's further settings, hollow markers and a thinner line. ``hatch``: lines in its bars.
    """

    light: str
    dark: str
    marker: str = ""
    dashes: tuple[float, ...] = ()
    further: bool = False
    hatch: str = ""


@dataclass(frozen=True)
class Method:
    """A method by name.

    Args:
        title: What it is, in a line.
        label: What figures and tables call it.
        look: How figures draw it.
        learner: ``"module:class"`` of the learner that trains with it.
        library: ``"module:callable"`` whose arguments are the method's settings.
        fixed: Arguments of ``library`` that are not settings, with their values; None for those left as they are.
        own: Settings that ``library`` does not have.
        own_choices: Allowed words of those of them that are words.
        search: Values of settings that ``alasso search`` tries.
        preset: Fields of a run that this method changes.
        takes_memory: Whether examples of the past can be rehearsed beside it.
    """

    title: str
    label: str
    look: Look
    learner: str = "alasso.bench.learners.base:Learner"
    library: str | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    own_choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    search: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    preset: Mapping[str, Any] = field(default_factory=dict)
    takes_memory: bool = True

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings with their defaults; those of a signature whose default is neither a number nor a word are not."""
        defaults = {name: parameter.default for name, parameter in self._arguments.items()}
        return {**{name: one for name, one in defaults.items() if isinstance(one, int | float | str)}, **self.own}

    @cached_property
    def choices(self) -> dict[str, tuple[Any, ...]]:
        """Allowed words of the settings that are words; ``float`` among them where a number may be given, too."""
        words = {name: choices_of(argument.annotation) for name, argument in self._arguments.items()}
        return {**{name: words[name] for name in words if isinstance(self.settings.get(name), str)}, **self.own_choices}

    @cached_property
    def _arguments(self) -> dict[str, inspect.Parameter]:
        if self.library is None:
            return {}
        parameters = inspect.signature(loaded(self.library), eval_str=True).parameters
        return {name: parameter for name, parameter in parameters.items() if name not in self.fixed}


@dataclass(frozen=True)
class Benchmark:
    """A benchmark by name.

    Args:
        title: What it is, in a line.
        kind: Whether tasks permute the pixels of all images, or split the classes among them.
        data: The data sets it needs; none where the user brings the images.
        preset: Fields of a run.
        settings: Settings by method, where the benchmark has others than the method's defaults.
        examples: How many to train on and to test on: of a task, or of a class where tasks split the classes. None
            where they are not known beforehand.
    """

    title: str
    kind: Literal["permuted", "split", "own"]
    data: tuple[str, ...]
    preset: Mapping[str, Any]
    settings: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    examples: tuple[int, int] | None = None

    @property
    def takes(self) -> tuple[str, ...]:
        """Which of the fields that only some benchmarks use are for this one."""
        if self.kind == "split":
            return ("classes_per_task", "image_size") if self.data else ("classes_per_task", "image_size", "path")
        return ("permute_first",) if self.kind == "permuted" else ()


def choices_of(annotation: Any) -> tuple[Any, ...]:
    """What an annotation allows: the words of a ``Literal``, and a union's types and words.

    >>> choices_of(float | Literal["auto"])
    (<class 'float'>, 'auto')
    """
    if typing.get_origin(annotation) is Literal:
        return typing.get_args(annotation)
    return tuple(one for part in typing.get_args(annotation) for one in (choices_of(part) or (part,)))


def loaded(reference: str) -> Any:
    """What ``"module:name"`` refers to, imported now."""
    module, _, name = reference.partition(":")
    try:
        return getattr(import_module(module), name)
    except (AttributeError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("alasso"):
            raise  # a library that is not installed
        raise AlassoError(f"the registry names {reference!r}, which is not there: {error}") from error


# -- methods, in the order of legends and tables -------------------------------------------------------------------

#: Okabe and Ito's colours, told apart with any colour vision; each has a twin for dark backgrounds.
BLUE, VERMILLION, GREEN = ("#0072B2", "#4FB3EE"), ("#D55E00", "#F28A3C"), ("#009E73", "#2CC89B")
SKY, PINK, WINE = ("#3D9BD1", "#8FD0F5"), ("#C0649A", "#E79BC5"), ("#882255", "#D977A8")
YELLOW = ("#B8860B", "#F0C040")
GREY, INK, SOOT = ("#8A8A8A", "#9A9A9A"), ("#111111", "#F2F2F2"), ("#555555", "#C4C4C4")

_REGULARIZED = "alasso.bench.learners.base:Regularized"
_MERGED = "alasso.bench.learners.base:Merged"
_IMM_FIXED = {"count_unmoved": False}
_IMM_OWN = {"transfer": "l2", "drop": 0.5, "last_weight": 0.0}  # last_weight 0: all tasks count the same
_IMM_SEARCH = {"transfer": ("l2", "drop"), "lam": (1e-4, 1e-2)}
_VCL_FIXED = {"from_point_estimate": True, "prior_mean": 0.0}
_VCL_OWN = {"train_samples": 1, "test_samples": 20, "point_epochs": 10}
_VCL_SEARCH = {"initial_logvar": (-6.0, -8.0), "prior_var": (1.0, 0.1)}
_LAM_SEARCH = {"lam": (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10_000.0)}

METHODS: dict[str, Method] = {
    "kron-alasso": Method(
        "asymmetric loss approximation in the shape of Kronecker factors",
        "KronALASSO",
        Look(*YELLOW, "d"),
        _REGULARIZED,
        "alasso:KronALASSO",
        search={"c": (0.3, 1.0, 3.0)},
    ),
    "alasso": Method(
        "asymmetric loss approximation with single-side overestimation",
        "ALASSO",
        Look(*BLUE, "o"),
        _REGULARIZED,
        "alasso:ALASSO",
        search={"c": (0.3, 1.0, 3.0), "xi": (0.003, 0.01, 0.03, 0.1)},
    ),
    "alasso-memory": Method(
        "ALASSO with 200 examples of each task, rehearsed",
        "ALASSO + memory",
        Look(*BLUE, "*", (5, 2)),
        _REGULARIZED,
        "alasso:ALASSO",
        preset={"memory": 200},
    ),
    "si": Method(
        "synaptic intelligence",
        "SI",
        Look(*VERMILLION, "s"),
        _REGULARIZED,
        "alasso:SI",
        search={"c": (0.1, 0.3, 1.0, 3.0), "xi": (0.01, 0.03, 0.1)},
    ),
    "ewc": Method(
        "elastic weight consolidation, exact sum over tasks",
        "EWC",
        Look(*GREEN, "^"),
        _REGULARIZED,
        "alasso:EWC",
        search=_LAM_SEARCH,
    ),
    "online-ewc": Method(
        "online EWC, one decaying quadratic",
        "online EWC",
        Look(*GREEN, "v", (5, 2)),
        _REGULARIZED,
        "alasso:OnlineEWC",
        search=_LAM_SEARCH,
    ),
    "mas": Method(
        "memory aware synapses",
        "MAS",
        Look(*PINK, "D"),
        _REGULARIZED,
        "alasso:MAS",
        search={"lam": (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)},
    ),
    "imm-mean": Method(
        "incremental moment matching, weights averaged",
        "IMM (mean)",
        Look(*WINE, "<"),
        _MERGED,
        "alasso:IMM",
        fixed={"merge": "mean", **_IMM_FIXED},
        own=_IMM_OWN,
        search=_IMM_SEARCH,
    ),
    "imm-mode": Method(
        "incremental moment matching, weighed by the Fisher",
        "IMM (mode)",
        Look(*WINE, ">", (5, 2)),
        _MERGED,
        "alasso:IMM",
        fixed={"merge": "mode", **_IMM_FIXED},
        own=_IMM_OWN,
        search=_IMM_SEARCH,
    ),
    "vcl": Method(
        "variational continual learning",
        "VCL",
        Look(*SKY, "P"),
        "alasso.bench.learners.vcl:Variational",
        "alasso.vcl:convert",
        fixed=_VCL_FIXED,
        own=_VCL_OWN,
        search=_VCL_SEARCH,
        takes_memory=False,
    ),
    "vcl-coreset": Method(
        "VCL with a coreset of each task",
        "VCL + coreset",
        Look(*SKY, "X", (5, 2)),
        "alasso.bench.learners.vcl:VariationalWithCoreset",
        "alasso.vcl:convert",
        fixed=_VCL_FIXED,
        own={**_VCL_OWN, "coreset": 200, "coreset_epochs": 20, "choose": "random"},
        own_choices={"choose": ("random", "k-center")},
        search=_VCL_SEARCH,
        takes_memory=False,
    ),
    "sgd-dropout": Method(
        "sgd with dropout: 0.2 of the inputs, 0.5 of the hidden units", "SGD + dropout", Look(*GREY, "p", (5, 2))
    ),
    "sgd": Method("no protection: plain training, one task after another", "SGD", Look(*GREY, "h")),
    "single-task": Method(
        "upper bound: a fresh network for each task",
        "single-task",
        Look(*INK, "", (6, 3)),
        "alasso.bench.learners.base:SingleTask",
        takes_memory=False,
    ),
    "multi-task": Method(
        "upper bound: batches mixed from all tasks so far",
        "multi-task",
        Look(*SOOT, "", (1.5, 2)),
        "alasso.bench.learners.base:MultiTask",
        takes_memory=False,
    ),
}


def label_of(method: str) -> str:
    """What figures and tables call a method; its name, if it is a custom one."""
    return METHODS[method].label if method in METHODS else method


# -- benchmarks ----------------------------------------------------------------------------------------------------


def searched(benchmark: str) -> Mapping[str, dict[str, Any]]:
    """Settings per method that ``alasso search`` chose for a benchmark, from the file it wrote."""
    file = Path(__file__).with_name("searched") / f"{benchmark}.json"
    if not file.exists():
        return {}
    return with_memory(json.loads(file.read_text(encoding="utf-8"))["chosen"])


def with_memory(chosen: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What a search chose; alasso-memory has alasso's settings: the method beside the memory stays as it is."""
    return {"alasso-memory": chosen["alasso"], **chosen} if "alasso" in chosen else dict(chosen)


# The damping of the authors' experiments, on which the committed results rest.
_PAPERS_XI = {"si": {"c": 0.1, "xi": 0.1}, "alasso": {"xi": 0.1}, "alasso-memory": {"xi": 0.1}}
# Conv nets need less damping: SI's authors used ξ = 1e-3 on CIFAR, and so does ALASSO here.
_SMALL_XI = {"si": {"c": 0.1, "xi": 1e-3}, "alasso": {"xi": 1e-3}, "alasso-memory": {"xi": 1e-3}}
# a = 1.2 by held-out examples: 0.686 ± 0.022 against 0.670 ± 0.035 with 1.8, three seeds each, and 0.675 with 3, one
# seed (paper/records/searches.jsonl); c = 1 as everywhere in the paper. With a memory, the same settings.
_SPLIT_CIFAR = {**_SMALL_XI, "alasso": {"xi": 1e-3, "a": 1.2}, "alasso-memory": {"xi": 1e-3, "a": 1.2}}
# ξ = 0.01 by held-out examples of 15 tasks: 0.621 against 0.606 with 0.001, one seed
# (paper/records/searches.jsonl). With a memory, the same.
_SPLIT_TINY = {**_SMALL_XI, "alasso": {"xi": 1e-2}, "alasso-memory": {"xi": 1e-2}}
_ADAM = {"learning_rate": 1e-3}
_PERMUTED_MNIST = {**_ADAM, "tasks": 30, "epochs": 20, "batch_size": 256, "model": "mlp", "hidden": 2000}

BENCHMARKS: dict[str, Benchmark] = {
    "permuted-digits": Benchmark(
        "scikit-learn's 8 × 8 digits, pixels permuted",
        "permuted",
        ("digits",),
        {**_ADAM, "tasks": 10, "epochs": 6, "batch_size": 64, "model": "mlp", "hidden": 800},
        searched("permuted-digits"),
        examples=(1437, 360),
    ),
    "permuted-mnist": Benchmark(
        "MNIST, pixels permuted: the paper's main benchmark",
        "permuted",
        ("mnist",),
        _PERMUTED_MNIST,
        {**_PAPERS_XI, **searched("permuted-mnist")},
        examples=(60_000, 10_000),
    ),
    "permuted-fashion-mnist": Benchmark(
        "Fashion-MNIST, pixels permuted",
        "permuted",
        ("fashion-mnist",),
        _PERMUTED_MNIST,
        _PAPERS_XI,
        examples=(60_000, 10_000),
    ),
    "split-cifar": Benchmark(
        "3 tasks of 3 CIFAR-10 classes, then 27 of 3 CIFAR-100 classes",
        "split",
        ("cifar10", "cifar100"),
        {**_ADAM, "tasks": 30, "epochs": 60, "batch_size": 256, "model": "cifar-cnn", "classes_per_task": 3},
        _SPLIT_CIFAR,
        examples=(500, 100),  # of CIFAR-100
    ),
    "split-tiny-imagenet": Benchmark(
        "30 tasks of 6 Tiny ImageNet classes, 224 × 224",
        "split",
        ("tiny-imagenet",),
        {
            **_ADAM,
            "tasks": 30,
            "epochs": 60,
            "batch_size": 128,
            "model": "tiny-imagenet-cnn",
            "classes_per_task": 6,
            "image_size": 224,
        },
        _SPLIT_TINY,
        examples=(500, 50),
    ),
    "split-folder": Benchmark(
        "your own images, a folder a class: alasso run split-folder PATH",
        "split",
        (),
        {
            **_ADAM,
            "tasks": None,  # as many as the classes give
            "epochs": 20,
            "batch_size": 64,
            "model": "cifar-cnn",
            "classes_per_task": 2,
            "image_size": 32,
        },
        _SMALL_XI,
    ),
}

OWN = "own-stream"
OWN_STREAM = Benchmark(
    "tasks given from Python",
    "own",
    (),
    {**_ADAM, "tasks": None, "epochs": 20, "batch_size": 64, "model": "mlp", "hidden": 256},
)
