"""LoRA adapters of peft: what is frozen costs nothing, and merging between tasks keeps the memory."""

import copy
import warnings

import pytest
import torch
from torch import nn

from alasso import ALASSO, EWC, IMM, MAS, SI, AlassoError
from alasso.importance import fisher

from helpers import run, same, toy_tasks, weights

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what other libraries say when they are imported
    peft = pytest.importorskip("peft", reason="needs the extra 'lora'")
    from alasso.integrations.lora import merge_adapters

DOUBLE = torch.float64
TASKS = toy_tasks(3, dtype=DOUBLE)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.first, self.second = nn.Embedding(9, 5), nn.Linear(6, 12), nn.Linear(17, 4)

    def forward(self, x):
        looked_up = self.words((x[:, :2].abs() * 4).long().clamp(max=8)).sum(1)
        return self.second(torch.cat((self.first(x).relu(), looked_up), 1))


def adapted():
    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["words", "first", "second"])
    return peft.get_peft_model(Net().to(DOUBLE), config).to(DOUBLE)


def adam(model):
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)


def base_weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if "base_layer" in name}


def test_frozen_base_weights_cost_nothing_and_stay_where_they_are():
    model = adapted()
    before = base_weights(model)
    optimizer = adam(model)
    reg = ALASSO(model).attach(optimizer)
    for task in TASKS:
        run(model, optimizer, task)
        reg.consolidate()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(reg.importance()) == trained and all("lora_" in name for name in trained)
    # ALASSO keeps four numbers a trained weight and one a tensor: no state, no gradient of frozen ones.
    kept = sum(t.numel() for state in reg.state_dict()["parameters"].values() for t in state.values())
    assert kept == sum(4 * p.numel() + 1 for p in model.parameters() if p.requires_grad)
    buffers = reg._attached[0].plans._buffers
    assert set(buffers) <= {id(p) for p in model.parameters() if p.requires_grad}
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    after = base_weights(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_importance_of_adapters_needs_none_of_the_base_weights():
    model = adapted()
    found = fisher(model, TASKS[0])
    assert set(found) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(not p.requires_grad for name, p in model.named_parameters() if "base_layer" in name)
    x, y = TASKS[0][0]
    single = fisher(model, [(x, y)])
    expected = torch.zeros_like(model.base_model.model.second.lora_B["default"].weight)
    for i in range(len(x)):
        loss = nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        expected += torch.autograd.grad(loss, model.base_model.model.second.lora_B["default"].weight)[0] ** 2 / len(x)
    torch.testing.assert_close(single["base_model.model.second.lora_B.default.weight"], expected)


def trained_for_a_task(kind=ALASSO, **settings):
    model = adapted()
    optimizer = adam(model)
    reg = kind(model, **settings).attach(optimizer)
    run(model, optimizer, TASKS[0])
    reg.consolidate(TASKS[0])
    return model, optimizer, reg


@pytest.mark.parametrize("kind", [ALASSO, SI, EWC, MAS])
def test_merging_changes_neither_the_model_nor_the_penalty_of_moves_that_it_leaves(kind):
    model, _, reg = trained_for_a_task(kind)
    unmerged = copy.deepcopy(model)
    unmerged_reg = kind(unmerged)
    unmerged_reg.load_state_dict(reg.state_dict())
    x = TASKS[1][0][0]
    before, old_base = model(x), base_weights(model)
    merge_adapters(reg)
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-13)
    changed = base_weights(model)
    assert all(not torch.equal(changed[name], old) for name, old in old_base.items() if name.endswith("weight"))
    assert float(reg.penalty()) == pytest.approx(0.0, abs=1e-20)

    # The factor that was merged, moved by the same step in both: the same function, the same penalty.
    steps = {}
    for m in (model, unmerged):
        with torch.no_grad():
            for name, p in m.named_parameters():
                if "lora_B.default" in name or "lora_embedding_A" in name:
                    steps.setdefault(name, 0.1 * torch.randn_like(p))
                    p += steps[name]
    torch.testing.assert_close(model(x), unmerged(x), rtol=1e-10, atol=1e-12)
    assert float(reg.penalty()) > 0
    torch.testing.assert_close(reg.penalty(), unmerged_reg.penalty(), rtol=1e-9, atol=0)


def test_the_other_factor_is_free_after_merging():
    model, _, reg = trained_for_a_task()
    merge_adapters(reg)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_A.default" in name or "lora_embedding_B" in name:
                p += 1.0
    assert float(reg.penalty()) == pytest.approx(0.0, abs=1e-20)


def test_an_attached_run_with_merging_in_between_is_that_of_one_restored_before_the_merge():
    model, optimizer, reg = trained_for_a_task(c=5.0)
    for task in TASKS[1:]:
        other = adapted()
        other.load_state_dict(model.state_dict())
        other_optimizer = adam(other)
        other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        other_reg = ALASSO(other, c=5.0).attach(other_optimizer)
        other_reg.load_state_dict(reg.state_dict())
        for m, o, r in ((model, optimizer, reg), (other, other_optimizer, other_reg)):
            merge_adapters(r)
            run(m, o, task)
            r.consolidate()
        assert same(weights(model), weights(other))
        assert same(reg.importance().values(), other_reg.importance().values())
    assert reg.tasks == 3


def test_adapters_merged_for_inference_and_taken_out_again_keep_their_state():
    model, optimizer, reg = trained_for_a_task()
    saved = reg.importance()
    model.merge_adapter()
    model.unmerge_adapter()
    run(model, optimizer, TASKS[1])
    reg.consolidate()
    assert set(saved) == set(reg.importance())


def test_mistakes_are_named():
    model, optimizer, reg = trained_for_a_task()
    run(model, optimizer, TASKS[1])
    with pytest.raises(AlassoError, match=r"call consolidate\(\) first"):
        merge_adapters(reg)
    reg.consolidate()
    model.merge_adapter()
    with pytest.raises(AlassoError, match="unmerge_adapter"):
        merge_adapters(reg)
    with pytest.raises(AlassoError, match="IMM averages"):
        merge_adapters(IMM(adapted()))
    with pytest.raises(AlassoError, match="no LoRA adapters"):
        merge_adapters(ALASSO(Net()))
    with pytest.raises(AlassoError, match="not protected"):
        reg.forget(nn.Parameter(torch.zeros(2)))
