"""Small set-ups of two tasks each: a model, an optimizer, a way of training, and data in which plain training forgets.

One network can solve both tasks: the second shows the same classes in another form (pixels permuted, images turned,
words or nodes of another kind), so that a sample tells which task it is from, or it has a head of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

Weights = list[nn.Parameter]


@dataclass(frozen=True)
class Task:
    """Inputs and labels to train and to test on, and the columns of the output that are the task's own."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    columns: tuple[int, int | None] = (0, None)

    def head(self, output: Tensor) -> Tensor:
        return output[..., slice(*self.columns)]


@dataclass(frozen=True)
class SetUp:
    """One line of the table.

    Attributes:
        name: What is special about it.
        model: Makes the model.
        optimizers: Makes the optimizers from the model.
        tasks: Makes the two tasks from a seed.
        epochs: Over each task.
        batch: Samples in a batch.
        accumulate: Batches whose gradients are added up for a step.
        clip: Largest norm of the gradient.
        cosine: Whether the learning rate falls to zero along each task.
        bf16: Whether the forward pass runs under autocast.
        ema: Decay of the mean of the weights that is tested in their place.
        closure: Whether the optimizer calls a closure.
        fresh: Whether the second task has new optimizers.
        needs: The package that it needs, as pip calls it, and perhaps the least version.
    """

    name: str
    model: Callable[[], nn.Module]
    optimizers: Callable[[nn.Module], list[Optimizer]]
    tasks: Callable[[int], tuple[Task, Task]]
    epochs: int = 10
    batch: int = 64
    accumulate: int = 1
    clip: float | None = None
    cosine: bool = False
    bf16: bool = False
    ema: float | None = None
    closure: bool = False
    fresh: bool = False
    needs: str = ""


# -- data ----------------------------------------------------------------------------------------------------


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Scikit-learn's digits: images (N, 64) from 0 to 1, and labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


