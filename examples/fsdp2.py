"""FSDP2: every rank protects its own shards; a state saved in shards loads onto any number of ranks.

torchrun --nproc-per-node 2 examples/fsdp2.py --folder /tmp/digits
torchrun --nproc-per-node 1 examples/fsdp2.py --folder /tmp/digits     # resumes what the two ranks saved
"""

import argparse
import gc
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from alasso import ALASSO

BATCH, EPOCHS = 64, 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def permuted_digits(task: int) -> tuple[torch.Tensor, ...]:
    digits = load_digits()
    pixels = torch.randperm(64, generator=torch.Generator().manual_seed(task))
    x, y = torch.tensor(digits.data, dtype=torch.float32)[:, pixels] / 16, torch.tensor(digits.target)
    return tuple(t.to(DEVICE) for t in (x[:1408], y[:1408], x[1408:], y[1408:]))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, task: int) -> None:
    x, y, _, _ = permuted_digits(task)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))  # the same on all ranks
        for batch in order.split(BATCH):
            mine = batch.chunk(dist.get_world_size())[dist.get_rank()]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
            optimizer.step()


def learn_next_task(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    model.to(DEVICE)
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    reg = ALASSO(model, c=3.0, xi=0.01).attach(optimizer)

    def everything() -> dict:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "regularizer": reg.state_dict()}

    task = len(list(folder.glob("after_task_*")))
    if task > 0:
        dcp.load(state := everything(), checkpoint_id=folder / f"after_task_{task}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        reg.load_state_dict(state["regularizer"])
    train(model, optimizer, task)
    reg.consolidate()
    dcp.save(everything(), checkpoint_id=folder / f"after_task_{task + 1}")
    for seen in range(task + 1):
        _, _, x, y = permuted_digits(seen)
        with torch.no_grad():
            accuracy = float((model(x).argmax(1) == y).float().mean())
        if dist.get_rank() == 0:
            print(f"after task {task + 1}, on task {seen + 1}: {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    learn_next_task(parser.parse_args().folder)
    gc.collect()  # the sharded model has to be gone before the group it talks through
    dist.barrier()
    dist.destroy_process_group()
