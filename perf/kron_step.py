"""What KronALASSO adds to a training step, what it keeps in memory, and how long the end of a task takes.

    python perf/kron_step.py [--device cpu --threads 2 --rounds 30 --record]

The network is the paper's, 784-2000-2000-10 with batches of 256, and a small one; each has one task behind it. In the
first hundred steps of a task all factors are looked at, from then on in one step of ``every``; the mean of both kinds
is what training takes. On a GPU steps are replayed from CUDA graphs, and the bar is against ALASSO's, as the laboratory
takes them. Memory is what lies beside weights, gradients and the optimizer's moments; that of a transformer's layer is
counted from its real state, on a device without numbers. With the bars.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from _measure import (
    BATCH,
    SIZES,
    Step,
    arguments,
    extra,
    interleaved,
    keep,
    milliseconds,
    network,
    parsed,
    random_batch,
    ratio,
    seconds,
    spread,
    table,
    training_step,
)
from scaling import live_bytes
from step import SMALL, verdict
from torch import nn

import alasso
from alasso.methods.kron import ALL_AT_FIRST

PLAIN, ALASSO, LOOKED, OTHER, MEAN = "fused Adam", "ALASSO", "factors looked at", "other steps", "KronALASSO, mean"
BARS = {"cpu": (PLAIN, 1.6), "cuda": (ALASSO, 1.6)}  # largest ratio of the mean
MEMORY_BAR = 9.0  # bytes a weight
END_BAR = 3.0  # seconds
WIDTH = 4096  # of the transformer's layer


def adam(model: nn.Module, device: str) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True, capturable=is_gpu(device))
    optimizer._warned_capturable_if_run_uncaptured = True  # of the steps before a graph
    return optimizer


def is_gpu(device: str) -> bool:
    return device.startswith("cuda")


def prepared(
    device: str, sizes: tuple[int, ...], method: Callable[[nn.Module], Any] | None = None, own: bool = False
) -> tuple[Step, Any]:
    """A training step with one task behind, and its regularizer; ``own`` takes alasso.optim.Adam."""
    model = network(*sizes, device=device)
    reg = None if method is None else method(model)
    if own:
        optimizer: torch.optim.Optimizer = alasso.optim.Adam(
            model.parameters(), lr=1e-4, capturable=True, regularizer=reg
        )
    else:
        optimizer = adam(model, device)
        if reg is not None:
            reg.attach(optimizer)
    step = training_step(model, optimizer, *random_batch(sizes, BATCH, device))
    step()
    if reg is not None:
        reg.consolidate()
    for _ in range(2):
        step()
    return step, reg


def at(count: int, step: Step, reg: alasso.KronALASSO) -> Step:
    """A step that the regularizer takes for this one of the task."""

    def taken() -> None:
        reg.steps = count
        step()

    return taken


def replayed(step: Step) -> Step:
    """The step from a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()

    def replay(_: Step = step) -> None:  # whose tensors live as long as the graph
        graph.replay()

    return replay


def steps(options: argparse.Namespace, sizes: tuple[int, ...]) -> dict[str, Any]:
    device, on_gpu = options.device, is_gpu(options.device)
    kron, reg = prepared(device, sizes, alasso.KronALASSO)
    cases = {
        PLAIN: prepared(device, sizes)[0],
        ALASSO: prepared(device, sizes, alasso.ALASSO, own=on_gpu)[0],
        LOOKED: at(ALL_AT_FIRST * reg.every, kron, reg),
        OTHER: at(ALL_AT_FIRST * reg.every + 1, kron, reg),
    }
    if on_gpu:
        cases = {name: replayed(step) for name, step in cases.items()}
    many = 20 if on_gpu or sizes == SMALL else 2
    times = interleaved(cases, options.rounds, device, untimed=1, timed=many)
    pairs = zip(times[LOOKED], times[OTHER], strict=True)
    times[MEAN] = [looked / reg.every + other * (1 - 1 / reg.every) for looked, other in pairs]
    base, bar = BARS["cuda" if on_gpu else "cpu"]
    rows, found = [], {}
    for name in times:
        to = ratio(times, name, base)
        more = extra(times, name, PLAIN)
        found[name] = {"milliseconds": milliseconds(times, name), f"ratio to {base}": to, "more": more}
        seen = verdict(to["median"], bar) if name == MEAN and sizes == SIZES else ""
        rows.append([name, f"{milliseconds(times, name):.3f}", spread(more), spread(to), seen])
    title = f"A step of {'-'.join(map(str, sizes))}, batch {BATCH}, {device}, {options.rounds} rounds"
    table(title, ["step", "ms", f"ms more than {PLAIN} (quartiles)", f"÷ {base} (quartiles)", "bar"], rows)
    return found


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """Bytes a weight: kept between tasks, and with what steps use; ALASSO's beside."""
    found: dict[str, Any] = {}
    for name, method in {"KronALASSO": alasso.KronALASSO, ALASSO: alasso.ALASSO}.items():
        empty = live_bytes()
        plain = prepared(options.device, SIZES)
        own = live_bytes() - empty
        protected = prepared(options.device, SIZES, method)
        of_method = live_bytes() - empty - 2 * own
        layer = transformer_layer()
        count, count_of_layer = (sum(p.numel() for p in m.parameters()) for m in (protected[1].model, layer))
        found[name] = {
            "784-2000-2000-10: state": state_bytes(protected[1]) / count,
            "784-2000-2000-10: with what steps use": of_method / count,
            f"a transformer's layer, {WIDTH} wide: state": state_bytes(method(layer)) / count_of_layer,
            "the same in bfloat16: state": state_bytes(method(layer.bfloat16())) / count_of_layer,
        }
        del plain, protected
    kron = found["KronALASSO"]
    rows = [[what, *(f"{of[what]:.2f}" for of in found.values()), verdict(kron[what], MEMORY_BAR)] for what in kron]
    table("Bytes a weight beside the optimizer", ["", *found, "bar"], rows)
    return found


def transformer_layer() -> nn.Module:
    """Attention's four projections and an MLP of four times the width; nothing is computed."""
    with torch.device("meta"):
        attention = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        return nn.Sequential(*attention, nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))


def state_bytes(reg: alasso.Regularizer) -> int:
    return sum(t.numel() * t.element_size() for state in reg.protected.states.values() for t in state)


def end(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds that consolidate() takes."""
    step, reg = prepared(options.device, SIZES, alasso.KronALASSO)

    times = []
    for _ in range(5):
        step()
        times.append(seconds(reg.consolidate, 1, options.device))
    middle = statistics.median(times)
    table("The end of a task", ["", "s", "bar"], [["consolidate()", f"{middle:.3f}", verdict(middle, END_BAR)]])
    return {"seconds": middle}


def main() -> None:
    options = parsed(arguments(__doc__.partition("\n")[0], rounds=30))
    found = {
        "memory": memory(options),
        "end": end(options),
        "step": steps(options, SIZES),
        "small": steps(options, SMALL),
    }
    keep("kron_step", options, found)


if __name__ == "__main__":
    main()
