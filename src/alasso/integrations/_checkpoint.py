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
    """Save a state; call it on all ranks. Only ranks with ``writes`` write a state that is not sharded."""
    if _any_sharded(state):
        save_shards(state, checkpoint_id=folder / FOLDER)
    elif writes:
        part = folder / f"{FILE}.part"
        torch.save(state, part)
        part.replace(folder / FILE)  # so that the file is always complete


def exists(folder: Path) -> bool:
    """Return whether the folder holds a saved state."""
    return (folder / FILE).is_file() or (folder / FOLDER).is_dir()


def load(folder: Path, like: dict[str, Any]) -> dict[str, Any]:
    """Return the saved state; ``like`` has its structure, and a sharded state overwrites it."""
    if (folder / FILE).is_file():
        loaded: dict[str, Any] = torch.load(folder / FILE, map_location="cpu", weights_only=True)
        return loaded
    load_shards(like, checkpoint_id=folder / FOLDER)
    return like


def _any_sharded(state: Any) -> bool:
    """Return whether a state holds sharded tensors."""
    if isinstance(state, Mapping):
        return any(_any_sharded(value) for value in state.values())
    return isinstance(state, DTensor)
