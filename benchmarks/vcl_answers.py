"""What VCL's answers to test examples cost: sample by sample, in lots, in lots that share the first layer, compiled.

    python benchmarks/vcl_answers.py [--device cuda --rounds 5 --examples 10000 --samples 100]

The network is the paper's, 784-2000-2000-10 with Gaussian weights; every answer is the mean over samples of them.
"""

from __future__ import annotations

import torch
from common import Step, arguments, compare, network, parsed
from torch import Tensor, nn

from alasso import vcl
from alasso.bench.learners.vcl_predict import SampledAnswers

SIZES = (784, 2000, 2000, 10)
ONE_BY_ONE = "sample by sample"


def cases(model: nn.Module, x: Tensor, samples: int) -> dict[str, Step]:
    compiled = SampledAnswers(model, "the benchmark's network", samples, bf16=False)

    @torch.no_grad()
    def one_by_one() -> None:
        sum(model(x).softmax(-1) for _ in range(samples)) / samples

    @torch.no_grad()
    def in_lots() -> None:
        counts = vcl.counts_at_once(samples, len(x), vcl.ROWS_AT_ONCE)
        sum(vcl.sum_of_copies(model(vcl.repeated(x, count)).softmax(-1), count) for count in counts) / samples

    @torch.no_grad()
    def in_lots_that_share() -> None:
        vcl.predict(model, x, samples)

    @torch.no_grad()
    def in_compiled_lots() -> None:
        compiled(model, x, slice(0, SIZES[-1]))

    return {
        ONE_BY_ONE: one_by_one,
        "in lots, nothing shared": in_lots,
        "vcl.predict": in_lots_that_share,
        "compiled, as in runs on a GPU": in_compiled_lots,
    }


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], rounds=5)
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=100)
    options = parsed(parser)
    model = vcl.convert(network(*SIZES, device=options.device)).eval()
    x = torch.rand(options.examples, SIZES[0], generator=torch.Generator().manual_seed(0)).to(options.device)
    ways = cases(model, x, options.samples)
    title = f"{options.examples:,} examples, {options.samples} samples of weights, 784-2000-2000-10, {options.device}"
    compare("vcl_answers", title, ["answers", "s", "to sample by sample (quartiles)"], ways, ONE_BY_ONE, options)


if __name__ == "__main__":
    main()