def divided(x: Tensor, y: Tensor, seed: int, columns: tuple[int, int | None] = (0, None)) -> Task:
    """Makes a task with a quarter of the samples to test on."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, train = order[: len(x) // 4], order[len(x) // 4 :]
    return Task(x[train], y[train], x[test], y[test], columns)


def permuted(seed: int, *shape: int) -> tuple[Task, Task]:
    """Digits, and digits with permuted pixels, as inputs of a shape."""
    x, y = digits()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1000 + seed))
    return divided(x.view(-1, *shape), y, seed), divided(x[:, order].reshape(-1, *shape), y, seed)


def inverted(seed: int) -> tuple[Task, Task]:
    """Images of digits, and the same in inverted colours, turned by 90°."""
    x, y = digits()
    images = x.view(-1, 1, 8, 8)
    return divided(images, y, seed), divided(1 - images.rot90(1, (2, 3)), y, seed)


def split_digits(seed: int) -> tuple[Task, Task]:
    """The digits 0 to 4, and 5 to 9, each with a head of its own."""
    x, y = digits()
    first = y < 5
    return divided(x[first], y[first], seed, (0, 5)), divided(x[~first], y[~first] - 5, seed, (5, 10))


WORDS, TOPICS, LENGTH = 160, 6, 16


def texts(seed: int) -> tuple[Task, Task]:
    """Bags of words about topics; both tasks have words of their own, and mean other topics by the shared ones."""
    return _texts(0, seed), _texts(1, seed)


def _texts(domain: int, seed: int, count: int = 1600) -> Task:
    generator = torch.Generator().manual_seed(10 * seed + domain)
    y = torch.randint(TOPICS, (count,), generator=generator)
    sense = torch.randperm(WORDS // 2, generator=generator) % TOPICS
    shared = torch.stack(
        [torch.multinomial((sense == topic).float(), LENGTH, True, generator=generator) for topic in y]
    )
    own = torch.randint(WORDS // 4 // TOPICS, shared.shape, generator=generator) * TOPICS + y[:, None]
    is_own = torch.rand(shared.shape, generator=generator) < 0.1
    x = torch.where(is_own, WORDS // 2 + domain * (WORDS // 4) + own, shared)
    noise = torch.rand(x.shape, generator=generator) < 0.3
    return divided(torch.where(noise, torch.randint(WORDS // 2, x.shape, generator=generator), x), y, seed)


TOKENS, CONTEXT = 48, 16


def grammars(seed: int) -> tuple[Task, Task]:
    """Sequences in which a token tells the next one; two thirds of each grammar's tokens are the other's, too."""
    return _grammar(0, seed), _grammar(1, seed)


def _grammar(domain: int, seed: int, count: int = 1200) -> Task:
    generator = torch.Generator().manual_seed(10 * seed + domain)
    used = torch.arange(32) + 16 * domain
    follows = torch.zeros(TOKENS, dtype=torch.long)
    follows[used] = used[torch.randperm(32, generator=generator)]
    tokens = [used[torch.randint(32, (count,), generator=generator)]]
    for _ in range(CONTEXT):
        slips = torch.rand(count, generator=generator) < 0.05
        tokens.append(torch.where(slips, used[torch.randint(32, (count,), generator=generator)], follows[tokens[-1]]))
    first = torch.full((count,), TOKENS + domain)
    sequences = torch.stack([first, *tokens], 1)
    return divided(sequences[:, :-1], sequences[:, 2:], seed)


NODES, FEATURES = 12, 16


def graphs(seed: int) -> tuple[Task, Task]:
    """Graphs of two communities, whose noisy nodes tell the class; the second task has other features."""
    return _graphs(0, seed), _graphs(1, seed)


def _graphs(domain: int, seed: int, count: int = 1600, classes: int = 6) -> Task:
    generator = torch.Generator().manual_seed(10 * seed + domain)
    y = torch.randint(classes, (count,), generator=generator)
    side = torch.randint(2, (count, NODES), generator=generator)
    prototypes = torch.randn(classes, 2, FEATURES, generator=generator)
    features = prototypes[y[:, None], side] + 2.5 * torch.randn(count, NODES, FEATURES, generator=generator)
    chance = torch.where(side[:, :, None] == side[:, None, :], 0.7, 0.1)
    edges = (torch.rand(count, NODES, NODES, generator=generator) < chance).float().triu(1)
    neighbours = edges + edges.mT + torch.eye(NODES)
    return divided(torch.cat([neighbours / neighbours.sum(2, keepdim=True), features], 2), y, seed)


# -- models --------------------------------------------------------------------------------------------------


def mlp(*sizes: int, activation: Callable[[], nn.Module] = nn.ReLU, between: Iterable[Any] = ()) -> nn.Module:
    """A network of linear layers; ``between`` makes more layers from a width, before each activation."""
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(sizes):
        layers += [nn.Linear(n, m), *(make(m) for make in between), activation()]
    return nn.Sequential(*layers[: -1 - len(list(between))])


def cnn(norm: Callable[[int], nn.Module], groups: int = 1, width: int = 32) -> nn.Module:
    """Three convolutions and a linear layer, for images of 8 × 8."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        norm(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, stride=2, groups=groups),
        norm(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
        norm(2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * width, 10),
    )


