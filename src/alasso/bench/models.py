"""The three networks of the paper's supplement, layer by layer, and the user's own networks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from alasso.errors import AlassoError

Factory = Callable[[tuple[int, ...], int], nn.Module]


def mlp(input_shape: tuple[int, ...], classes: int, *, hidden: int = 2000, dropout: bool = False) -> nn.Module:
    """Permuted MNIST: two hidden layers of 2000 ReLU units. With dropout: 0.2 of the inputs, 0.5 of the units."""
    inputs = int(torch.Size(input_shape).numel())
    layers: list[nn.Module] = [nn.Flatten()]
    for n, m in ((inputs, hidden), (hidden, hidden)):
        layers += [nn.Dropout(0.2 if n == inputs else 0.5)] if dropout else []
        layers += [nn.Linear(n, m), nn.ReLU()]
    layers += [nn.Dropout(0.5)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(hidden, classes))


def cifar_cnn(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Split CIFAR-10/100: four small convolutions, two dense layers."""
    channels, height, width = _image_shape(input_shape, least=4)
    return nn.Sequential(
        *_conv(channels, 4),
        *_conv(4, 4),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        *_conv(4, 8),
        *_conv(8, 8),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(8 * (height // 4) * (width // 4), 64),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(64, classes),
    )


def tiny_imagenet_cnn(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Split Tiny ImageNet at 224 × 224: five convolutions, each with pooling and dropout, two dense layers."""
    channels, height, width = _image_shape(input_shape, least=32)
    layers: list[nn.Module] = []
    for n, m in ((channels, 32), (32, 32), (32, 64), (64, 64), (64, 64)):
        layers += [*_conv(n, m), nn.MaxPool2d(2), nn.Dropout(0.25)]
    flat = 64 * (height // 32) * (width // 32)
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(flat, 2048), nn.ReLU(), nn.Dropout(0.5), nn.Linear(2048, classes)
    )


MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "cifar-cnn": cifar_cnn,
    "tiny-imagenet-cnn": tiny_imagenet_cnn,
}


def build(
    name: str, input_shape: tuple[int, ...], classes: int, *, hidden: int | None = None, dropout: bool = False
) -> nn.Module:
    """A network by name, or ``module:factory``, called with (input_shape, classes). Weights from torch's global seed.

    The paper's networks start as its authors' did: Glorot uniform, zero bias. A network of your own starts as it is.
    """
    if name in MODELS:
        options = {"hidden": hidden or 2000, "dropout": dropout} if name == "mlp" else {}
        return glorot(MODELS[name](input_shape, classes, **options))
    return _built(name, input_shape, classes)


def check_allowed(used: Iterable[str], allowed: Iterable[str | None], file: Path | None, option: str) -> None:
    """Refuses a network of one's own that a file alone names: importing it runs its code.

    Args:
        used: The networks of the runs.
        allowed: Those that the command line names.
        file: Where the others are from.
        option: How the command line names one.

    Raises:
        AlassoError: One of them is neither the paper's nor allowed.
    """
    for name in used:
        if name not in MODELS and name not in allowed:
            raise AlassoError(
                f"{file} asks for the network {name!r:.80}, and importing it runs its code: "
                f"add {option} {' '.join(name.split()):.80} if you trust it"
            )


def glorot(model: nn.Module) -> nn.Module:
    """Glorot-uniform weights and zero biases."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def _conv(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding="same"), nn.ReLU()]


def _image_shape(input_shape: tuple[int, ...], least: int) -> tuple[int, int, int]:
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        raise AlassoError(
            f"this network takes images of at least {least} × {least} pixels, not inputs of shape {input_shape}"
            f"{_channels_first(input_shape)}"
        )
    channels, height, width = input_shape
    return channels, height, width


def _channels_first(input_shape: tuple[int, ...]) -> str:
    """End of an error message, where images seem to have their channels last.

    >>> _channels_first((8, 8, 3)), _channels_first((3, 8, 8))
    ('; channels come first: (3, 8, 8), as x.permute(0, 3, 1, 2) makes them', '')
    """
    if len(input_shape) != 3 or input_shape[2] not in (1, 3, 4) or input_shape[0] in (1, 3, 4):
        return ""
    height, width, channels = input_shape
    return f"; channels come first: {(channels, height, width)}, as x.permute(0, 3, 1, 2) makes them"


def _built(name: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The user's network by ``module:factory``."""
    factory = _own(name)
    try:
        model = factory(input_shape, classes)
    except Exception as error:
        given = f"({input_shape}, {classes})"
        raise AlassoError(f"model {name!r} fails when it is called with {given}: {_named(error)}") from error
    return _checked(model, name, input_shape, classes)


def built_by(factory: Callable[[], nn.Module], input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The user's network by a function that takes nothing."""
    if isinstance(factory, nn.Module):
        of = type(factory).__name__
        raise AlassoError(f"model must be a function that makes a network, not this {of}: model=lambda: {of}(…)")
    if not callable(factory):
        raise AlassoError(f"model must be a function that makes a network, not {factory!r}; RunConfig takes names")
    name = getattr(factory, "__name__", type(factory).__name__)
    try:
        model = factory()
    except Exception as error:
        raise AlassoError(f"model {name!r} fails when it is called with nothing: {_named(error)}") from error
    return _checked(model, name, input_shape, classes)


def _checked(model: object, name: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The network, after it has answered two inputs: a mistake shows here, not in the middle of a run."""
    if not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
        found = type(model).__name__
        raise AlassoError(f"model {name!r} must return an nn.Module with weights to train, not this {found}")
    _check_answers(model, name, input_shape, classes)
    return model


@torch.no_grad()
def _check_answers(model: nn.Module, name: str, input_shape: tuple[int, ...], classes: int) -> None:
    training, device = model.training, next(model.parameters()).device
    try:
        # What it may draw is not missed later.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            outputs = model.eval()(torch.zeros(2, *input_shape, device=device))
    except Exception as error:
        why = f"{_named(error)}{_channels_first(input_shape)}"
        raise AlassoError(f"model {name!r} cannot take inputs of shape {input_shape}: {why}") from error
    finally:
        model.train(training)
    shape = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
    if not isinstance(outputs, torch.Tensor) or outputs.dim() != 2 or len(outputs) != 2 or outputs.shape[1] < classes:
        raise AlassoError(f"model {name!r} must answer two inputs with a tensor of shape (2, {classes}), not {shape}")


def _named(error: Exception) -> str:
    first_line, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first_line}"


def _own(name: str) -> Factory:
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise AlassoError(f"model must be one of {', '.join(MODELS)} or module:factory, not {name!r}")
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` does: a factory in the folder one stands in
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # of the module's own lines, too
        why = error if isinstance(error, ImportError) else _named(error)
        raise AlassoError(f"model {name!r}: module {module_name} cannot be imported ({why})") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise AlassoError(f"model {name!r}: {module_name} has no function {attribute}")
    return factory  # type: ignore[no-any-return]
