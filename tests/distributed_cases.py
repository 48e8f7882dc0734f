"""What the ranks of tests/test_distributed.py do. In a file of its own, so that new processes can import it."""

from __future__ import annotations

import datetime
import multiprocessing
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from alasso import ALASSO, EWC, IMM, MAS, SI, KronALASSO, OnlineEWC

from helpers import mlp, toy_tasks

METHODS = {
    "ALASSO": ALASSO,
    "SI": SI,
    "EWC": EWC,
    "OnlineEWC": OnlineEWC,
    "MAS": MAS,
    "IMM": IMM,
    "KronALASSO": KronALASSO,
    "KronALASSO, path": partial(KronALASSO, scale="path"),
}
SETTINGS = {
    "ALASSO": {"c": 5.0, "xi": 1e-3},
    "SI": {"c": 1.0, "xi": "auto"},
    "KronALASSO": {"rank": 5},
    "KronALASSO, path": {"rank": 5},
}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
MIDDLE = 4  # batches of the second task that come before a save


def launch(ranks, case, folder, *arguments):
    """Run ``case(rank, folder, *arguments)`` on so many real processes, over gloo; raise if one fails or hangs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "alasso.regularizer"]
    )
    folder = Path(folder)
    meeting = folder / f"meeting_{case.__name__}_{ranks}"
    processes = [
        context.Process(target=one_rank, args=(rank, ranks, meeting, case, folder, arguments)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    stuck = [process for process in processes if process.is_alive()]
    for process in stuck:
        process.kill()
    codes = [process.exitcode for process in processes]
    assert not stuck and codes == [0] * ranks, f"{case.__name__} on {ranks} ranks: exit codes {codes}"


def one_rank(rank, ranks, meeting, case, folder, arguments):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{meeting}", timeout=timeout, rank=rank, world_size=ranks)
    try:
        case(rank, folder, *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()
        sys.stdout.flush()


def share(batch, rank, ranks):
    """This rank's part of a batch. Parts are equal, for batches of 12: ranks average their gradients."""
    x, y = batch
    return x.chunk(ranks)[rank], y.chunk(ranks)[rank]


