r"""Kronecker factors of a layer's curvature, sketched: what a few products tell of a large matrix.

A layer that maps inputs a to outputs z = W a has, with g = ∂loss/∂z, a curvature of about

.. math:: F \approx G \otimes A, \qquad A = \textstyle\sum a a^\top, \quad G = \sum g g^\top

(K-FAC: Martens and Grosse, ICML 2015). A matrix M = Σ x xᵀ of size n is never formed. Its *sketch* has r + 1 columns,

.. math:: [\; Y \mid d \;], \qquad Y = M S, \quad d = \operatorname{diag} M

with r random signs in each row of S; for n ≤ r, S is the identity and nothing is lost. Sketches of sums are sums of
sketches. From a sketch follows a *form* [B | ρ] of M ≈ B Bᵀ + diag(ρ), by Nyström's approximation and what it leaves:

.. math::

    B = Y V \Lambda^{-1/2} \;\text{ with }\; S^\top Y = V \Lambda V^\top, \qquad
    \rho = \tfrac12 \delta + \tfrac12 \operatorname{mean}(\delta), \quad \delta = (d - \operatorname{diag} B B^\top)_+

Half of the rest δ stays where it is; half is spread over all directions, those that training never saw among them.

A parameter is seen as a matrix of its first axis by all others. One factor belongs to its *rows*, the other to its
*columns*: G and A in most layers, A and G in those that keep their weight transposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from alasso.importance._layers import CONVOLUTIONS, Convolution, kind_of, padding_of

TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
KERNELS = CONVOLUTIONS + TRANSPOSED_CONVOLUTIONS
LAYERS = frozenset({nn.Linear, nn.Embedding, *KERNELS})
PIECE = 1 << 19  # weights at a time on a CPU
SMALLEST = 1e-6  # eigenvalues below this share of the largest are rounding errors

_CONVOLVE: tuple[Callable[..., Tensor], ...] = (F.conv1d, F.conv2d, F.conv3d)
_WEIGHT_GRADIENT: tuple[Callable[..., Tensor], ...] = (conv1d_weight, conv2d_weight, conv3d_weight)


# -- sketches and forms ----------------------------------------------------------------------------------------


@cache
def signs(size: int, rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return S: random signs over √rank, the same on every machine; the identity where it is no larger.

    Args:
        size: Number of rows. The first rows do not depend on it.
        rank: Number of columns.
        dtype: Of the result.
        device: Of the result.

    Returns:
        S, (size, min(size, rank)).
    """
    if size <= rank:
        return torch.eye(size, dtype=dtype, device=device)
    drawn = torch.randint(0, 2, (size, rank), generator=torch.Generator().manual_seed(1))
    return ((2 * drawn - 1).to(dtype) / math.sqrt(rank)).to(device)


def signs_like(x: Tensor, size: int, rank: int) -> Tensor:
    """Return S for vectors of a size, in a tensor's precision and on its device.

    Args:
        x: The tensor.
        size: The size.
        rank: The largest number of columns.

    Returns:
        S, as :func:`signs`.
    """
    return signs(size, rank, x.dtype, x.device)


def sketch(x: Tensor, rank: int) -> Tensor:
    """Return the sketch of Σ x xᵀ.

    Args:
        x: One vector a row, (N, n).
        rank: r.

    Returns:
        [Y | d], (n, min(n, r) + 1).
    """
    return torch.cat([x.mT @ (x @ signs_like(x, x.shape[1], rank)), x.square().sum(0)[:, None]], 1)


def sketch_of_counts(counts: Tensor, rank: int) -> Tensor:
    """Return the sketch of Σ x xᵀ where every x is a row of the identity.

    Args:
        counts: How often each row occurs, (n,).
        rank: r.

    Returns:
        [Y | d], (n, min(n, r) + 1).
    """
    return counts[:, None] * F.pad(signs_like(counts, len(counts), rank), (0, 1), value=1.0)


def sketch_of_windows(x: Tensor, kernel: tuple[int, ...], layer: Convolution, rank: int) -> Tensor:
    """Return the sketch of Σ x xᵀ over all windows that a kernel sees, without forming them.

    With the columns of S as filters, a convolution is xᵀS at every position; its weight gradient is Y.

    Args:
        x: Padded images, (N, C, *positions); each of the layer's groups of channels counts as an image.
        kernel: Size of the window.
        layer: Tells stride, dilation and groups.
        rank: r.

    Returns:
        [Y | d], (n, min(n, r) + 1) with n = C / groups · kernel.
    """
    x, products = under_signs(x, kernel, layer, rank)
    moves = {"stride": layer.stride, "dilation": layer.dilation}
    gradient = _WEIGHT_GRADIENT[len(kernel) - 1]
    Y = gradient(x, (products.shape[1], x.shape[1], *kernel), products, **moves)
    d = gradient(x.square(), (1, x.shape[1], *kernel), torch.ones_like(products[:, :1]), **moves)
    return torch.cat([Y, d]).flatten(1).mT


