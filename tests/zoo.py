"""Small models of many architectures, each a line or a few: a name, what makes it, and the shape of one sample."""

# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

Forward = Callable[[Any, Tensor], Tensor]
WORDS = None  # in place of a shape: four words
CLASSES = 3


class Net(nn.Module):
    """Layers and parameters by name, and a forward pass that uses them."""

    def __init__(self, forward: Forward, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def seq(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 2)


def mlp(activation: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: seq(nn.Linear(5, 6), activation(), nn.Linear(6, 4), activation(), nn.Linear(4, 3))


def between(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A multilayer perceptron with layers in its middle."""
    return lambda: seq(nn.Linear(5, 6), *(make() for make in layers), nn.Tanh(), nn.Linear(6, 3))


def conv(kind: type[nn.Module], *after: Callable[[], nn.Module], **settings: Any) -> Callable[[], nn.Module]:
    """A convolution 2 → 4, layers after it, the mean over positions and a head."""
    return lambda: Net(
        lambda m, x: m.head(torch.tanh(m.body(x)).flatten(2).mean(2)),
        body=seq(kind(2, 4, **{"kernel_size": 3, **settings}), *(make() for make in after)),
        head=nn.Linear(4, 3),
    )


def recurrent(kind: type[nn.Module], **settings: Any) -> Callable[[], nn.Module]:
    first = settings.pop("first", "batch")
    width = 4 * (1 + settings.get("bidirectional", False))
    turned = (lambda x: x) if first == "batch" else (lambda x: x.transpose(0, 1))
    return lambda: Net(
        lambda m, x: m.head(turned(m.rnn(turned(x))[0]).sum(1)),
        rnn=kind(2, 4, batch_first=first == "batch", **settings),
        head=nn.Linear(width, 3),
    )


def attention(**settings: Any) -> Callable[[], nn.Module]:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        h = h if m.attention.batch_first else h.transpose(0, 1)
        h = m.attention(h, h, h)[0]
        return m.head((h if m.attention.batch_first else h.transpose(0, 1)).mean(1))

    return lambda: Net(
        forward, first=nn.Linear(2, 4), attention=nn.MultiheadAttention(4, 2, **settings), head=nn.Linear(4, 3)
    )


def encoder(**settings: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 6, 0.1, batch_first=True, **settings)


def on_words(**parts: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Embedded words, layers over them, and a head on the mean."""

    def make() -> nn.Module:
        layers = {name: part() for name, part in parts.items()}
        return Net(
            lambda m, x: m.head(seq(*(getattr(m, name) for name in parts))(x).mean(1)), **layers, head=nn.Linear(4, 3)
        )

    return make


def with_buffers(net: nn.Module) -> nn.Module:
    """Running statistics that are not those of a fresh net."""
    for module in net.modules():
        if getattr(module, "running_mean", None) is not None:
            module.running_mean.normal_()  # type: ignore[operator,union-attr]
            module.running_var.uniform_(0.5, 2)  # type: ignore[operator,union-attr]
    return net


def convolutional(norm: Callable[[int], nn.Module], shape: int = 4) -> Callable[[], nn.Module]:
    return lambda: with_buffers(
        seq(nn.Conv2d(2, shape, 3, bias=False), norm(shape), nn.ReLU(), nn.Flatten(), nn.Linear(36 * shape // 4, 3))
    )


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * g * ctx.saved_tensors[0]


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized() -> nn.Module:
    net = mlp(nn.Tanh)()
    parametrize.register_parametrization(net[0], "weight", Doubled())
    return net


def pruned() -> nn.Module:
    net = mlp(nn.Tanh)()
    prune.random_unstructured(net[0], "weight", 0.4)
    return net


def tied_output() -> nn.Module:
    net = Net(lambda m, x: m.out(m.table(x).mean(1))[:, :3], table=nn.Embedding(11, 4), out=nn.Linear(4, 11))
    net.out.weight = net.table.weight  # type: ignore[union-attr,assignment]
    return net


def frozen_first() -> nn.Module:
    net = mlp(nn.Tanh)()
    net[0].requires_grad_(False)  # type: ignore[index]
    return net


def routed(m: Any, x: Tensor) -> Tensor:
    """One expert for each sample."""
    gate = m.gate(x).softmax(1)
    outputs = torch.stack([expert(x) for expert in m.experts], 1)
    return (outputs * F.one_hot(gate.argmax(1), 2)[:, :, None] * gate[:, :, None]).sum(1)


def experts_of_their_own(m: Any, x: Tensor) -> Tensor:
    """An expert sees the rows that are its own, and no others."""
    chosen, out = (x.sum(1) > 0).long(), x.new_zeros(len(x), 3)
    for i, expert in enumerate(m.experts):
        out[chosen == i] = expert(x[chosen == i])
    return out


def lora(m: Any, x: Tensor) -> Tensor:
    return m.base(x) + m.up(m.down(x))


def unrolled(m: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 4)
    for t in range(x.shape[1]):
        h = m.cell(x[:, t], h)
    return m.head(h)


def unet(m: Any, x: Tensor) -> Tensor:
    down = torch.tanh(m.down(x))
    return m.head(torch.cat([x, m.up(down)], 1).flatten(1))


def patches(m: Any, x: Tensor) -> Tensor:
    """A vision transformer: patches, a class token, positions, a block."""
    h = m.patch(x).flatten(2).mT
    h = torch.cat([m.token.expand(len(x), -1, -1), h], 1) + m.positions
    return m.head(m.block(h)[:, 0])


def graph(m: Any, x: Tensor) -> Tensor:
    edges, h = x.split([4, 2], dim=2)
    return m.head(torch.relu(m.second(edges @ torch.relu(m.first(edges @ h)))).mean(1))


def siamese(m: Any, x: Tensor) -> Tensor:
    one, other = x[:, :2], x[:, 2:4]
    return m.head((m.twin(one) - m.twin(other)).abs())


def separable() -> nn.Module:
    return seq(
        nn.Conv2d(2, 2, 3, groups=2), nn.Conv2d(2, 4, 1), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...] | None]] = {
    # activations and layers between fully connected ones
    "linear": (lambda: nn.Linear(5, 3), (5,)),
    "no bias": (lambda: nn.Linear(5, 3, bias=False), (5,)),
    "relu": (mlp(nn.ReLU), (5,)),
    "relu in place": (mlp(lambda: nn.ReLU(inplace=True)), (5,)),
    "gelu": (mlp(nn.GELU), (5,)),
    "silu": (mlp(nn.SiLU), (5,)),
    "elu": (mlp(nn.ELU), (5,)),
    "softplus": (mlp(nn.Softplus), (5,)),
    "prelu": (mlp(nn.PReLU), (5,)),
    "dropout": (between(lambda: nn.Dropout(0.5)), (5,)),
    "layer norm": (between(lambda: nn.LayerNorm(6)), (5,)),
    "layer norm without bias": (between(lambda: nn.LayerNorm(6, bias=False)), (5,)),
    "rms norm": (between(lambda: nn.RMSNorm(6)), (5,)),
    "group norm": (between(lambda: nn.GroupNorm(2, 6)), (5,)),
    "batch norm 1d": (lambda: with_buffers(between(lambda: nn.BatchNorm1d(6))()), (5,)),
    "bilinear": (lambda: Net(lambda m, x: m.b(x, x), b=nn.Bilinear(5, 5, 3)), (5,)),
    "glu": (lambda: seq(nn.Linear(5, 8), nn.GLU(), nn.Linear(4, 3)), (5,)),
    "residual": (lambda: Net(lambda m, x: m.c(x + torch.tanh(m.a(x))), a=nn.Linear(5, 5), c=nn.Linear(5, 3)), (5,)),
    # convolutions
    "conv1d": (conv(nn.Conv1d), (2, 6)),
    "conv2d": (conv(nn.Conv2d), (2, 5, 5)),
    "conv3d": (conv(nn.Conv3d, kernel_size=2), (2, 3, 3, 3)),
    "conv strided": (conv(nn.Conv2d, stride=2, padding=1), (2, 5, 5)),
    "conv dilated": (conv(nn.Conv2d, dilation=2), (2, 5, 5)),
    "conv in groups": (conv(nn.Conv2d, groups=2), (2, 5, 5)),
    "conv same": (conv(nn.Conv2d, padding="same", dilation=2), (2, 4, 4)),
    "conv circular": (conv(nn.Conv2d, padding=1, padding_mode="circular"), (2, 4, 4)),
    "conv reflecting": (conv(nn.Conv2d, padding=1, padding_mode="reflect"), (2, 4, 4)),
    "conv transposed": (conv(nn.ConvTranspose2d), (2, 3, 3)),
    "conv transposed 1d": (conv(nn.ConvTranspose1d, stride=2), (2, 4)),
    "conv without bias": (conv(nn.Conv2d, bias=False), (2, 4, 4)),
    "conv, max pool": (conv(nn.Conv2d, lambda: nn.MaxPool2d(2)), (2, 6, 6)),
    "conv, batch norm": (convolutional(nn.BatchNorm2d), (2, 5, 5)),
    "conv, instance norm": (convolutional(lambda n: nn.InstanceNorm2d(n, affine=True)), (2, 5, 5)),
    "conv, group norm": (convolutional(lambda n: nn.GroupNorm(2, n)), (2, 5, 5)),
    "conv, layer norm": (convolutional(lambda n: nn.LayerNorm((n, 3, 3))), (2, 5, 5)),
    "separable": (separable, (2, 5, 5)),
    "upsampled": (conv(nn.Conv2d, lambda: nn.Upsample(scale_factor=2)), (2, 4, 4)),
    "pixel shuffle": (
        lambda: seq(nn.Conv2d(2, 4, 1), nn.PixelShuffle(2), nn.Flatten(), nn.Linear(16, 3)),
        (2, 2, 2),
    ),
    "u-net": (
        lambda: Net(unet, down=nn.Conv2d(2, 3, 2, 2), up=nn.ConvTranspose2d(3, 2, 2, 2), head=nn.Linear(64, 3)),
        (2, 4, 4),
    ),
    # sequences
    "rnn": (recurrent(nn.RNN), (4, 2)),
    "gru": (recurrent(nn.GRU), (4, 2)),
    "lstm": (recurrent(nn.LSTM), (4, 2)),
    "lstm, two layers": (recurrent(nn.LSTM, num_layers=2), (4, 2)),
    "lstm, two ways": (recurrent(nn.LSTM, bidirectional=True), (4, 2)),
    "gru, time first": (recurrent(nn.GRU, first="time"), (4, 2)),
    "gru, as many steps as samples": (recurrent(nn.GRU, first="time"), (5, 2)),
    "gru cell": (lambda: Net(unrolled, cell=nn.GRUCell(2, 4), head=nn.Linear(4, 3)), (4, 2)),
    "linear on sequences": (lambda: Net(lambda m, x: m.b(torch.tanh(m.a(x)).mean(1)), a=nn.Linear(2, 4), b=nn.Linear(4, 3)), (4, 2)),
    "linear, time first": (lambda: Net(lambda m, x: m.b(torch.tanh(m.a(x.transpose(0, 1))).mean(0)), a=nn.Linear(2, 4), b=nn.Linear(4, 3)), (5, 2)),
    "linear on flat positions": (lambda: Net(lambda m, x: m.b(torch.tanh(m.a(x.flatten(0, 1))).unflatten(0, x.shape[:2]).mean(1)), a=nn.Linear(2, 4), b=nn.Linear(4, 3)), (4, 2)),
    "attention": (attention(batch_first=True), (4, 2)),
    "attention, time first": (attention(), (4, 2)),
    "attention, no bias": (attention(batch_first=True, bias=False), (4, 2)),
    "attention, extra key": (attention(batch_first=True, add_bias_kv=True), (4, 2)),
    "encoder": (lambda: seq(nn.Linear(2, 4), encoder(), nn.Flatten(), nn.Linear(16, 3)), (4, 2)),
    "encoder, norm first": (lambda: seq(nn.Linear(2, 4), encoder(norm_first=True), nn.Flatten(), nn.Linear(16, 3)), (4, 2)),
    "vision transformer": (
        lambda: Net(patches, patch=nn.Conv2d(2, 4, 2, 2), token=parameter(1, 1, 4), positions=parameter(1, 5, 4), block=encoder(), head=nn.Linear(4, 3)),
        (2, 4, 4),
    ),
    "mixer": (
        lambda: Net(lambda m, x: m.head(m.channels(m.tokens(x.mT).mT).mean(1)), tokens=nn.Linear(4, 4), channels=nn.Linear(2, 4), head=nn.Linear(4, 3)),
        (4, 2),
    ),
    # words
    "embedding": (on_words(table=lambda: nn.Embedding(11, 4)), WORDS),
    "embedding with padding": (on_words(table=lambda: nn.Embedding(11, 4, padding_idx=2)), WORDS),
    "embedding scaled by frequency": (on_words(table=lambda: nn.Embedding(11, 4, scale_grad_by_freq=True)), WORDS),
    "embedding with sparse gradients": (on_words(table=lambda: nn.Embedding(11, 4, sparse=True)), WORDS),
    "embedding and norm": (on_words(table=lambda: nn.Embedding(11, 4), norm=lambda: nn.LayerNorm(4)), WORDS),
    "embedding bag": (lambda: seq(nn.EmbeddingBag(11, 4), nn.Linear(4, 3)), WORDS),
    "words and positions": (
        lambda: Net(lambda m, x: m.head((m.words(x) + m.places(torch.arange(x.shape[1]))).mean(1)), words=nn.Embedding(11, 4), places=nn.Embedding(4, 4), head=nn.Linear(4, 3)),
        WORDS,
    ),
    "words, encoder": (on_words(table=lambda: nn.Embedding(11, 4), block=encoder), WORDS),
    "tied output": (tied_output, WORDS),
    # weights that are used in other ways
    "raw parameters": (lambda: Net(lambda m, x: torch.tanh(x @ m.w + m.b), w=parameter(5, 3), b=parameter(3)), (5,)),
    "called twice": (lambda: Net(lambda m, x: m.head(m.a(torch.tanh(m.a(x)))), a=nn.Linear(5, 5), head=nn.Linear(5, 3)), (5,)),
    "weight by hand": (lambda: Net(lambda m, x: m.head(m.a(x) @ m.a.weight), a=nn.Linear(5, 4), head=nn.Linear(5, 3)), (5,)),
    "detached branch": (lambda: Net(lambda m, x: m.head(m.a(x).detach() * m.b(x)), a=nn.Linear(5, 4), b=nn.Linear(5, 4), head=nn.Linear(4, 3)), (5,)),
    "unused layer": (lambda: Net(lambda m, x: m.a(x), a=nn.Linear(5, 3), b=nn.Linear(5, 3)), (5,)),
    "weight norm": (lambda: seq(parametrizations.weight_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3)), (5,)),
    "spectral norm": (lambda: seq(parametrizations.spectral_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3)), (5,)),
    "parametrized": (parametrized, (5,)),
    "pruned": (pruned, (5,)),
    "frozen first layer": (frozen_first, (5,)),
    "lora": (lambda: Net(lora, base=nn.Linear(5, 3).requires_grad_(False), down=nn.Linear(5, 2, bias=False), up=nn.Linear(2, 3, bias=False)), (5,)),
    "experts": (lambda: Net(routed, gate=nn.Linear(5, 2), experts=nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])), (5,)),
    "experts with rows of their own": (lambda: Net(experts_of_their_own, experts=nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])), (5,)),
    "siamese": (lambda: Net(siamese, twin=nn.Linear(2, 4), head=nn.Linear(4, 3)), (5,)),
    "graph": (lambda: Net(graph, first=nn.Linear(2, 4), second=nn.Linear(4, 4), head=nn.Linear(4, 3)), (4, 6)),
    "hypernetwork": (lambda: Net(lambda m, x: (m.maker(x).view(-1, 3, 5) @ x[:, :, None])[:, :, 0], maker=nn.Linear(5, 15)), (5,)),
    "function of its own": (lambda: Net(lambda m, x: m.b(Squared.apply(m.a(x))), a=nn.Linear(5, 4), b=nn.Linear(4, 3)), (5,)),
    "checkpoint": (lambda: Net(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False)), a=mlp(nn.Tanh)(), b=nn.Linear(3, 3)), (5,)),
}  # fmt: skip


