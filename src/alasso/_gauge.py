"""How much has been forgotten by now? A few held-out batches of each past domain, measured while later ones train."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from alasso._distributed import is_distributed, reshard
from alasso._parameters import unwrapped
from alasso.errors import AlassoError
from alasso.importance._batches import batches_of

Measure = Callable[[nn.Module, Any], Any]
Report = Callable[[dict[str, float], int], object]


class Marks(NamedTuple):
    """What a domain's later values are compared with.

    Attributes:
        ended: Its value when its task ended.
        switched: Its value at the last switch, when another task ended.
        worst: The worst since then.
    """

    ended: float
    switched: float
    worst: float


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of one batch: the model's own of a mapping with labels, else the cross-entropy of (x, y).

    Args:
        model: The model.
        batch: A mapping of the model's arguments, or (x, y).

    Returns:
        A scalar.

    Raises:
        AlassoError: The batch is neither, or the model returns no loss.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
        if not isinstance(output, Mapping) or output.get("loss") is None:
            raise AlassoError("the model returns no loss for these batches: give them labels, or measure= a function")
        loss: Tensor = output["loss"]
        return loss
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise AlassoError(f"the loss is known of (x, y) and of mappings, not of {type(batch).__name__}: give measure=")
    return F.cross_entropy(model(batch[0]), batch[1])


def print_line(values: dict[str, float], step: int) -> None:
    """Print a report as one line.

    Args:
        values: What the gauge reports.
        step: After how many steps.

    >>> print_line({"loss/first": 0.31234, "forgetting/first": -0.02, "gap/first": 0.125}, 400)
    step 400 | first: loss 0.312, forgetting -0.02, gap 0.125
    """
    parts: dict[str, list[str]] = {}
    for key, value in values.items():
        what, _, domain = key.partition("/")
        parts.setdefault(domain, []).append(f"{what} {value:.3g}")
    print(f"step {step}", *(f"{domain}: {', '.join(of)}" for domain, of in parts.items()), sep=" | ", flush=True)


class Gauge:
    """Tells while a model trains how much it forgets: the loss on held-out batches of each past domain.

    Every ``every`` steps it reports three numbers a domain: ``loss/NAME``, its value; ``forgetting/NAME``, how much
    worse that is than when its task ended; ``gap/NAME``, how much worse it was at its worst since the last task ended
    than at that moment (the stability gap). The last two are positive where the model became worse, whatever is
    measured.

    Measuring leaves the training as it is: evaluation mode and no gradients meanwhile, torch's random numbers and each
    module's mode restored after. With several ranks all of them measure, the first one reports.

    Args:
        model: The model.
        measure: Returns the value of one batch, given the model and the batch, a tensor's on the model's device; a
            domain's value is the mean over its batches.
        label: What is measured: the first word of ``loss/NAME``.
        larger_is_better: Whether a larger value is a better one, as of accuracy.
        every: Steps between two reports.
        report: Gets {name: value} and the number of steps; ``wandb.Run.log`` and ``mlflow.log_metrics`` are such
            functions. It prints a line if none is given; None for silence.

    Attributes:
        steps: How many steps were counted.

    Raises:
        AlassoError: ``model`` is no module, ``measure`` or ``report`` no function, or ``every`` no positive number.

    >>> model = nn.Linear(4, 2)
    >>> held_out = [(torch.ones(8, 4), torch.zeros(8, dtype=torch.long))]
    >>> gauge = Gauge(model, every=2, report=lambda values, step: print(step, *values))
    >>> gauge.add("first", held_out)                            # when its task has ended
    >>> for _ in range(3):                                      # a later task, in your own loop
    ...     values = gauge.step()                               # after optimizer.step()
    2 loss/first forgetting/first gap/first
    """

    def __init__(
        self,
        model: nn.Module,
        measure: Measure = loss_of,
        *,
        label: str = "loss",
        larger_is_better: bool = False,
        every: int = 100,
        report: Report | None = print_line,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise AlassoError(f"Gauge takes the model itself, an nn.Module, not {type(model).__name__}")
        if not callable(measure) or not (report is None or callable(report)):
            raise AlassoError("measure and report are functions: measure(model, batch), report(values, step)")
        if type(every) is not int or every < 1:
            raise AlassoError(f"every must be a whole number of steps, one or more, not {every!r:.40}")
        self.model = unwrapped(model)
        self.measure = measure
        self.label = label
        self.larger_is_better = larger_is_better
        self.every = every
        self.report = report
        self.steps = 0
        self._batches: dict[str, list[Any]] = {}
        self._marks: dict[str, Marks] = {}

    def add(self, name: str, batches: Iterable[Any]) -> None:
        """Watch a domain from now on; call it when its task has ended.

        Its present value is what later ones are compared with, unless :meth:`load_state_dict` has brought one along.

        Args:
            name: The domain's name.
            batches: A few held-out batches, which are kept.

        Raises:
            AlassoError: There are no batches.
        """
        with _undisturbed(self.model):  # a loader draws random numbers
            kept = list(batches_of(batches))
        if not kept:
            raise AlassoError(f"the gauge was given no batches of {name}")
        was_saved = name in self._marks and name not in self._batches
        self._batches[name] = kept
        if not was_saved:
            for other, value in self._values().items():
                ended = value if other == name else self._marks[other].ended
                self._marks[other] = Marks(ended, value, value)

    def step(self) -> dict[str, float]:
        """Count a step of training, and report where it is time; call it after ``optimizer.step()``.

        Returns:
            What was reported; empty if nothing was.
        """
        self.steps += 1
        if self.steps % self.every or not self._batches:
            return {}
        values = self.read()
        if self.report is not None and not (is_distributed() and dist.get_rank() > 0):
            self.report(values, self.steps)
        return values

    def read(self) -> dict[str, float]:
        """Measure all domains now.

        Returns:
            {``loss/NAME``, ``forgetting/NAME`` and ``gap/NAME``: value}.
        """
        found = {}
        for name, value in self._values().items():
            ended, switched, worst = self._marks[name]
            if self._how_much_worse(value, worst) > 0:
                worst = value
            self._marks[name] = Marks(ended, switched, worst)
            found[f"{self.label}/{name}"] = value
            found[f"forgetting/{name}"] = self._how_much_worse(value, ended)
            found[f"gap/{name}"] = self._how_much_worse(worst, switched)
        return found

    def _how_much_worse(self, value: float, before: float) -> float:
        return before - value if self.larger_is_better else value - before

    @torch.no_grad()
    def _values(self) -> dict[str, float]:
        device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        means = {}
        with _undisturbed(self.model):
            self.model.eval()
            for name, batches in self._batches.items():
                values = [float(self.measure(self.model, _moved(batch, device))) for batch in batches]
                means[name] = math.fsum(values) / len(values)
        return means

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured so far, without the batches.

        Returns:
            A dictionary of numbers, which JSON takes.
        """
        return {"steps": self.steps, "domains": {name: list(marks) for name, marks in self._marks.items()}}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Compare with what was measured before the state was saved; give the batches to :meth:`add` before or after.

        Args:
            saved: What :meth:`state_dict` returned.

        Raises:
            AlassoError: It is no such state.
        """
        try:
            steps, marks = int(saved["steps"]), {str(k): Marks(*map(float, v)) for k, v in saved["domains"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise AlassoError("not a saved gauge: pass what state_dict() returned") from error
        self.steps = steps
        self._marks.update(marks)


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore each module's mode, torch's random numbers and sharded parameters at the end."""
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for module, training in modes:
            module.training = training
        reshard(model)


def _moved(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: _moved(part, device) for name, part in batch.items()}
    return type(batch)(_moved(part, device) for part in batch) if type(batch) in (tuple, list) else batch