def uneven_share(task, rank, ranks):
    """A part of a task's data, as one batch; parts differ in size between ranks."""
    x, y = (torch.cat(parts) for parts in zip(*task, strict=True))
    cuts = [0, *(len(x) * (r + 1) // (ranks + 1) for r in range(ranks - 1)), len(x)]
    return [(x[cuts[rank] : cuts[rank + 1]], y[cuts[rank] : cuts[rank + 1]])]


def start(kind, dtype, wrap):
    """(model to call, regularizer, optimizer); the same on all ranks and without ranks."""
    torch.manual_seed(5)
    plain = mlp(6, 12, 7, 4, dtype=DTYPES[dtype])
    model = wrap(plain)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    reg = METHODS[kind](model, **SETTINGS.get(kind, {})).attach(optimizer)
    return model, reg, optimizer


def train(model, optimizer, batches, rank, ranks):
    for batch in batches:
        x, y = share(batch, rank, ranks)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def whole_tensors(tensors):
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()}


def outcome(model, reg):
    weights = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    return {
        "weights": whole_tensors(weights),
        "importance": whole_tensors(reg.importance()),
        "anchor": whole_tensors(reg.anchor()),
        "penalty": reg.penalty().detach(),
        "summary": {
            one.name: torch.tensor([one.stiffness, one.moved, one.reach * one.stiffness]).nan_to_num()
            for one in reg.summary().tensors
        },
    }


def plain(model):
    return model


def ddp(model):
    return nn.parallel.DistributedDataParallel(model)


def fsdp(model):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def fsdp_as_one(model):
    """Which leaves whole parameters in the model after a forward pass that no backward one follows."""
    return fully_shard(model)


class Cut(nn.Module):
    """A linear layer whose weight and bias are cut as FSDP2 does on two ranks, but in one process."""

    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias = (nn.ParameterList(p.detach().chunk(2)) for p in (layer.weight, layer.bias))

    def forward(self, x):
        return nn.functional.linear(x, torch.cat(list(self.weight)), torch.cat(list(self.bias)))


def cut(model):
    return nn.Sequential(*(Cut(layer) if isinstance(layer, nn.Linear) else layer for layer in model))


def whole_again(tensors):
    """Parts of :class:`Cut` as the tensors that they were."""
    parts = {}
    for name, tensor in tensors.items():
        parts.setdefault(name.rpartition(".")[0], []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def summary_of_wholes(summary, tensors):
    """What a summary says of parts of :class:`Cut`, of the tensors that they were: a mean, and root mean squares."""
    parts = {}
    for name, numbers in summary.items():
        parts.setdefault(name.rpartition(".")[0], []).append((tensors[name].numel(), numbers))
    found = {}
    for name, of_tensor in parts.items():
        sizes, numbers = (torch.tensor([size for size, _ in of_tensor]), torch.stack([one for _, one in of_tensor]))
        shares = (sizes / sizes.sum())[:, None]
        found[name] = torch.cat([(shares * numbers).sum(0)[:1], (shares * numbers.square()).sum(0)[1:].sqrt()])
    return found


WRAPS = {"plain": plain, "cut": cut, "ddp": ddp, "fsdp": fsdp, "fsdp-as-one": fsdp_as_one}


def three_tasks(kind, dtype, wrap, rank=0, ranks=1):
    """Three tasks; the penalty is looked at in the middle of the last, away from the anchor."""
    tasks = toy_tasks(3, dtype=DTYPES[dtype], size=12)
    model, reg, optimizer = start(kind, dtype, WRAPS[wrap])
    for task in tasks[:2]:
        train(model, optimizer, task, rank, ranks)
        reg.consolidate(uneven_share(task, rank, ranks))
    train(model, optimizer, tasks[2], rank, ranks)
    return outcome(model, reg)


def warm_then_a_task(kind, dtype, wrap, rank=0, ranks=1):
    tasks = toy_tasks(3, dtype=DTYPES[dtype], size=12)
    model, reg, optimizer = start(kind, dtype, WRAPS[wrap])
    reg.warm_start(uneven_share(tasks[0], rank, ranks), importance="mas")
    train(model, optimizer, tasks[1], rank, ranks)
    return outcome(model, reg)


def evaluated_in_between(kind, dtype, wrap, rank=0, ranks=1):
    """Before and after the end of each task; attached again, as trainers do."""
    tasks = toy_tasks(3, dtype=DTYPES[dtype], size=12)
    model, reg, optimizer = start(kind, dtype, WRAPS[wrap])
    for task in tasks:
        train(model, optimizer, task, rank, ranks)
        for act in (lambda task=task: reg.consolidate(uneven_share(task, rank, ranks)), lambda: reg.attach(optimizer)):
            with torch.no_grad():
                model(task[0][0])
            act()
    return outcome(model, reg)


class Experts(nn.Module):
    """Each half of a batch goes to a layer of its own: on two ranks, each rank calls another one."""

    def __init__(self):
        super().__init__()
        self.experts, self.head = nn.ModuleList([nn.Linear(6, 8), nn.Linear(6, 8)]), nn.Linear(8, 4)

    def forward(self, x):
        ranks = range(2) if not dist.is_initialized() else [dist.get_rank()]
        parts = zip(ranks, x.chunk(len(ranks)), strict=True)
        return self.head(torch.cat([self.experts[rank](part) for rank, part in parts]).relu())


def experts(kind, dtype, wrap, rank=0, ranks=1):
    torch.manual_seed(5)
    model = Experts().to(DTYPES[dtype])
    if wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    reg = METHODS[kind](model, **SETTINGS.get(kind, {})).attach(optimizer)
    for task in toy_tasks(2, dtype=DTYPES[dtype], size=12):
        train(model, optimizer, task, rank, ranks)
        reg.consolidate()
    train(model, optimizer, task, rank, ranks)
    return outcome(model, reg)


SCENARIOS = {
    "experts": experts,
    "three tasks": three_tasks,
    "warm start": warm_then_a_task,
    "evaluated": evaluated_in_between,
}


def case_equal_to_one_process(rank, folder, cases):
    for number, (scenario, *arguments) in enumerate(cases):
        found = SCENARIOS[scenario](*arguments, rank=rank, ranks=dist.get_world_size())
        if rank == 0:
            torch.save(found, folder / f"{number}.pt")


# -- saving by one number of ranks, loading by another ------------------------------------------------------------


def everything(model, optimizer, reg):
    """All that a run needs to go on, as `torch.distributed.checkpoint` takes it."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "reg": reg.state_dict()}


def case_all_on_two_ranks(rank, folder, cases, kinds):
    """One launch for all: starting processes takes longer than what they do."""
    case_equal_to_one_process(rank, folder, cases)
    for kind in kinds:
        save_in_the_middle(rank, folder, kind)
    if find_spec("transformers"):
        files_beside_a_checkpoint(rank, folder)
    details_of_shards(rank)


def save_in_the_middle(rank, folder, kind):
    ranks = dist.get_world_size()
    tasks = toy_tasks(3, dtype=torch.float64, size=12)
    model, reg, optimizer = start(kind, "float64", fsdp)
    train(model, optimizer, tasks[0], rank, ranks)
    reg.consolidate(uneven_share(tasks[0], rank, ranks))
    train(model, optimizer, tasks[1], rank, ranks)
    reg.consolidate(uneven_share(tasks[1], rank, ranks))
    train(model, optimizer, tasks[2][:MIDDLE], rank, ranks)
    dcp.save(everything(model, optimizer, reg), checkpoint_id=folder / f"checkpoint_{kind}")


def case_load_and_go_on(rank, folder, kinds):
    for kind in kinds:
        load_and_go_on(rank, folder, kind)


def load_and_go_on(rank, folder, kind):
    from torch.distributed.checkpoint.state_dict import set_state_dict

    ranks = dist.get_world_size()
    task = toy_tasks(3, dtype=torch.float64, size=12)[2]
    model, reg, optimizer = start(kind, "float64", fsdp)
    state = everything(model, optimizer, reg)
    dcp.load(state, checkpoint_id=folder / f"checkpoint_{kind}")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    reg.load_state_dict(state["reg"])
    train(model, optimizer, task[MIDDLE:], rank, ranks)
    found = outcome(model, reg)
    if rank == 0:
        torch.save(found, folder / f"{kind}_{ranks}.pt")


def files_beside_a_checkpoint(rank, folder):
    """What the callback for Hugging Face's Trainer writes and reads: shards from all ranks, one file otherwise."""
    from alasso.integrations import huggingface

    for wrap in (fsdp, ddp):
        (place := folder / wrap.__name__).mkdir(exist_ok=True)
        model, reg, optimizer = start("ALASSO", "float32", wrap)
        train(model, optimizer, toy_tasks(1)[0], rank, 2)
        reg.consolidate()
        saved = {"best": "{}", "regularizer": reg.state_dict()}
        huggingface._write_state(saved, place, writes=rank == 0)
        dist.barrier()
        assert huggingface._holds_state(place) and (place / huggingface.FILE).is_file() == (wrap is ddp)
        _, other, _ = start("ALASSO", "float32", wrap)
        loaded = huggingface._read_state(place, like={"best": "?", "regularizer": other.state_dict()})
        other.load_state_dict(loaded["regularizer"])
        assert loaded["best"] == "{}" and other.tasks == 1
        expected, found = whole_tensors(reg.importance()), whole_tensors(other.importance())
        assert all(torch.equal(found[name], value) for name, value in expected.items())


# -- mistakes and details -----------------------------------------------------------------------------------------


def details_of_shards(rank):
    # A regularizer from before the model was sharded, as trainers that shard late leave it.
    torch.manual_seed(5)
    model = mlp(6, 12, 7, 4)
    reg = ALASSO(model)
    reg.warm_start(toy_tasks(1)[0])
    before = reg.importance()
    model = fsdp(model)
    reg.look()
    after = whole_tensors(reg.importance())
    assert all(torch.equal(after[name], before[name]) for name in before)

    # All ranks refuse together, though only one of them holds what is to blame: of a state, and of a weight.
    saved = reg.state_dict()
    if rank == 1:
        saved["parameters"]["0.weight"]["omega"].to_local().fill_(float("nan"))
    assert "omega of 0.weight is not finite" in refusal(lambda: reg.load_state_dict(saved))

    # Factors of whole matrices cannot be cut, and those of shards fit no other number of ranks.
    plain_model = mlp(6, 12, 7, 4)
    kron = KronALASSO(plain_model)
    sharded = fsdp(plain_model)
    assert "make the regularizer after sharding" in refusal(kron.look)
    kron = KronALASSO(sharded)
    assert "0.weight is sharded" in refusal(kron.state_dict)
    assert "0.weight is sharded" in refusal(lambda: kron.load_state_dict({}))

    scale_told_by_shards(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg.attach(optimizer)
    train(model, optimizer, toy_tasks(2)[1], rank, 2)
    if rank == 1:
        with torch.no_grad():
            model[0].weight.to_local()[0, 0] = float("nan")
    assert "importance of 0.weight is NaN" in refusal(reg.consolidate)
    assert reg.tasks == 1


def scale_told_by_shards(rank):
    """The layer nearest to the loss tells as much as that of a whole model, also where gradients are clipped."""
    units = []
    for wrap in (fsdp, ddp, plain):
        model, kron, optimizer = start("KronALASSO", "float64", wrap)
        x, y = toy_tasks(1, dtype=torch.float64, size=12)[0][0]
        for half in range(2):  # accumulated
            part = slice(half * 6, half * 6 + 6)
            share_of_part = (x[part], y[part]) if wrap is plain else share((x[part], y[part]), rank, 2)
            (64 * nn.functional.cross_entropy(model(share_of_part[0]), share_of_part[1]) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        units.append([float(state.unit) for state in kron.protected.states.values()])
        kron.detach()
    expected = units[-1][0]
    assert expected > 0
    assert all(abs(unit / expected - 1) < 1e-5 for of_wrap in units for unit in of_wrap), units


def refusal(act):
    """What it says when it is refused."""
    from alasso import AlassoError

    try:
        act()
    except AlassoError as error:
        return str(error)
    raise AssertionError("not refused")
