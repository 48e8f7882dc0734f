"""A regularizer's state beside a trainer's checkpoint: one file, or a folder with a part from each rank if sharded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor

FILE = "alasso.pt"
FOLDER = "alasso"


def save(state: dict[str, Any], folder: Path, *, writes: bool) -> None:
    """To be called by all ranks; only those that ``writes`` is true for write what is not sharded."""
    if any_sharded(state):
        save_shards(state, checkpoint_id=folder / FOLDER)
    elif writes:
        part = folder / f"{FILE}.part"
        torch.save(state, part)
        part.replace(folder / FILE)  # whole or not at all


def exists(folder: Path) -> bool:
    return (folder / FILE).is_file() or (folder / FOLDER).is_dir()


def load(folder: Path, like: dict[str, Any]) -> dict[str, Any]:
    """What was saved; ``like`` has its structure, and is overwritten where the state was saved in shards."""
    if (folder / FILE).is_file():
        loaded: dict[str, Any] = torch.load(folder / FILE, map_location="cpu", weights_only=True)
        return loaded
    load_shards(like, checkpoint_id=folder / FOLDER)
    return like


def any_sharded(state: Any) -> bool:
    if isinstance(state, Mapping):
        return any(any_sharded(value) for value in state.values())
    return isinstance(state, DTensor)
