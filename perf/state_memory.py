"""Peak memory of consolidate, save and load, above what was there, in multiples of the state.

    python perf/state_memory.py [--weights 1e8 --largest-share 0.04 --record]

A network of square layers on the CPU, in a process of its own for each method, with gradients and SGD. The peak is the
system's: the most memory that the process held while it was at it.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _measure import arguments, keep, parsed, table
from torch import nn

import alasso

METHODS = ("ALASSO", "KronALASSO")
PARTS = ("consolidate", "state_dict", "write", "read", "load_state_dict")


def memory(field: str) -> int:
    """Returns bytes that the process holds (VmRSS), or held at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


class Peaks:
    """Bytes that each part of the work took at its peak, above what was there when it began."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}

    def __call__(self, part: str, work: Any) -> Any:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
        before = memory("VmRSS")
        found = work()
        self.of[part] = memory("VmHWM") - before
        return found


def network(weights: float, share: float) -> nn.Sequential:
    """Square layers, so many that one has this share of the weights."""
    side = round((weights * share) ** 0.5)
    return nn.Sequential(*(nn.Linear(side, side) for _ in range(round(1 / share))))


def train(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """Two steps: the outputs of layer after layer, kept small."""
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        x = torch.rand(8, model[0].in_features)
        for layer in model:
            x = layer(x).tanh()
        nn.functional.cross_entropy(x, torch.randint(x.shape[1], (8,))).backward()
        optimizer.step()


def measured(method: str, weights: float, share: float, folder: Path) -> dict[str, Any]:
    """Does it all in this process."""
    torch.manual_seed(0)
    model = network(weights, share)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    regularizer = getattr(alasso, method)(model).attach(optimizer)
    peaks = Peaks()
    for _ in range(2):  # the second task's end counts: a past is there
        train(model, optimizer)
        peaks("consolidate", regularizer.consolidate)
    saved = peaks("state_dict", regularizer.state_dict)
    size = sum(t.nbytes for tensors in saved["parameters"].values() for t in tensors.values())
    peaks("write", partial(torch.save, saved, folder / "state.pt"))
    del saved
    read = peaks("read", lambda: torch.load(folder / "state.pt", weights_only=True))
    peaks("load_state_dict", lambda: regularizer.load_state_dict(read))
    times = {part: round(peaks.of[part] / size, 2) for part in PARTS}
    return {"weights": sum(p.numel() for p in model.parameters()), "state, MB": round(size / 1e6), **times}


def main() -> None:
    parser = arguments(__doc__.partition("\n")[0], rounds=1)
    parser.add_argument("--weights", type=float, default=1e8)
    parser.add_argument("--largest-share", type=float, default=0.04, help="of the weights in one layer, all alike")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parsed(parser)
    if options.only:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measured(options.only, options.weights, options.largest_share, Path(folder))))
        return
    found = {}
    for method in METHODS:
        done = subprocess.run([sys.executable, *sys.argv, "--only", method], capture_output=True, text=True, check=True)
        found[method] = json.loads(done.stdout.splitlines()[-1])
    rows = [[method, *(f"{number:,}" for number in of.values())] for method, of in found.items()]
    table("Peak above what was there, in states", ["", *next(iter(found.values()))], rows)
    keep("state_memory", options, found)


if __name__ == "__main__":
    main()
