"""What a run is: a frozen description, checked when it is made, with the paper's settings as presets; and in words."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from alasso.bench.registry import BENCHMARKS, METHODS, OWN, OWN_STREAM
from alasso.bench.schema import LARGEST, LARGEST_WHOLE, RUN, read_toml, shown
from alasso.errors import AlassoError

OPTIMIZERS = ("adam", "sgd")
PRECISIONS = ("tf32", "float32", "bf16")
MOST_TASKS = 5_000  # 12 million numbers in a result: as many as its file may have
MOST_NAMED = 2  # settings that a sweep's runs are named by, be they as usual or not; of more, those that are not


@dataclass(frozen=True)
class RunConfig:
    """One run of one method on one benchmark. Make it with :meth:`for_benchmark`, which fills in the paper's values.

    ``settings`` are the method's own (a, c, xi, …), all of them, defaults included.
    """

    benchmark: str
    method: str
    tasks: int | None  # None: as many as there are
    epochs: int
    batch_size: int
    learning_rate: float
    model: str
    seed: int = 0
    optimizer: str = "adam"
    reset_optimizer: bool = False  # forget the optimizer's moments between tasks
    hidden: int | None = None  # units a hidden layer, of the mlp
    permute_first: bool = False  # permuted streams: the first task too
    image_size: int | None = None  # images are brought to this many pixels a side
    classes_per_task: int | None = None  # split streams
    path: str | None = None  # split-folder: where the images are
    memory: int = 0  # examples of each past task that are rehearsed beside new ones
    memory_share: float = 0.5  # what part of a batch is rehearsed
    precision: str = "tf32"  # of matrix products on a GPU: tf32, float32 or bf16
    adam_eps: float = 1e-8  # Adam's ε; torch's, and that of Keras 2.0.5, with which the authors ran theirs
    loss_clip: float = 0.0  # the loss counts probabilities as within [clip, 1 − clip]; that Keras has 1e-7
    validation: bool = False  # measured on examples held out of training; the test examples are not touched
    settings: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def for_benchmark(benchmark: str, method: str, **changes: Any) -> RunConfig:
        """Makes the benchmark's preset with some changes.

        Args:
            benchmark: Name of the benchmark.
            method: Name of the method.
            **changes: Fields of this class by name, or settings of the method; None changes nothing.

        Returns:
            The config, checked.

        Raises:
            AlassoError: There is no such benchmark, method, field or setting, or a value does not fit.

        >>> RunConfig.for_benchmark("permuted-mnist", "alasso", tasks=10, a=3.0).settings["a"]
        3.0
        """
        known_benchmark = OWN_STREAM if benchmark == OWN else known(benchmark, BENCHMARKS, "benchmark")
        known_method = known(method, METHODS, "method")
        found = known_benchmark.settings.get(method, {})
        words = {word: changes[word] for word, of in known_method.choices.items() if changes.get(word) in of}
        if any(found.get(word, value) != value for word, value in words.items()):
            found = {}  # what a search found for one word says nothing about another
        own = dict(known_method.settings) | dict(found)
        values = dict(known_benchmark.preset) | dict(known_method.preset)
        for name, value in changes.items():
            if value is None:
                continue
            if name in own:
                own[name] = value
            elif name in FIELDS and name not in NOT_CHANGES:
                values[name] = value
            elif name == "settings":
                example = next((f", as in {setting}={default!r}" for setting, default in own.items()), "")
                raise AlassoError(f"settings of {method} are given directly, by their own names{example}")
            else:
                allowed = [*own, *(f for f in FIELDS if f not in NOT_CHANGES)]
                raise AlassoError(f"{method} has no setting {name!r}{other_setting(name, allowed)}")
        config = RunConfig(benchmark=benchmark, method=method, settings=own, **values).checked()
        if (
            config.seed >= 2**32
        ):  # its upper half would be taken for a place in a run; older results may have such seeds
            raise AlassoError(f"seed must be below 2³², not {shown(config.seed)}")
        for name in changes:
            config.refuse_idle(name)
        return config

    @staticmethod
    def own(method: str, **changes: Any) -> RunConfig:
        """Makes the config of a run on your own stream.

        Args:
            method: Name of the method.
            **changes: As in :meth:`for_benchmark`.

        Returns:
            The config, checked.
        """
        return RunConfig.for_benchmark(OWN, method, **changes)

    def checked(self) -> RunConfig:
        """This config with every value of the type its field has; refuses values out of range, by name."""
        values = {name: typed(name, getattr(self, name), annotation) for name, annotation in FIELDS.items()}
        method = known(self.method, METHODS, "method")
        known(self.benchmark, {**BENCHMARKS, OWN: OWN_STREAM}, "benchmark")
        settings = {}
        for name, value in self.settings.items():
            if name not in method.settings:
                raise AlassoError(
                    f"{self.method} has no setting {shown(name)}{other_setting(str(name), method.settings)}"
                )
            settings[name] = typed_like(name, value, method.settings[name], method.choices.get(name))
            check_setting(name, settings[name])
        values["settings"] = dict(sorted(settings.items()))
        for name in ("tasks", "epochs", "batch_size", "hidden", "image_size", "classes_per_task"):
            if values[name] is not None and not 1 <= values[name] < 2**31:
                limit = "1 or more" if values[name] < 1 else "below 2³¹"
                raise AlassoError(f"{name} must be {limit}, not {shown(values[name])}")
        if values["tasks"] is not None and values["tasks"] > MOST_TASKS:
            raise AlassoError(
                f"tasks must be {MOST_TASKS} or fewer, not {shown(values['tasks'])}: each is tested after each"
            )
        if not 0 <= values["seed"] < 2**63:
            raise AlassoError(f"seed must be 0 or more, and below 2⁶³, not {shown(values['seed'])}")
        if not 0 < values["learning_rate"] < float("inf"):
            raise AlassoError(f"learning_rate must be a positive number, not {values['learning_rate']}")
        if not SMALLEST <= values["adam_eps"] < float("inf"):  # 0 / 0 is no step
            raise AlassoError(f"adam_eps must be a positive number, not {values['adam_eps']}")
        if values["optimizer"] != "adam" and values["adam_eps"] != ADDED_LATER["adam_eps"]:
            raise AlassoError("adam_eps is for optimizer=adam")
        if not 0 <= values["loss_clip"] < 0.5:
            raise AlassoError(f"loss_clip must be 0 or more, and below 0.5, not {values['loss_clip']}")
        if values["optimizer"] not in OPTIMIZERS:
            raise AlassoError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, not {values['optimizer']!r}")
        if values["precision"] not in PRECISIONS:
            raise AlassoError(f"precision must be one of {', '.join(PRECISIONS)}, not {values['precision']!r}")
        if values["memory"] and not method.takes_memory:
            raise AlassoError(f"{self.method} cannot rehearse a memory; leave memory=0")
        if self.method == "alasso-memory" and values["memory"] == 0:
            raise AlassoError("alasso-memory needs memory=1 or more; without examples of the past it is alasso")
        if self.method == "sgd-dropout" and values["model"] != "mlp":
            raise AlassoError("sgd-dropout adds dropout to the mlp; other networks have theirs already: use sgd")
        if values["memory"] < 0 or not 0 < values["memory_share"] < 1:
            raise AlassoError("memory must be 0 or more, and memory_share between 0 and 1")
        if self.benchmark == "split-folder" and not self.path:
            raise AlassoError("split-folder needs the folder of images: alasso run split-folder PATH")
        return RunConfig(**values)

    def refuse_idle(self, name: str) -> None:
        """Refuse a field that is set and changes nothing here: it would create a duplicate run.

        Not part of :meth:`checked`, for results that hold such a field are to be read.
        """
        if getattr(self, name, None) == DEFAULTS.get(name):
            return
        takers = [of for of, benchmark in BENCHMARKS.items() if name in benchmark.takes]
        if takers and self.benchmark not in takers:
            raise AlassoError(f"{name} is for {', '.join(takers)}; it changes nothing in {self.benchmark}")
        if name == "hidden" and self.model != "mlp":
            raise AlassoError(f"hidden is for model=mlp; it changes nothing in {self.model}")

    @staticmethod
    def field_names() -> tuple[str, ...]:
        return tuple(FIELDS)

    @cached_property
    def hash(self) -> str:
        """Ten hex digits that differ when anything but the seed differs."""
        content = {name: value for name, value in self.to_json().items() if name != "seed"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]

    @property
    def name(self) -> str:
        return f"{self.benchmark}_{self.method}_{self.hash}_s{self.seed}"

    def values(self) -> dict[str, Any]:
        """Every field by name."""
        return {name: getattr(self, name) for name in FIELDS} | {"settings": dict(self.settings)}

    def flat(self) -> dict[str, Any]:
        """The method's settings and every other field, side by side: what to compare runs by."""
        return {**self.settings, **{name: value for name, value in self.values().items() if name != "settings"}}

    def unlike(self, other: RunConfig) -> dict[str, tuple[Any, Any]]:
        """Fields and settings of this run that another has otherwise: (of this one, of the other)."""
        theirs = other.flat()
        return {name: (value, theirs.get(name)) for name, value in self.flat().items() if value != theirs.get(name)}

    def to_json(self) -> dict[str, Any]:
        """All fields; later ones only where they differ from what all runs had before, which keep their names."""
        return {name: value for name, value in self.values().items() if (name, value) not in ADDED_LATER.items()}

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> RunConfig:
        if not isinstance(raw, Mapping):
            raise AlassoError(f"config must be an object, not {shown(raw)}")
        if unknown := set(raw) - set(FIELDS):
            raise AlassoError(f"config has unknown fields: {', '.join(sorted(map(shown, unknown)))}")
        if lacking := [name for name in REQUIRED if name not in raw]:
            raise AlassoError(f"config lacks {', '.join(lacking)}")
        if not isinstance(raw.get("settings", {}), Mapping):
            raise AlassoError(f"settings of config must be an object, not {shown(raw['settings'])}")
        return RunConfig(**{**ADDED_LATER, **raw}).checked()


