"""The end of a task needs the whole new state beside the old one, so that both can be kept; and little else."""

import weakref
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alasso import ALASSO, KronALASSO

from helpers import mlp, run, toy_tasks


class Peak(TorchDispatchMode):
    """The most bytes that tensors made in the context held at a time."""

    def __init__(self):
        super().__init__()
        self.made, self.bytes = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for one in tree_leaves(found):
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in known:
                self.made.append(weakref.ref(one))
        self.made = [made for made in self.made if made() is not None]
        held = {(storage := made().untyped_storage()).data_ptr(): storage.nbytes() for made in self.made}
        self.bytes = max(self.bytes, sum(held.values()))
        return found


KRON = partial(KronALASSO, rank=2)


@pytest.mark.parametrize(("make", "dtype"), [(ALASSO, torch.float32), (KRON, torch.float32), (KRON, torch.bfloat16)])
def test_the_end_of_a_task_takes_half_the_state_beside_the_new_one(make, dtype):
    sizes = [96] * (4 if dtype == torch.float32 else 12)  # one tensor at a time is worked on in float32
    model, tasks = mlp(*sizes, dtype=dtype), toy_tasks(2, dtype=dtype, inputs=96, classes=96)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reg = make(model).attach(optimizer)
    for task in tasks:
        run(model, optimizer, task)
        with Peak() as peak:
            reg.consolidate()
    state = sum(t.nbytes for tensors in reg.protected.states.values() for t in tensors)
    assert state < peak.bytes < 1.5 * state
