"""Counts the Python calls and modules of alasso in one optimizer step, and in the end of a task, of one tensor.

    python perf/calls.py [--list]

A call is a function, a method or a generator of alasso that Python enters; what torch does is not counted. ALASSO is
attached to Adam and has one task behind it. With ``--list`` each call is printed in its order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import alasso

PACKAGE = str(Path(alasso.__file__).parent)
Calls = list[tuple[str, str]]


def calls_of(function: Callable[[], Any]) -> Calls:
    """Runs a function and returns (module, name) of every call within alasso, in their order."""
    calls: Calls = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append((frame.f_code.co_filename[len(PACKAGE) + 1 :], frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


def attached() -> tuple[nn.Module, torch.optim.Optimizer, alasso.ALASSO]:
    """A model of one tensor with gradients in place, Adam, and ALASSO with one task and two steps behind."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer = torch.optim.Adam(model.parameters())
    reg = alasso.ALASSO(model)
    reg.attach(optimizer)
    optimizer.step()
    reg.consolidate()
    optimizer.step()
    optimizer.step()
    return model, optimizer, reg


def in_a_step() -> Calls:
    """The calls of one step."""
    _, optimizer, _ = attached()
    return calls_of(optimizer.step)


def in_consolidate() -> Calls:
    """The calls of the end of a task."""
    _, _, reg = attached()
    return calls_of(reg.consolidate)


def modules(calls: Calls) -> set[str]:
    """The modules that calls went to."""
    return {module for module, _ in calls}


def main() -> None:
    for title, calls in (("optimizer.step()", in_a_step()), ("reg.consolidate()", in_consolidate())):
        print(f"{title}: {len(calls)} calls in {len(modules(calls))} modules")
        for module, name in calls if "--list" in sys.argv else ():
            print(f"    {module}: {name}")


if __name__ == "__main__":
    main()
