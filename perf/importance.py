"""What a pass of EWC or MAS over a task's data costs, in plain epochs over the same data.

    python perf/importance.py [--device cpu --threads 2 --rounds 5 --samples 60000 --record]

The network is the paper's, 784-2000-2000-10 with batches of 256; an epoch trains it with fused Adam. A pass squares, or
makes absolute, the gradient of every single sample, and never forms one.
"""

from __future__ import annotations

import torch
from _measure import (
    BATCH,
    SIZES,
    Step,
    arguments,
    interleaved,
    keep,
    milliseconds,
    network,
    parsed,
    random_batch,
    ratio,
    spread,
    table,
    training_step,
)

from alasso.importance import fisher, squared_output_norm

EPOCH = "plain epoch, fused Adam"


def cases(samples: int, device: str) -> dict[str, Step]:
    """An epoch and the passes over the same batches."""
    x, y = random_batch(SIZES, samples, device)
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    model = network(*SIZES, device=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, fused=True)

    def epoch() -> None:
        for batch in batches:
            training_step(model, optimizer, *batch)()

    return {
        EPOCH: epoch,
        "Fisher, true labels (EWC)": lambda: fisher(model, batches),
        "Fisher, sampled labels": lambda: fisher(model, batches, labels="sampled"),
        "MAS": lambda: squared_output_norm(model, batches),
    }


def main() -> None:
    parser = arguments(__doc__.partition("\n")[0], rounds=5)
    parser.add_argument("--samples", type=int, default=60_000)
    options = parsed(parser)
    passes = cases(options.samples, options.device)
    interleaved(passes, 1, options.device, untimed=0, timed=1)  # what the first call sets up
    times = interleaved(passes, options.rounds, options.device, untimed=0, timed=1)
    found = {
        name: {"milliseconds": milliseconds(times, name), "plain epochs": ratio(times, name, EPOCH)} for name in times
    }
    rows = [[name, f"{of['milliseconds'] / 1e3:.3f}", spread(of["plain epochs"])] for name, of in found.items()]
    table(f"A pass over {options.samples:,} samples", ["pass", "s", "plain epochs (quartiles)"], rows)
    keep("importance", options, {"passes": found})


if __name__ == "__main__":
    main()