def under_signs(x: Tensor, kernel: tuple[int, ...], layer: Convolution, rank: int) -> tuple[Tensor, Tensor]:
    """Return images, one for each group of channels, and their convolution with the columns of S as filters.

    Args:
        x: Padded images, (N, C, *positions).
        kernel: Size of the window.
        layer: Tells stride, dilation and groups.
        rank: r.

    Returns:
        (N · groups, C / groups, *positions); xᵀS for the window x of each, (N · groups, min(n, r), *positions).
    """
    x = x.reshape(-1, x.shape[1] // layer.groups, *x.shape[2:])
    S = signs_like(x, x.shape[1] * torch.Size(kernel).numel(), rank)
    filters = S.mT.reshape(-1, x.shape[1], *kernel)
    return x, _CONVOLVE[len(kernel) - 1](x, filters, stride=layer.stride, dilation=layer.dilation)


def rank_of(packed: Tensor) -> int:
    """Return how many columns Y or B has; zero for a diagonal alone.

    Args:
        packed: A sketch or a form.

    Returns:
        Their number.
    """
    return packed.shape[1] - 1


def form(packed: Tensor) -> Tensor:
    """Return what follows from a sketch: M ≈ B Bᵀ + diag(ρ).

    Args:
        packed: [Y | d].

    Returns:
        [B | ρ], of the sketch's shape, the columns of B at right angles; ρ is not finite where the sketch is not.
    """
    Y, d = packed[:, :-1].double(), packed[:, -1].double()
    S = signs_like(Y, *Y.shape)
    core = torch.nan_to_num(S.mT @ Y)
    values, V = torch.linalg.eigh((core + core.mT) / 2)
    kept = values > SMALLEST * values[-1:].clamp(min=0)
    B = Y @ V * torch.where(kept, values, 1.0).rsqrt() * kept
    B = B @ torch.linalg.eigh(torch.nan_to_num(B.mT @ B))[1]
    rest = (d - B.square().sum(1)).clamp(min=0)
    return torch.cat([B, (rest + rest.mean())[:, None] / 2], 1).to(packed.dtype)


def times(rows: Tensor, D: Tensor, columns: Tensor) -> Tensor:
    """Return L D R for forms of L and R.

    Args:
        rows: [B | ρ] of L, (m, ·).
        D: (m, n).
        columns: [B | ρ] of R, (n, ·).

    Returns:
        (m, n).
    """
    B, rho = columns[:, :-1], columns[:, -1]
    T = D * rho + (D @ B) @ B.mT
    B, rho = rows[:, :-1], rows[:, -1]
    return rho[:, None] * T + B @ (B.mT @ T)


def diagonal(packed: Tensor) -> Tensor:
    """Return the diagonal of B Bᵀ + diag(ρ).

    Args:
        packed: [B | ρ].

    Returns:
        (n,).
    """
    return packed[:, :-1].square().sum(1) + packed[:, -1]


def largest(packed: Tensor) -> Tensor:
    """Return a bound on the largest eigenvalue of B Bᵀ + diag(ρ).

    Args:
        packed: [B | ρ], the columns of B at right angles.

    Returns:
        A scalar, larger by no more than the largest ρ.
    """
    B, rho = packed[:, :-1], packed[:, -1]
    return F.pad(B.square().sum(0), (1, 0)).max() + F.pad(rho, (1, 0)).max()  # a rank may have none of a small tensor


def capped(packed: Tensor, most: Tensor) -> Tensor:
    """Return the form without eigenvalues above a bound: what is stiffer is as stiff as that, the rest as it was.

    Args:
        packed: [B | ρ], the columns of B at right angles.
        most: The bound, positive.

    Returns:
        [B | ρ], of which :func:`largest` is no more than the bound.
    """
    B, rho = packed[:, :-1], packed[:, -1].clamp(max=most)
    left = (most - rho.max()) / B.square().sum(0).clamp(min=torch.finfo(B.dtype).tiny)
    return torch.cat([B * left.clamp(max=1).sqrt(), rho[:, None]], 1)


def spread(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the geometric mean and the root mean square of the eigenvalues of B Bᵀ + diag(ρ).

    Directions without any curvature count as if they had a millionth of the mean.

    Args:
        packed: [B | ρ].

    Returns:
        Two scalars; zero if all eigenvalues are.
    """
    B, rho = packed[:, :-1].double(), packed[:, -1].double()
    squares = B.square().sum(1)
    mean = (squares + rho).sum() / max(len(rho), 1)  # a rank may have none of a small tensor
    if not bool(mean > 0):
        return mean.to(packed.dtype), mean.to(packed.dtype)
    rms = (((B.mT @ B).square().sum() + (2 * rho * squares + rho.square()).sum()) / len(packed)).sqrt()
    rho = rho.clamp(min=1e-6 * mean)
    core = torch.eye(B.shape[1], dtype=B.dtype, device=B.device) + B.mT @ (B / rho[:, None])
    geometric = ((rho.log().sum() + torch.logdet(core)) / len(packed)).exp()
    return geometric.to(packed.dtype), rms.to(packed.dtype)


def grown_sketch(packed: Tensor, size: int, rank: int) -> Tensor:
    """Return the sketch of the same sum, each vector followed by zeros.

    Args:
        packed: [Y | d].
        size: The vectors' new size.
        rank: r.

    Returns:
        [Y | d], (size, min(size, r) + 1); the sketch itself if the size is the same.
    """
    old, Y = len(packed), packed[:, :-1]
    if rank_of(packed) == old < size:  # Y is all of the sum, whose S was the identity
        Y = Y @ signs_like(Y, size, max(rank, old))[:old]
    return F.pad(torch.cat([Y, packed[:, -1:]], 1), (0, 0, 0, size - old))


def matrix_shape(theta: Tensor) -> tuple[int, int]:
    """Return the shape of a parameter as a matrix of its first axis by all others.

    Args:
        theta: The parameter.

    Returns:
        (m, n).
    """
    return theta.shape[:1].numel(), theta.shape[1:].numel()


def as_matrix(theta: Tensor) -> Tensor:
    """Return a parameter as a matrix of its first axis by all others.

    Args:
        theta: The parameter.

    Returns:
        (m, n).
    """
    return theta if theta.dim() == 2 else theta.reshape(matrix_shape(theta))


def pieces(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Return the same rows of several tensors: on a CPU as many at a time as fit its cache, on a GPU all.

    Args:
        *tensors: The first one tells the size.

    Returns:
        Of each piece, the part of every tensor.
    """
    first = tensors[0]
    if first.numel() <= PIECE or not first.is_cpu:
        return [tensors]
    rows = max(PIECE * len(first) // first.numel(), 1)
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def with_unit_trace(packed: Tensor) -> Tensor:
    """Return a sketch of M / tr M; zero where M is zero or not finite.

    Args:
        packed: [Y | d].

    Returns:
        [Y | d].
    """
    trace = packed[:, -1].sum()
    return torch.where((trace > 0) & (trace < torch.inf), packed / trace, 0.0)


# -- what layers tell ------------------------------------------------------------------------------------------


def is_factored(layer: nn.Module) -> bool:
    """Return whether the factors of a layer's weight follow from its inputs and output gradients.

    Args:
        layer: Any module; one of a known kind, not of a subclass, whose forward may differ.

    Returns:
        True for linear layers, convolutions, transposed ones and embeddings, and for transformers' ``Conv1D``.
    """
    if "forward" in vars(layer):
        return False
    if isinstance(layer, nn.Embedding) and (layer.scale_grad_by_freq or layer.sparse or layer.max_norm is not None):
        return False
    return kind_of(layer) in LAYERS or is_conv1d_of_transformers(layer)


def is_conv1d_of_transformers(layer: nn.Module) -> bool:
    """Return whether a layer is GPT-2's linear layer, which keeps its weight transposed.

    Args:
        layer: Any module.

    Returns:
        True if it is.
    """
    return kind_of(layer).__name__ == "Conv1D" and kind_of(layer).__module__ == "transformers.pytorch_utils"


def has_inputs_as_rows(layer: nn.Module) -> bool:
    """Return whether the first axis of a layer's weight is its input's, not its output's.

    Args:
        layer: One that :func:`is_factored`.

    Returns:
        True if it is.
    """
    return isinstance(layer, (nn.Embedding, *TRANSPOSED_CONVOLUTIONS)) or is_conv1d_of_transformers(layer)


def sketch_of_inputs(layer: nn.Module, x: Tensor, told: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """Return the sketch of A = Σ a aᵀ over the samples and positions of a call whose gradient is not zero.

    Args:
        layer: One that :func:`is_factored`; a convolution's A is of all positions.
        x: The layer's input.
        told: What :func:`rows_told` returns.
        rank: r.
        dtype: The precision to compute in.

    Returns:
        [Y | d], for the columns of the layer's weight, or its rows if it :func:`has_inputs_as_rows`.
    """
    if isinstance(layer, nn.Embedding):
        counts = torch.zeros(layer.num_embeddings, dtype=dtype, device=x.device)
        return sketch_of_counts(counts.index_add_(0, x.flatten(), told.to(dtype)), rank)
    x = x.to(dtype)
    if isinstance(layer, CONVOLUTIONS):
        return sketch_of_windows(images_under(layer, x), layer.kernel_size, layer, rank)
    rows = rows_of(layer, x)
    return sketch(rows if isinstance(layer, TRANSPOSED_CONVOLUTIONS) else rows.where(told[:, None], 0.0), rank)


def sketch_of_gradients(layer: nn.Module, g: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """Return the sketch of G = Σ g gᵀ over all samples and positions of a call.

    Args:
        layer: One that :func:`is_factored`.
        g: The gradient by the layer's output, as it reaches its weight.
        rank: r.
        dtype: The precision to compute in.

    Returns:
        [Y | d], for the rows of the layer's weight, or its columns if it :func:`has_inputs_as_rows`.
    """
    g = g.to(dtype)
    if isinstance(layer, TRANSPOSED_CONVOLUTIONS):  # the convolution from its output to its input
        return sketch_of_windows(images_under(layer, g), layer.kernel_size, layer, rank)  # type: ignore[arg-type]
    return sketch(rows_of(layer, g), rank)


def rows_told(layer: nn.Module, g: Tensor) -> Tensor:
    """Return at which samples and positions a layer is told anything: not of padding, nor where labels are ignored.

    Args:
        layer: One that :func:`is_factored`.
        g: The gradient by the layer's output, as it reaches its weight.

    Returns:
        True or False for each of :func:`rows_of` the gradient.
    """
    return g.any(-len(layer.kernel_size) - 1 if isinstance(layer, KERNELS) else -1).flatten()


def pairs_in(layer: nn.Module, x: Tensor, told: Tensor) -> Tensor:
    """Return how many pairs of an input and an output gradient, (a, g), make up a layer's gradient in a call.

    Args:
        layer: One that :func:`is_factored`.
        x: The layer's input.
        told: What :func:`rows_told` returns.

    Returns:
        Their number; of a convolution, all.
    """
    if not isinstance(layer, KERNELS):
        return told.sum()
    places = len(told) if isinstance(layer, CONVOLUTIONS) else x.numel() // layer.in_channels
    return torch.full((), places * layer.groups, device=x.device)


def images_under(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the images that a convolution's kernel moves over, with their padding.

    Args:
        layer: A convolution, or a transposed one: the convolution from its output to its input.
        x: What it sees, with an axis of samples or without.

    Returns:
        (N, C, *positions).
    """
    assert isinstance(layer, KERNELS)
    x = x if x.dim() == len(layer.kernel_size) + 2 else x[None]
    if isinstance(layer, CONVOLUTIONS):
        return F.pad(x, padding_of(layer), "constant" if layer.padding_mode == "zeros" else layer.padding_mode)
    widths: list[int] = []  # without the windows that lie in the output's own padding: no input is there
    padding: tuple[int, ...] = layer.padding  # type: ignore[assignment]  # only plain convolutions take strings
    for stride, width, extra in zip(layer.stride, padding, layer.output_padding, strict=True):
        widths = [width, width - extra // stride * stride, *widths]
    return F.pad(x, widths)


def rows_of(layer: nn.Module, values: Tensor) -> Tensor:
    """Return a layer's inputs or output gradients, one row a sample and position.

    Args:
        layer: Tells where its channels are: second in convolutions, else last.
        values: (N, …, C) or (N, C, …).

    Returns:
        (N · positions, C).
    """
    if isinstance(layer, KERNELS):
        values = values.movedim(-len(layer.kernel_size) - 1, -1)
    return values.reshape(-1, values.shape[-1])
