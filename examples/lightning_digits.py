"""Lightning: one callback, and every `fit` is a task. Three tasks made from scikit-learn's digits.

In a clone: pip install '.[lightning]' && python examples/lightning_digits.py
"""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from alasso import ALASSO
from alasso.integrations.lightning import AlassoCallback

TASKS = 3


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def loaders(task: int) -> tuple[DataLoader, DataLoader]:
    """Digits with their pixels shuffled, another way in every task."""
    digits = load_digits()
    pixels = torch.randperm(64, generator=torch.Generator().manual_seed(task))
    x, y = torch.tensor(digits.data, dtype=torch.float32)[:, pixels] / 16, torch.tensor(digits.target)
    split = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = (TensorDataset(x[part], y[part]) for part in (split[:1400], split[1400:]))
    return DataLoader(train, batch_size=64, shuffle=True), DataLoader(test, batch_size=len(test))


def trainer(*callbacks: pl.Callback) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(max_epochs=5, accelerator="cpu", callbacks=list(callbacks), enable_model_summary=False, **quiet)


def main() -> dict[str, float]:
    means = {}
    for name in ("plain", "ALASSO"):
        pl.seed_everything(0, verbose=False)
        model = Classifier()
        callbacks = [AlassoCallback(ALASSO(model, c=3.0, xi=0.01))] if name == "ALASSO" else []
        for task in range(TASKS):
            trainer(*callbacks).fit(model, loaders(task)[0])
        tests = [loaders(task)[1] for task in range(TASKS)]
        accuracies = [float(r[k]) for r in trainer().test(model, tests, verbose=False) for k in r]
        means[name] = sum(accuracies) / TASKS
        print(f"{name:7} " + " ".join(f"{a:.3f}" for a in accuracies) + f"   mean {means[name]:.3f}")
    return means


if __name__ == "__main__":
    main()
