"""Answers of networks whose weights are Gaussians, on a GPU: what lies between two matrix products is one kernel.

They are those of :func:`alasso.vcl.predict`, from other random numbers: kernels draw their own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from alasso import vcl
from alasso.bench.training.compiling import compiled_once

#: Rows (samples times examples) of one question from which on its kernels, some 20 s in the making, are worth it.
WORTH_COMPILING = 1 << 17
#: Rows sent through the network at once. The first layer's products are made once for each such lot.
ROWS_AT_ONCE = 50_000


class SampledAnswers:
    """Class probabilities, averaged over samples of the weights. Models ``built_as`` this one was share kernels."""

    def __init__(self, model: nn.Module, built_as: Hashable, samples: int, bf16: bool) -> None:
        self.built_as, self.samples, self.bf16 = built_as, samples, bf16
        self.network = SumOverSamples(copy.deepcopy(model).to("meta").eval())  # the weights are given at each call

    def __call__(self, model: nn.Module, x: Tensor, head: slice) -> Tensor:
        """(examples, classes of the head)"""
        weights = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
        columns = torch.arange(head.start, head.stop, device=x.device)
        counts = vcl.counts_at_once(self.samples, len(x), ROWS_AT_ONCE)
        return torch.stack([self.summed(count)(weights, x, columns) for count in counts]).sum(0) / self.samples

    def summed(self, count: int) -> Callable[..., Tensor]:
        """What adds up the probabilities of so many samples, compiled."""

        def sum_over_samples(weights: dict[str, Tensor], x: Tensor, columns: Tensor) -> Tensor:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
                found: Tensor = functional_call(self.network, weights, (x, columns, count))
            return found

        key = (self.built_as, "answers", self.bf16, count)
        return compiled_once(lambda: sum_over_samples, sum_over_samples, key)


class SumOverSamples(nn.Module):
    """The probabilities of some columns, added up over samples of the weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, columns: Tensor, count: int) -> Tensor:
        ((outputs, _),) = vcl.sampled_outputs(self.model, x, [count])
        return vcl.sum_of_copies(outputs.index_select(1, columns).softmax(-1), count)