def cnn_of_rows() -> nn.Module:
    """Convolutions over the rows of an image."""
    return nn.Sequential(
        nn.Conv1d(8, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv1d(64, 64, 3, padding=2, dilation=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


class Recurrent(nn.Module):
    """Reads an image row by row."""

    def __init__(self, kind: Callable[..., nn.RNNBase], hidden: int = 64, layers: int = 1) -> None:
        super().__init__()
        self.rnn = kind(8, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Attention(nn.Module):
    """Attends to the rows of an image."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(0.1 * torch.randn(8, width))
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8 * width, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.position
        return self.head(h + self.attention(h, h, h, need_weights=False)[0])


class Encoder(nn.Module):
    """Two layers of torch's transformer on the rows of an image."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(0.1 * torch.randn(8, width))
        layer = partial(nn.TransformerEncoderLayer, width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.Sequential(layer(), layer(norm_first=True))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x) + self.position).mean(1))


class Block(nn.Module):
    """A layer of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](h)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(seen.transpose(1, 2).flatten(2))
        return h + self.mlp(self.norms[1](h))


class GPT(nn.Module):
    """A language model whose output layer is its embedding; the first token, which names the task, has no output."""

    def __init__(self, width: int = 48, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS + 2, width)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, TOKENS + 2, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x) + self.position[: x.shape[1]]))[:, 1:]


class GPT2(nn.Module):
    """Hugging Face's GPT-2, small."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_embd=48,
            n_layer=2,
            n_head=4,
            n_positions=CONTEXT + 1,
            vocab_size=TOKENS + 2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=TOKENS,
            eos_token_id=TOKENS + 1,
            use_cache=False,
        )
        self.gpt2 = GPT2LMHeadModel(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.gpt2(input_ids=x).logits[:, 1:]


class GraphNetwork(nn.Module):
    """Two graph convolutions, and the mean over the nodes; x holds the weights of the edges, then the features."""

    def __init__(self, width: int = 64, classes: int = 6) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([nn.Linear(FEATURES, width), nn.Linear(width, width)])
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        edges, h = x.split([NODES, FEATURES], dim=2)
        for convolution in self.convolutions:
            h = convolution(edges @ h).relu()
        return self.head(h.mean(1))


class BagOfWords(nn.Module):
    """The mean of the words' embeddings, and a small network."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = mlp(width, 64, TOPICS)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.embed(x).mean(1))


def with_lora() -> nn.Module:
    """A network that was trained on digits upside down, and has adapters now."""
    from peft import LoraConfig, get_peft_model

    model = mlp(64, 200, 200, 10)
    x, y = digits()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(3):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x.flip(1)[rows]), y[rows]).backward()
            optimizer.step()
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["0", "2", "4"]))


# -- optimizers ----------------------------------------------------------------------------------------------


def trained(model: nn.Module) -> Weights:
    return [p for p in model.parameters() if p.requires_grad]


def torchs(kind: str, **settings: Any) -> Callable[[nn.Module], list[Optimizer]]:
    """Makes one of torch's optimizers."""
    return lambda model: [getattr(torch.optim, kind)(trained(model), **settings)]


def lion(model: nn.Module) -> list[Optimizer]:
    from lion_pytorch import Lion

    return [Lion(trained(model), lr=3e-4, weight_decay=0.01)]


def muon(model: nn.Module) -> list[Optimizer]:
    """Muon for the matrices, AdamW for the rest, as its author advises."""
    matrices = [p for p in trained(model) if p.dim() == 2]
    others = [p for p in trained(model) if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=1e-3)]


def schedule_free(model: nn.Module) -> list[Optimizer]:
    from schedulefree import AdamWScheduleFree

    return [AdamWScheduleFree(trained(model), lr=3e-3)]


# -- the set-ups ---------------------------------------------------------------------------------------------

adam = torchs("Adam", lr=1e-3)
adamw = torchs("AdamW", lr=2e-3)
sgd = partial(torchs, "SGD")
plain_mlp = partial(mlp, 64, 200, 200, 10)


def flat(seed: int) -> tuple[Task, Task]:
    return permuted(seed, 64)


def as_rows(seed: int) -> tuple[Task, Task]:
    return permuted(seed, 8, 8)


def as_images(seed: int) -> tuple[Task, Task]:
    return permuted(seed, 1, 8, 8)


def groups_of_8(width: int) -> nn.Module:
    return nn.GroupNorm(8, width)


SETUPS = [
    SetUp("MLP, Adam", plain_mlp, adam, flat, epochs=6),
    SetUp("wide MLP, Adam, closure", partial(mlp, 64, 800, 10), adam, flat, closure=True),
    SetUp("deep MLP, AdamW", partial(mlp, 64, 64, 64, 64, 64, 10), adamw, flat),
    SetUp("MLP with LayerNorm, AdamW", partial(mlp, 64, 200, 200, 10, between=[nn.LayerNorm]), adamw, flat),
    SetUp("MLP, SGD 0.3", plain_mlp, sgd(lr=0.3), flat, epochs=15),
    SetUp("MLP, SGD 0.5", plain_mlp, sgd(lr=0.5), flat),
    SetUp("MLP, SGD 0.1, momentum", plain_mlp, sgd(lr=0.1, momentum=0.9), flat),
    SetUp(
        "MLP of tanh, SGD 0.05, Nesterov, decay",
        partial(mlp, 64, 200, 200, 10, activation=nn.Tanh),
        sgd(lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4),
        flat,
    ),
    SetUp(
        "MLP with two heads, SGD 0.1, momentum",
        partial(mlp, 64, 64, 64, 64, 10),
        sgd(lr=0.1, momentum=0.9),
        split_digits,
        epochs=8,
    ),
    SetUp("MLP, RMSprop", plain_mlp, torchs("RMSprop", lr=1e-3), flat),
    SetUp("MLP, Adafactor", plain_mlp, torchs("Adafactor", lr=0.02), flat),
    SetUp("MLP, Lion", plain_mlp, lion, flat, needs="lion-pytorch"),
    SetUp("MLP, Muon and AdamW", plain_mlp, muon, flat, needs="torch>=2.9"),
    SetUp("MLP, schedule-free AdamW", plain_mlp, schedule_free, flat, fresh=True, needs="schedulefree"),
    SetUp("MLP, Adam, accumulated", plain_mlp, adam, flat, batch=16, accumulate=4, clip=1.0, cosine=True, fresh=True),
    SetUp("MLP, Adam, bf16", partial(mlp, 64, 400, 400, 10), adam, flat, bf16=True),
    SetUp("MLP of GELU, Adam, EMA", partial(mlp, 64, 300, 100, 10, activation=nn.GELU), adam, flat, ema=0.95),
    SetUp("CNN with BatchNorm, Adam", partial(cnn, nn.BatchNorm2d), adam, as_images, epochs=5),
    SetUp("CNN with BatchNorm, SGD, momentum", partial(cnn, nn.BatchNorm2d), sgd(lr=0.05, momentum=0.9), as_images),
    SetUp("CNN with GroupNorm, AdamW", partial(cnn, groups_of_8), adamw, as_images, epochs=5),
    SetUp("CNN of groups, Adam, bf16, inverted", partial(cnn, groups_of_8, 4), adam, inverted, bf16=True),
    SetUp("CNN of rows, Adam", cnn_of_rows, adam, as_rows),
    SetUp("LSTM, Adam", partial(Recurrent, nn.LSTM), torchs("Adam", lr=3e-3), as_rows, epochs=20),
    SetUp("LSTM, SGD 20, clipped", partial(Recurrent, nn.LSTM), sgd(lr=20.0), as_rows, epochs=20, clip=0.25),
    SetUp("GRU, Adam, clipped", partial(Recurrent, nn.GRU, layers=2), torchs("Adam", lr=3e-3), as_rows, clip=1.0),
    SetUp(
        "RNN, RMSprop, clipped", partial(Recurrent, nn.RNN), torchs("RMSprop", lr=2e-3), as_rows, epochs=20, clip=1.0
    ),
    SetUp("attention, AdamW", Attention, adamw, as_rows),
    SetUp("transformer encoder, AdamW, cosine", Encoder, adamw, as_rows, cosine=True, fresh=True),
    SetUp("GPT, AdamW", GPT, adamw, grammars, epochs=6),
    SetUp("Hugging Face's GPT-2, AdamW, clipped", GPT2, adamw, grammars, epochs=6, clip=1.0, needs="transformers"),
    SetUp("graph network, Adam", GraphNetwork, torchs("Adam", lr=3e-3), graphs),
    SetUp("embedding of words, Adam", BagOfWords, torchs("Adam", lr=3e-3), texts),
    SetUp("LoRA, AdamW", with_lora, torchs("AdamW", lr=5e-3), flat, fresh=True, needs="peft"),
]
