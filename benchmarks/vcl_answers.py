"""What VCL's answers to test examples cost: sample by sample, in lots that share the first layer, and compiled.

    python benchmarks/vcl_answers.py [--device cuda --rounds 5 --examples 10000 --samples 100]

The network is the paper's, 784-2000-2000-10 with Gaussian weights; every answer is the mean over samples of them.
"""

from __future__ import annotations

import statistics

import torch
from common import Step, arguments, interleaved, network, parsed, ratio, report
from torch import Tensor, nn

from alasso.bench.sampled_answers import SampledAnswers
from alasso.methods import vcl

SIZES = (784, 2000, 2000, 10)
ONE_BY_ONE = "sample by sample"


def cases(model: nn.Module, x: Tensor, samples: int) -> dict[str, Step]:
    compiled = SampledAnswers(model, "the benchmark's network", samples, bf16=False)

    @torch.no_grad()
    def one_by_one() -> None:
        sum(model(x).softmax(-1) for _ in range(samples)) / samples

    @torch.no_grad()
    def in_lots() -> None:
        vcl.predict(model, x, samples)

    @torch.no_grad()
    def in_compiled_lots() -> None:
        compiled(model, x, slice(0, SIZES[-1]))

    return {ONE_BY_ONE: one_by_one, "vcl.predict": in_lots, "compiled, as in runs on a GPU": in_compiled_lots}


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], rounds=5)
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=100)
    options = parsed(parser)
    model = vcl.convert(network(*SIZES, device=options.device)).eval()
    x = torch.rand(options.examples, SIZES[0], generator=torch.Generator().manual_seed(0)).to(options.device)
    ways = cases(model, x, options.samples)
    for one in ways.values():  # the first call of each, which makes the kernels, is not counted
        one()
    times = interleaved(ways, options.rounds, options.device, untimed=0, timed=1)
    medians = {name: statistics.median(of_case) for name, of_case in times.items()}
    ratios = {name: ratio(times, name, ONE_BY_ONE) for name in times}
    rows = [
        [name, f"{medians[name]:.3f}", f"{of['median']:.2f} ({of['low']:.2f} – {of['high']:.2f})"]
        for name, of in ratios.items()
    ]
    title = f"{options.examples:,} examples, {options.samples} samples of weights, 784-2000-2000-10, {options.device}"
    record = {"seconds": medians, "ratios": ratios, "examples": options.examples, "samples": options.samples}
    report("vcl_answers", title, ["answers", "s", "to sample by sample (quartiles)"], rows, record, [], options)


if __name__ == "__main__":
    main()
