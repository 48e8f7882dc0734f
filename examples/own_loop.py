"""Your own training loop, three lines added: four tasks made from scikit-learn's digits, with and without ALASSO.

python examples/own_loop.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from alasso import ALASSO

TASKS, EPOCHS, BATCH = 4, 6, 64


def permuted_digits(task: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, y) to train on and (x, y) to test on; every task shuffles the pixels in another way."""
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    x = x[:, torch.randperm(64, generator=torch.Generator().manual_seed(task))]
    split = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[split[:1400]], y[split[:1400]], x[split[1400:]], y[split[1400:]]


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def learn_all_tasks(protect: bool) -> list[float]:
    """Accuracy on every task after the last one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if protect:
        reg = ALASSO(model, c=3.0, xi=0.01)  # 1
        reg.attach(optimizer)  # 2
    for task in range(TASKS):
        x, y, _, _ = permuted_digits(task)
        for _ in range(EPOCHS):
            for batch in torch.randperm(len(x)).split(BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
        if protect:
            reg.consolidate()  # 3
    return [accuracy(model, *permuted_digits(task)[2:]) for task in range(TASKS)]


def main() -> dict[str, float]:
    means = {}
    for name, protect in (("plain", False), ("ALASSO", True)):
        accuracies = learn_all_tasks(protect)
        means[name] = sum(accuracies) / TASKS
        print(f"{name:7} " + " ".join(f"{a:.3f}" for a in accuracies) + f"   mean {means[name]:.3f}")
    return means


if __name__ == "__main__":
    main()
