"""LoRA (peft): a pretrained model learns two more domains through adapters, and keeps what it knew.

The base weights are frozen and cost nothing. The adapters have seen no path for the pretraining, so `warm_start`
measures on some of its data how much each of them matters to it.

In a clone: pip install '.[huggingface,lora]' && python examples/lora.py
"""

import random

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from alasso import ALASSO

TOPICS, SHARED, OWN, LENGTH = 6, 120, 5, 12
Text = tuple[torch.Tensor, torch.Tensor]


def texts(domain: int, count: int) -> Text:
    """A domain has some words of its own, and uses the words that all share in its own sense."""
    chance = random.Random(domain)
    sense = [chance.randrange(TOPICS) for _ in range(SHARED)]
    topics = [chance.randrange(TOPICS) for _ in range(count)]
    rows = []
    for topic in topics:
        own = [1 + SHARED + (domain * TOPICS + topic) * OWN + chance.randrange(OWN) for _ in range(3)]
        shared = chance.choices([1 + w for w in range(SHARED) if sense[w] == topic], k=LENGTH - len(own))
        rows.append(chance.sample(own + shared, LENGTH))
    return torch.tensor(rows), torch.tensor(topics)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Text, epochs: int) -> None:
    x, y = data
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(input_ids=x[batch]).logits, y[batch]).backward()
            optimizer.step()


def main() -> dict[str, float]:
    data = [texts(domain, 900) for domain in range(3)]
    means = {}
    for name in ("plain", "ALASSO"):
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
        vocabulary = 1 + SHARED + 3 * TOPICS * OWN
        base = BertForSequenceClassification(BertConfig(vocab_size=vocabulary, num_labels=TOPICS, **sizes))
        train(base, torch.optim.Adam(base.parameters(), lr=2e-3), tuple(t[:700] for t in data[0]), 4)  # pretraining

        layers = ["word_embeddings", "query", "key", "value", "dense"]
        model = get_peft_model(base, LoraConfig(r=8, target_modules=layers))
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
        if name == "ALASSO":
            reg = ALASSO(model, c=1.0, xi=1e-3)
            reg.warm_start([{"input_ids": data[0][0][:200], "labels": data[0][1][:200]}], importance="fisher")
            reg.attach(optimizer)
        for x, y in data[1:]:
            train(model, optimizer, (x[:700], y[:700]), 4)
            if name == "ALASSO":
                reg.consolidate()
        model.eval()
        with torch.no_grad():
            accuracies = [float((model(input_ids=x[700:]).logits.argmax(1) == y[700:]).float().mean()) for x, y in data]
        means[name] = sum(accuracies) / 3
        print(f"{name:7} " + " ".join(f"{a:.3f}" for a in accuracies) + f"   mean {means[name]:.3f}")
    return means


if __name__ == "__main__":
    main()