#: Fields without a default.
REQUIRED = tuple(
    f.name
    for f in dataclasses.fields(RunConfig)
    if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
)
#: What others call some fields.
SHORT = {"lr": "learning_rate", "bs": "batch_size", "eps": "adam_eps"}
#: Fields that result files from before them do not have, and what all those runs had.
ADDED_LATER = {"adam_eps": 1e-8, "loss_clip": 0.0}
#: Fields that say what a run is, and are not changes of it.
NOT_CHANGES = ("benchmark", "method", "settings")


class Range(NamedTuple):
    """Where a setting lies. Without ``most``, numbers that are not whole end where float32 does."""

    least: float = 0
    most: float | None = None
    reached: bool = True  # most itself is allowed


SMALLEST = 1e-30  # what is less is as good as nothing there
#: Of settings that are not just zero or more.
RANGES = {
    "initial_logvar": Range(-50, 50),
    "train_samples": Range(1),
    "test_samples": Range(1),
    "coreset": Range(1),
    "drop": Range(0, 1, reached=False),
    "gamma": Range(0, 1),
    "last_weight": Range(0, 1, reached=False),
    "prior_var": Range(SMALLEST),
}
DEFAULTS = {f.name: f.default for f in dataclasses.fields(RunConfig) if f.default is not dataclasses.MISSING}
FIELDS: dict[str, str] = {f.name: str(f.type) for f in dataclasses.fields(RunConfig)}


