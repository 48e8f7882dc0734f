"""Whole trainings by Lightning and the Hugging Face Trainer, for ``torture.py`` to kill and to resume.

Each is two tasks of a small network; the second one leaves checkpoints. A training that resumes has nothing but one.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from contextlib import suppress

import torch
from torch import nn

from alasso._digest import digest_of

EPOCHS = 4


class Network(nn.Module):
    """Takes the batches of both trainers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))

    def forward(self, x, labels):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def samples(task):
    generator = torch.Generator().manual_seed(task)
    inputs, labels = torch.randn(24, 6, generator=generator), torch.randint(4, (24,), generator=generator)
    return [{"x": x, "labels": y} for x, y in zip(inputs, labels, strict=True)]


def by_hugging_face(make, folder, checkpoint=None):
    """Trains both tasks, or what is left of the second after a checkpoint; the digest of all that was learned."""
    from transformers import Trainer, TrainingArguments

    from alasso.integrations.huggingface import AlassoCallback

    def trainer(task, **more):
        options = TrainingArguments(
            str(folder), per_device_train_batch_size=8, use_cpu=True, report_to="none", disable_tqdm=True,
            dataloader_pin_memory=False, learning_rate=5e-3, logging_strategy="no", **more,
        )  # fmt: skip
        return Trainer(model, options, train_dataset=samples(task), callbacks=[keep])

    torch.manual_seed(3)
    model, keep = Network(), AlassoCallback(make, resume_from=checkpoint)
    if checkpoint is None:
        trainer(0, num_train_epochs=1, save_strategy="no").train()
    second = trainer(1, num_train_epochs=EPOCHS, save_strategy="epoch")
    second.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return digest_of([model.state_dict(), keep.regularizer.state_dict()])


def by_lightning(make, folder, checkpoint=None):
    """The same by Lightning."""
    import lightning.pytorch as L
    from torch.utils.data import DataLoader

    from alasso.integrations.lightning import AlassoCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = Network()

        def training_step(self, batch, batch_idx):
            return self.network(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 5e-3)

    def fit(task, epochs, *callbacks, **more):
        trainer = L.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[keep, *callbacks],
            enable_model_summary=False, enable_checkpointing=bool(callbacks), default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(module, DataLoader(samples(task), batch_size=8), **more)

    torch.manual_seed(3)
    module, keep = Module(), AlassoCallback(lambda module: make(module.network))
    if checkpoint is None:
        fit(0, 1)
    saving = L.callbacks.ModelCheckpoint(folder, filename="checkpoint-{step}", save_top_k=-1, every_n_epochs=1)
    fit(1, EPOCHS, saving, ckpt_path=checkpoint, weights_only=True)
    return digest_of([module.network.state_dict(), keep.regularizer.state_dict()])


def checkpoints(folder):
    """What a training has left, the newest first; some of it may not be whole."""
    return sorted(folder.glob("checkpoint-*"), key=lambda one: -int("".join(filter(str.isdigit, one.stem))))


NEEDS = {
    "Hugging Face's training killed": (by_hugging_face, ("transformers.trainer", "alasso.integrations.huggingface")),
    "Lightning's training killed": (by_lightning, ("lightning.pytorch", "alasso.integrations.lightning")),
}


def trainings():
    """The trainers that are installed, imported here once for all children."""
    found = {}
    for name, (train, modules) in NEEDS.items():
        with warnings.catch_warnings(), suppress(ImportError):
            warnings.simplefilter("ignore")
            for module in modules:
                importlib.import_module(module)
            found[name] = train
    return found