# -- what the fast routes cannot follow ------------------------------------------------------------------------


def plain_list() -> nn.Module:
    net = Net(lambda m, x: m.head(torch.tanh(x @ m.kept[0] + m.kept[1])), w=parameter(5, 4), v=parameter(4), head=nn.Linear(4, 3))  # fmt: skip
    net.kept = [net.w, net.v]  # type: ignore[assignment]
    return net


def closure() -> nn.Module:
    net = Net(lambda m, x: m.head(torch.tanh(m.bound(x))), a=nn.Linear(5, 4), head=nn.Linear(4, 3))
    net.bound = (lambda w, b: lambda x: F.linear(x, w, b))(net.a.weight, net.a.bias)  # type: ignore[union-attr,assignment]
    return net


def half_in_a_closure() -> nn.Module:
    """Called as a layer, and used by hand through a reference: a swapped value reaches the first use alone."""
    net = Net(lambda m, x: m.head(torch.tanh(m.a(x)) @ m.kept[0]), a=nn.Linear(5, 4), head=nn.Linear(5, 3))
    net.kept = [net.a.weight]  # type: ignore[union-attr,assignment]
    return net


def inside(m: Any, x: Tensor) -> Tensor:
    return m.head(checkpoint(m.body, x.detach().requires_grad_(), use_reentrant=True))


def in_the_middle(m: Any, x: Tensor) -> Tensor:
    return m.head(checkpoint(m.body, m.first(x), use_reentrant=True))


def rows_mixed(m: Any, x: Tensor) -> Tensor:
    n, t, d = x.shape
    h = torch.tanh(m.body(x.transpose(0, 1).reshape(n, t, d)))
    return m.head(h.reshape(t, n, -1).transpose(0, 1).mean(1))


HIDDEN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...] | None]] = {
    "plain list": (plain_list, (5,)),
    "closure": (closure, (5,)),
    "half in a closure": (half_in_a_closure, (5,)),
    "reentrant checkpoint first": (lambda: Net(inside, body=seq(nn.Linear(5, 4), nn.Tanh()), head=nn.Linear(4, 3)), (5,)),
    "reentrant checkpoint in the middle": (lambda: Net(in_the_middle, first=nn.Linear(5, 4), body=seq(nn.Linear(4, 4), nn.Tanh()), head=nn.Linear(4, 3)), (5,)),
    "rows that mix samples": (lambda: Net(rows_mixed, body=nn.Linear(2, 4), head=nn.Linear(4, 3)), (4, 2)),
}  # fmt: skip