def from_toml(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of a run, named as in :class:`RunConfig`, and settings from a table ``[settings]`` of a TOML file."""
    raw = read_toml(path)
    try:
        RUN(raw, "")
    except AlassoError as error:
        raise AlassoError(f"{path}: {error}") from error
    settings = raw.pop("settings", {})
    unknown = sorted(set(raw) - set(FIELDS))
    if unknown:
        if any(unknown[0] in method.settings for method in METHODS.values()):
            raise AlassoError(f"{path}: {unknown[0]} is a setting of a method: put it below a line [settings]")
        raise AlassoError(f"{path}: no such field: {unknown[0]!r}{nearest(unknown[0], FIELDS)}")
    return raw, settings


# -- checking values ----------------------------------------------------------------------------------------------


def known(name: str, allowed: Mapping[str, Any], kind: str) -> Any:
    if not isinstance(name, str) or name not in allowed:
        raise AlassoError(f"there is no {kind} {shown(name)}{nearest(str(name)[:60], allowed)}")
    return allowed[name]


def nearest(name: str, allowed: Iterable[str]) -> str:
    """End of an error message: the name that was probably meant, and all there are."""
    allowed = list(allowed)
    if not allowed:
        return "; it takes none"
    alike = difflib.get_close_matches(name.lower(), allowed, n=1, cutoff=0.5)
    close = [SHORT[name]] if SHORT.get(name) in allowed else alike
    meant = f"; did you mean {close[0]!r}? There are" if close else "; there are"
    return f"{meant}: {', '.join(allowed)}"


def other_setting(name: str, allowed: Iterable[str]) -> str:
    """The same of a setting, which may be one that other methods have."""
    allowed = list(allowed)
    having = [method for method, one in METHODS.items() if name in one.settings]
    if not having or not allowed:
        return nearest(name, allowed)
    return f", which {', '.join(having)} {'have' if having[1:] else 'has'}; there are: {', '.join(allowed)}"


def check_setting(name: str, value: Any) -> None:
    """Refuse a number that is out of its setting's range."""
    if isinstance(value, bool | str):
        return
    least, most, reached = RANGES.get(name, Range())
    if most is not None:
        if not least <= value <= most or (value == most and not reached):
            below = "" if reached else f", and below {most}"
            raise AlassoError(f"{name} must lie between {least} and {most}{below}, not be {shown(value)}")
    elif isinstance(value, int):
        if not least <= value <= LARGEST_WHOLE:
            limit = f"{least} or more" if value < least else "below 2⁶³"
            raise AlassoError(f"{name} must be {limit}, not {shown(value)}")
    elif not least <= value < float("inf"):
        raise AlassoError(f"{name} must be a finite number, {f'{least:g}' if least else 'zero'} or more, not {value}")
    elif value > LARGEST:
        raise AlassoError(f"{name} must be at most {LARGEST:g}, not {value}")


def typed(name: str, value: Any, annotation: str) -> Any:
    """``value`` as the field's type; text, from a command line, is read."""
    kinds = [part.strip() for part in annotation.split("|")]
    if value is None and "None" in kinds:
        return None
    examples: dict[str, Any] = {"int": 0, "float": 0.0, "bool": False, "str": ""}
    return typed_like(name, value, examples[kinds[0]]) if kinds[0] in examples else value


def whole_number(value: float | str) -> int:
    """Digit by digit, for a float holds no more than sixteen of them; else 1e3 and 2.0, which are whole, too.

    >>> whole_number("9007199254740993"), whole_number("1e3")
    (9007199254740993, 1000)
    """
    if isinstance(value, int) or (isinstance(value, str) and value.strip().lstrip("+-").isdecimal()):
        return int(value)
    number = float(value)
    if number != int(number):
        raise ValueError(f"{value} is not whole")
    return int(number)


def typed_like(name: str, value: Any, example: Any, choices: Sequence[Any] | None = None) -> Any:
    """``value`` as the type of ``example``, or one of the choices; a number if they have ``float`` among them."""
    if choices is not None and float in choices:
        if value in choices:
            return value
        choices, example = None, 0.0
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[type(example)]
    if choices is not None and value not in choices:
        raise AlassoError(f"{name} must be one of {', '.join(choices)}, not {shown(value)}")
    if isinstance(example, bool):
        spoken = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in spoken:
            return spoken[value.lower()]
    elif isinstance(example, str):
        if isinstance(value, str):
            return value
    elif isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value) if isinstance(example, float) else whole_number(value)
        except (ValueError, OverflowError):
            pass
    raise AlassoError(f"{name} must be {wanted}, not {shown(value)}")


