"""What a pass over a task's data costs at its end, in plain epochs over the same data.

    python benchmarks/importance.py [--device cpu --threads 2 --rounds 5 --samples 60000]

The network is the paper's, 784-2000-2000-10 with batches of 256; an epoch trains it with torch's fused Adam. A pass
takes the square, or the size, of every single sample's gradient, none of which is ever made.
"""

from __future__ import annotations

import torch
from common import Step, arguments, compare, network, parsed, training_step
from torch import Tensor

from alasso.importance import fisher, squared_output_norm

SIZES = (784, 2000, 2000, 10)
BATCH = 256
EPOCH = "plain epoch, fused Adam"


def data(samples: int, device: str) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(samples, SIZES[0], generator=generator).to(device)
    y = torch.randint(SIZES[-1], (samples,), generator=generator).to(device)
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


def cases(batches: list[tuple[Tensor, Tensor]], device: str) -> dict[str, Step]:
    model = network(*SIZES, device=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, fused=True)

    def epoch() -> None:
        for x, y in batches:
            training_step(model, optimizer, x, y)()

    def fisher_of(labels: str) -> Step:
        def run() -> None:
            fisher(model, batches, labels=labels)

        return run

    def mas_pass() -> None:
        squared_output_norm(model, batches)

    passes = {"Fisher, true labels (EWC)": fisher_of("true"), "Fisher, sampled labels": fisher_of("sampled")}
    return {EPOCH: epoch, **passes, "MAS": mas_pass}


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], rounds=5)
    parser.add_argument("--samples", type=int, default=60_000)
    options = parsed(parser)
    passes = cases(data(options.samples, options.device), options.device)
    title = f"A pass over {options.samples:,} samples, 784-2000-2000-10, on {options.device}, {options.rounds} rounds"
    compare("importance", title, ["pass", "s", "plain epochs (quartiles)"], passes, EPOCH, options)


if __name__ == "__main__":
    main()
