"""Avalanche's own training steps, if it is installed: its strategies as they come, each iteration timed from within."""

from __future__ import annotations

import time
from typing import Any

import torch
from common import Step, network, synchronise


def cases(sizes: tuple[int, ...], batch: int, device: str) -> tuple[dict[str, Step], str | None]:
    """(steps by name, None), or (nothing, why it was left out)."""
    try:
        from avalanche.benchmarks.scenarios.dataset_scenario import benchmark_from_datasets
        from avalanche.benchmarks.utils import as_taskaware_classification_dataset
        from avalanche.training.plugins import EWCPlugin, MASPlugin, SynapticIntelligencePlugin
        from avalanche.training.supervised import Naive
    except ImportError as error:
        return {}, f"{error.name or error} is not installed"

    class TensorData(torch.utils.data.TensorDataset):
        targets: list[int]

    torch.manual_seed(1)
    data = TensorData(torch.rand(batch, sizes[0]), torch.randint(0, sizes[-1], (batch,)))
    data.targets = data.tensors[1].tolist()
    experience = benchmark_from_datasets(train=[as_taskaware_classification_dataset(data)]).train_stream[0]

    def step_of(plugin: Any) -> Step:
        model = network(*sizes, device=device)
        strategy = Naive(
            model=model,
            optimizer=torch.optim.Adam(model.parameters()),
            train_mb_size=batch,
            device=device,
            plugins=[plugin] if plugin else [],
            evaluator=None,
        )
        for _ in range(2):
            strategy.train(experience)  # a task behind
        return Iterations(strategy, experience, device)

    plugins = {
        "Avalanche, no method": None,
        "Avalanche SI": SynapticIntelligencePlugin(si_lambda=0.1),
        "Avalanche EWC online": EWCPlugin(100.0, mode="online", decay_factor=0.9),
        "Avalanche MAS": MASPlugin(1.0),
    }
    return {name: step_of(plugin) for name, plugin in plugins.items()}, None


class Iterations:
    """One iteration of a strategy's training loop a call; a task's beginning and end are not timed."""

    def __init__(self, strategy: Any, experience: Any, device: str) -> None:
        self.strategy, self.experience, self.device = strategy, experience, device

    def __call__(self) -> None:
        self.strategy.train(self.experience)

    def seconds(self, count: int) -> float:
        """Mean seconds of ``count`` iterations from the batch in hand to the weights updated."""
        total = 0.0
        original = self.strategy.training_epoch

        def timed(**kwargs: Any) -> None:
            nonlocal total
            synchronise(self.device)
            start = time.perf_counter()
            original(**kwargs)
            synchronise(self.device)
            total += time.perf_counter() - start

        self.strategy.training_epoch = timed
        try:
            for _ in range(count):
                self()
        finally:
            self.strategy.training_epoch = original
        return total / count