# -- in words ------------------------------------------------------------------------------------------------------


def count_of(count: int, thing: str, things: str | None = None) -> str:
    """
    >>> count_of(1, "task"), count_of(3, "task"), count_of(2, "class", "classes")
    ('1 task', '3 tasks', '2 classes')
    """
    return f"{count} {thing if count == 1 else things or thing + 's'}"


def label(config: RunConfig, varying: Sequence[str] = ()) -> str:
    """A run in a few words; ``varying`` names what it differs in from others of its method."""
    return ", ".join([" ".join([config.method, *_differences(config, varying)]), f"seed {config.seed}"])


def _differences(config: RunConfig, varying: Sequence[str]) -> list[str]:
    known = {**config.values(), **config.settings}
    named = [name for name in varying if name in known]
    if len(varying) > MOST_NAMED:
        usual = usual_values(config)
        named = [name for name in named if name not in usual or usual[name] != known[name]]
    return [f"{name}={known[name]}" for name in named]


def usual_values(config: RunConfig) -> Mapping[str, Any]:
    """Fields and settings that the benchmark has for the method; none where that is not known."""
    return _usual_values(config.benchmark, config.method, config.path)


@functools.lru_cache(maxsize=1000)
def _usual_values(benchmark: str, method: str, path: str | None) -> Mapping[str, Any]:
    try:
        usual = RunConfig.for_benchmark(benchmark, method, path=path)
    except AlassoError:  # another benchmark or method, or one that needs another network
        return {}
    return MappingProxyType({**usual.values(), **usual.settings})


def varying_settings(configs: Sequence[RunConfig]) -> list[str]:
    """Settings and fields in which rows of one method differ."""
    varying: list[str] = []
    for method in dict.fromkeys(config.method for config in configs):  # columns in the same order every time
        of_method = [c for c in configs if c.method == method]
        names = [*of_method[0].settings, *(n for n in RunConfig.field_names() if n not in ("settings", "seed"))]
        varying += [n for n in names if n not in varying and len({repr(value_of(c, n)) for c in of_method}) > 1]
    return varying


def value_of(config: RunConfig, name: str) -> Any:
    return config.settings.get(name, getattr(config, name, "–"))
