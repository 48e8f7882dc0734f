"""What a loss does along single weights (the paper's Fig. 1): what to measure, and what was found, in plain numbers.

:mod:`~alasso.bench.probe.measure` measures with torch, :mod:`~alasso.bench.probe.figures` draws; this reads without
either.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alasso.bench import schema
from alasso.bench.config import RunConfig
from alasso.bench.report.aggregate import Array
from alasso.bench.report.style import number
from alasso.errors import AlassoError

#: Less than this share of the loss is rounding, not a change.
FLAT = 1e-12
#: Whose surrogates a probe knows.
SURROGATES = ("SI", "ALASSO")


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Args:
        weights: How many random weights.
        offsets: How many places on each weight's line; odd, so that the optimum is among them.
        span: How far a weight is moved to either side.
        examples: On how many training examples.

    Raises:
        AlassoError: One of them is out of its range.
    """

    weights: int = 200
    offsets: int = 41
    span: float = 1.0
    examples: int = 1000

    def __post_init__(self) -> None:
        for name, least in (("weights", 1), ("offsets", 3), ("examples", 1)):
            count = getattr(self, name)
            if type(count) is not int or count < least:
                raise AlassoError(f"{name} must be a whole number from {least} on, not {count!r}")
        if self.offsets % 2 == 0:
            raise AlassoError(f"offsets must be odd, so that the optimum itself is among them, not {self.offsets}")
        if type(self.span) not in (int, float) or not 0 < self.span < float("inf"):
            raise AlassoError(f"span must be a positive number, not {self.span!r}")


@dataclass(frozen=True)
class Measured:
    """A probe's findings.

    Args:
        config: The run whose first task was learned again.
        plan: What was asked for.
        seconds: Of the measurement, training aside.
        accuracy: On the first task's test examples.
        offsets: How far weights were moved, from −span to span.
        weights: Their names.
        losses: ``losses[k][o]``: with weight k moved by offset o.
        importance: Ω of each weight.
        came_from: Start of training minus its end, of each weight.
        springs: Stiffness of ALASSO's surrogate left and right of the end of training, of each weight.
        environment: Machine, versions, commit.
        examples: How many there were, which may be fewer than planned.
    """

    config: dict[str, Any]
    plan: Plan
    seconds: float
    accuracy: float
    offsets: list[float]
    weights: list[str]
    losses: list[list[float]]
    importance: list[float]
    came_from: list[float]
    springs: list[list[float]]
    environment: dict[str, Any]
    examples: int

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def middle(self) -> int:
        """The offset at which no weight has moved."""
        return len(self.offsets) // 2

    def changes(self) -> Array:
        """(weights, offsets): loss minus loss at the optimum."""
        found = np.array(self.losses)
        return np.asarray(found - found[:, [self.middle]])

    def surrogate(self, method: str) -> Array:
        """(weights, offsets): what SI or ALASSO takes the changes for. After one task, both have the same Ω."""
        check_surrogate(method)
        springs = np.array(self.springs if method == "ALASSO" else [[omega, omega] for omega in self.importance])
        offsets = np.array(self.offsets)
        return np.asarray(np.where(offsets < 0, springs[:, [0]], springs[:, [1]]) * offsets**2)

    def as_file(self) -> bytes:
        """What :func:`read` reads. Without blanks: a measurement is a megabyte."""
        return (json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":")) + "\n").encode()

    def steep_right(self) -> Array:
        """The changes with each weight's steeper side turned right; weights without any effect are left out."""
        changes = self.changes()
        changes = changes[np.abs(changes).max(axis=1) > FLAT * np.abs(self.losses).max()]
        flip = changes[:, 0] > changes[:, -1]
        return np.asarray(np.where(flip[:, None], changes[:, ::-1], changes))

    def shallow_over_steep(self) -> Array:
        """Change at the shallow end over rise at the steep end, not below −1, of weights with a side where it rises.

        1: both sides alike. 0: flat on one side. −1: falls on one side as much as it rises on the other, or more.
        """
        lines = self.steep_right()
        lines = lines[lines[:, -1] > 0]
        return np.asarray((lines[:, 0] / lines[:, -1]).clip(min=-1))

    def statement(self) -> list[str]:
        """How asymmetric the sample is, in words."""
        total, lines, plan = len(self.losses), self.steep_right(), self.plan
        evenness = self.shallow_over_steep()
        both_rise = 1 / evenness[evenness > 0]
        rises = lines[lines[:, -1] > 0, -1]
        said = [
            f"{total} random weights of {self.config['model']} after the first task of {self.config['benchmark']} "
            f"(seed {self.seed}, test accuracy {self.accuracy:.4f}), each moved by up to ±{plan.span:g}, "
            f"on {self.examples} training examples; measured in {self.seconds:.1f} s",
        ]
        if without := total - len(lines):
            said.append(f"without any effect on the loss: {without}, whose input or unit is always zero")
        if short := len(lines) - len(rises):
            said.append(f"for {short} the loss rises on neither side: training ended short of their optimum")
        if len(evenness):
            said.append(
                f"{len(evenness)} have a side where the loss rises, by {np.median(rises):.2g} (median); "
                f"the other side changes by {number(float(np.median(evenness)), 2)} of that "
                "(median; 1: symmetric, below 0: it falls)"
            )
        if len(both_rise):
            low, middle, high = np.quantile(both_rise, (0.25, 0.5, 0.75))
            said.append(
                f"for {len(both_rise)} the loss rises on both sides, {middle:.2f} times as much on the steep one "
                f"(median; quartiles {low:.2f} and {high:.2f})"
            )
        return said


def check_surrogate(method: str) -> None:
    """Refuses a surrogate that a probe does not know."""
    if method not in SURROGATES:
        raise AlassoError(f"surrogate must be one of {', '.join(SURROGATES)}, not {method!r}")


def read(path: Path) -> Measured:
    """Reads a probe's file.

    Args:
        path: ``*.probe.json``, compressed (``.xz``) or not.

    Returns:
        What was measured.

    Raises:
        AlassoError: The file holds something else.
    """
    try:
        raw = schema.from_json(schema.read_text(path))
        schema.PROBE(raw, "")
        config = RunConfig.from_json(raw["config"]).to_json()
        measured = Measured(**{**raw, "config": config, "plan": Plan(**raw["plan"])})
        lines = (len(measured.weights), measured.plan.offsets)
        whole = {"losses": lines, "springs": (lines[0], 2), "importance": lines[:1], "came_from": lines[:1]}
        shapes = {name: np.shape(getattr(measured, name)) for name in ("offsets", *whole)}
        if shapes != {"offsets": lines[1:], **whole} or not measured.weights:
            raise ValueError(f"its numbers have the shapes {shapes}")
    except (ValueError, TypeError) as error:  # of which AlassoError is one
        raise AlassoError(f"{path} is not a measurement of alasso probe; delete it to measure again") from error
    return measured
