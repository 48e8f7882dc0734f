"""Sketches, forms and what layers tell, against dense matrices and loops over samples and positions."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from alasso.importance import kronecker as kr
from alasso.importance._signed_gradients import signed_gradient, sizes_of_gradients
from alasso.importance._taps import reaching

from kron_reference import gram, recovered, vectors

DOUBLE = torch.float64
close = {"rtol": 1e-9, "atol": 1e-12}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def dense(packed):
    """B Bᵀ + diag(ρ)."""
    return packed[:, :-1] @ packed[:, :-1].T + torch.diag(packed[:, -1])


def packed_of(M, rank):
    """[M S | diag M]."""
    return torch.cat([M @ kr.signs(len(M), rank, M.dtype, M.device), M.diagonal()[:, None]], 1)


# -- sketches and forms ----------------------------------------------------------------------------------------


def test_signs_are_the_identity_or_random_signs_whose_first_rows_stay():
    assert torch.equal(kr.signs(4, 4, DOUBLE, torch.device("cpu")), torch.eye(4, dtype=DOUBLE))
    few, many = (kr.signs(size, 4, DOUBLE, torch.device("cpu")) for size in (5, 50))
    assert torch.equal(many[:5], few)
    assert torch.equal(many.abs(), torch.full((50, 4), 0.5, dtype=DOUBLE))
    assert 0.3 < (many > 0).double().mean() < 0.7


@pytest.mark.parametrize("rank", [1, 3, 5, 9])
def test_a_sketch_of_vectors(rank):
    x = random(7, 5)
    torch.testing.assert_close(kr.sketch(x, rank), packed_of(gram(x), rank), **close)


@pytest.mark.parametrize("rank", [1, 3, 5, 9])
def test_a_sketch_of_counts(rank):
    counts = torch.tensor([2.0, 0.0, 1.0, 5.0, 3.0], dtype=DOUBLE)
    torch.testing.assert_close(kr.sketch_of_counts(counts, rank), packed_of(torch.diag(counts), rank), **close)


@pytest.mark.parametrize("vectors_seen", [2, 4, 20])
@pytest.mark.parametrize("rank", [1, 3, 6, 9])
def test_a_form_is_nystroms_approximation_with_the_rest_on_the_diagonal(rank, vectors_seen):
    M = gram(random(vectors_seen, 6))
    torch.testing.assert_close(dense(kr.form(packed_of(M, rank))), recovered(M, rank), **close)


@pytest.mark.parametrize("vectors_seen", [2, 6, 20])
def test_with_a_rank_as_large_as_the_matrix_or_as_its_own_nothing_is_lost(vectors_seen):
    M = gram(random(vectors_seen, 6))
    torch.testing.assert_close(dense(kr.form(packed_of(M, 6))), M, **close)
    if vectors_seen < 4:
        torch.testing.assert_close(dense(kr.form(packed_of(M, 4))), M, **close)


def test_a_form_keeps_the_trace_of_what_it_could_not_resolve():
    M = gram(random(30, 12))
    found = dense(kr.form(packed_of(M, 3)))
    assert float(found.trace()) == pytest.approx(float(M.trace()), rel=1e-9)
    assert torch.linalg.eigvalsh(found)[0] > 0


@pytest.mark.parametrize("rank", [0, 3])
def test_nothing_makes_a_form_of_nothing(rank):
    assert not kr.form(torch.zeros(5, rank + 1)).any()


def test_a_form_of_a_float32_sketch_is_computed_in_float64():
    packed = packed_of(gram(random(9, 6)), 3).float()
    assert torch.equal(kr.form(packed), kr.form(packed.double()).float())


def forms(ranks):
    rows, columns = (kr.form(packed_of(gram(random(9, n, seed=n)), r)) for n, r in zip((5, 7), ranks, strict=True))
    return rows, columns


@pytest.mark.parametrize("ranks", [(2, 3), (5, 7), (9, 9)])
def test_times_diagonal_and_largest(ranks):
    rows, columns = forms(ranks)
    D = random(5, 7)
    torch.testing.assert_close(kr.times(rows, D, columns), dense(rows) @ D @ dense(columns), **close)
    for packed in (rows, columns):
        torch.testing.assert_close(kr.diagonal(packed), dense(packed).diagonal(), **close)
        top = float(torch.linalg.eigvalsh(dense(packed))[-1])
        assert top * (1 - 1e-9) <= float(kr.largest(packed)) <= top + float(packed[:, -1].max()) + 1e-9


@pytest.mark.parametrize("ranks", [(2, 3), (5, 7)])
def test_a_forms_directions_are_at_right_angles(ranks):
    for packed in forms(ranks):
        gram_of_B = packed[:, :-1].T @ packed[:, :-1]
        torch.testing.assert_close(gram_of_B, torch.diag(gram_of_B.diagonal()), **close)


@pytest.mark.parametrize("share", [1e-4, 0.3, 1.0])
@pytest.mark.parametrize("ranks", [(2, 3), (5, 7)])
def test_a_capped_form_loses_what_is_beyond_the_bound(ranks, share):
    for packed, rank in zip(forms(ranks), ranks, strict=True):
        most = share * kr.largest(packed)
        found = kr.capped(packed, most)
        assert torch.linalg.eigvalsh(dense(found))[-1] <= most * (1 + 1e-9)
        if rank == len(packed):  # there is no rest
            values, V = torch.linalg.eigh(dense(packed))
            torch.testing.assert_close(dense(found), V * values.clamp(max=most) @ V.T, **close)
        if share == 1:
            torch.testing.assert_close(found, packed, **close)


def test_a_capped_diagonal_is_cut():
    rows = random(5, 1).abs()
    assert torch.equal(kr.capped(rows, rows.median()), rows.clamp(max=rows.median()))


def test_forms_without_directions_are_diagonal():
    rows, columns = random(5, 1).abs(), torch.ones(1, 1, dtype=DOUBLE)
    D = random(5, 1, seed=1)
    torch.testing.assert_close(kr.times(rows, D, columns), rows * D, **close)
    assert kr.largest(rows) == rows.max()


@pytest.mark.parametrize("old, new", [(3, 3), (3, 4), (3, 6), (4, 9), (6, 9)])
def test_a_grown_sketch_is_that_of_vectors_with_zeros_behind(old, new):
    x, rank = random(7, old), 4
    grown = kr.grown_sketch(kr.sketch(x, rank), new, rank)
    torch.testing.assert_close(grown, kr.sketch(F.pad(x, (0, new - old)), rank), **close)


def test_a_matrix_is_the_first_axis_by_all_others():
    shapes = {(): (1, 1), (3,): (3, 1), (3, 4): (3, 4), (3, 4, 2): (3, 8), (0, 4): (0, 4), (0, 2, 3): (0, 6)}
    for shape, expected in shapes.items():
        assert tuple(kr.as_matrix(torch.zeros(shape)).shape) == expected


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan")])
def test_unit_trace(bad):
    packed = kr.sketch(random(7, 5), 3)
    assert float(kr.with_unit_trace(packed)[:, -1].sum()) == pytest.approx(1.0, rel=1e-9)
    assert not kr.with_unit_trace(packed * bad).any()


# -- what layers tell ------------------------------------------------------------------------------------------

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it says when it is imported
    from transformers.pytorch_utils import Conv1D

TOKENS = torch.tensor([[1, 2, 2, 0], [4, 0, 0, 3]])

#: A layer, and its input.
LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "linear, one sample": (lambda: nn.Linear(4, 3), (4,)),
    "linear, three leading axes": (lambda: nn.Linear(4, 3, bias=False), (2, 3, 2, 4)),
    "linear of transformers": (lambda: Conv1D(3, 4), (2, 3, 4)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3), (2, 3, 7)),
    "conv1d, one sample": (lambda: nn.Conv1d(3, 4, 3, stride=2), (3, 8)),
    "conv1d, same": (lambda: nn.Conv1d(3, 4, 4, padding="same", dilation=2), (2, 3, 7)),
    "conv1d, causal by groups": (lambda: nn.Conv1d(4, 4, 3, padding=2, groups=4), (2, 4, 5)),
    "conv2d": (lambda: nn.Conv2d(2, 3, (3, 2)), (2, 2, 5, 4)),
    "conv2d, all at once": (lambda: nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 2), (1, 2), groups=2), (2, 4, 5, 4)),
    "conv2d, stride that leaves a rest": (lambda: nn.Conv2d(2, 3, 2, stride=3), (2, 2, 7, 6)),
    "conv2d, reflect": (lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="reflect"), (2, 2, 4, 4)),
    "conv2d, replicate": (lambda: nn.Conv2d(2, 3, 3, padding="same", padding_mode="replicate"), (2, 2, 3, 4)),
    "conv2d, circular": (lambda: nn.Conv2d(2, 3, 3, padding=(2, 1), padding_mode="circular"), (2, 2, 3, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 2, (2, 3, 2), stride=(1, 2, 1), padding=(0, 1, 1), groups=2), (2, 2, 3, 4, 2)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(3, 4, 3), (2, 3, 4)),
    "transposed 1d, one sample": (lambda: nn.ConvTranspose1d(3, 4, 3, stride=2), (3, 4)),
    "transposed 2d": (
        lambda: nn.ConvTranspose2d(4, 6, (3, 2), (2, 3), (1, 0), (1, 2), groups=2, dilation=(1, 2)),
        (2, 4, 3, 2),
    ),
    "transposed 2d, padded by more than a stride": (
        lambda: nn.ConvTranspose2d(2, 3, 3, stride=1, dilation=2, output_padding=1),
        (2, 2, 3, 2),
    ),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 3, 2, stride=2, padding=1, output_padding=1), (1, 2, 2, 2, 2)),
    "embedding": (lambda: nn.Embedding(6, 3), TOKENS),
    "embedding, one token": (lambda: nn.Embedding(6, 3), torch.tensor(2)),
    "embedding, padding": (lambda: nn.Embedding(6, 3, padding_idx=0), TOKENS),
}
every_layer = pytest.mark.parametrize("make, given", LAYERS.values(), ids=LAYERS)


def called(make, given):
    """A layer, its input, and a gradient by its output."""
    torch.manual_seed(0)
    layer = make().double()
    x = given if isinstance(given, torch.Tensor) else random(*given)
    g = random(*layer(x).shape, seed=1)
    return layer, x, reaching(layer, x, g)


def inputs_of(layer, x, g, rank):
    return kr.sketch_of_inputs(layer, x, kr.rows_told(layer, g), rank, DOUBLE)


@every_layer
@pytest.mark.parametrize("rank", [3, 1000], ids=["sketched", "whole"])
def test_factors_are_sums_over_samples_and_positions(make, given, rank):
    layer, x, g = called(make, given)
    of_inputs, of_gradients = inputs_of(layer, x, g, rank), kr.sketch_of_gradients(layer, g, rank, DOUBLE)
    found = (of_inputs, of_gradients) if kr.has_inputs_as_rows(layer) else (of_gradients, of_inputs)
    for sketch, seen, size in zip(found, vectors(layer, x, g), kr.matrix_shape(layer.weight), strict=True):
        assert seen.shape[1] == size
        torch.testing.assert_close(sketch, packed_of(gram(seen), rank), **close)
        if rank > size:
            torch.testing.assert_close(dense(kr.form(sketch)), gram(seen), **close)


ONE_GROUP = {name: case for name, case in LAYERS.items() if getattr(case[0](), "groups", 1) == 1}


@pytest.mark.parametrize("make, given", ONE_GROUP.values(), ids=ONE_GROUP)
def test_the_gradient_is_a_sum_over_the_references_vectors(make, given):
    """So the reference itself is right."""
    layer, x, g = called(make, given)
    rows, columns = vectors(layer, x, g)
    (expected,) = torch.autograd.grad(layer(x), layer.weight, g)
    torch.testing.assert_close(rows.T @ columns, kr.as_matrix(expected), **close)


@every_layer
@pytest.mark.parametrize("rank", [3, 1000], ids=["sketched", "whole"])
def test_the_signed_gradient_is_that_of_autograd(make, given, rank):
    layer, x, g = called(make, given)
    M = kr.as_matrix(torch.autograd.grad(layer(x), layer.weight, g)[0])
    found = signed_gradient(layer, x, g, rank, DOUBLE)
    torch.testing.assert_close(found, M @ kr.signs(M.shape[1], rank, DOUBLE, M.device), **close)


@every_layer
@pytest.mark.parametrize("rank", [3, 1000], ids=["sketched", "whole"])
def test_sizes_of_gradients_are_of_samples_and_of_single_positions(make, given, rank):
    layer, x, g = called(make, given)
    found = sizes_of_gradients(layer, x, g, rank, DOUBLE)
    if isinstance(layer, nn.Embedding) or x.dim() == 1:
        assert not found.any()
        return
    rows, columns = vectors(layer, x, g)
    groups, is_one = getattr(layer, "groups", 1), x.dim() == len(getattr(layer, "kernel_size", ())) + 1
    columns = columns @ kr.signs(columns.shape[1], rank, DOUBLE, columns.device)
    rows, columns = (
        one.view(1 if is_one else len(x), -1, groups, one.numel() // len(rows) // groups) for one in (rows, columns)
    )
    products = rows[..., :, None] * columns[..., None, :]  # (samples, positions, groups, …)
    expected = torch.stack([products.sum(1).square().sum(), products.square().sum()])
    if x.dim() < 3 and isinstance(layer, nn.Linear):
        expected = torch.zeros(2, dtype=DOUBLE)
    torch.testing.assert_close(found, expected, **close)


def test_the_size_of_many_rows_at_few_positions_takes_little_memory():
    """As of a head of 50,000 words: no tensor of samples × rows × r."""

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            self.numel = max(self.numel, found.numel())
            return found

    layer, x, g = nn.Linear(40, 500).double(), random(6, 2, 40), random(6, 2, 500)
    with Largest() as largest:
        sizes_of_gradients(layer, x, g, 32, DOUBLE)
    assert 0 < largest.numel <= g.numel()


@every_layer
def test_positions_are_pairs_of_an_input_and_an_output_gradient(make, given):
    layer, x, g = called(make, given)
    assert kr.pairs_in(layer, x, kr.rows_told(layer, g)) == max(len(seen) for seen in vectors(layer, x, g))


ROWS = {name: case for name, case in LAYERS.items() if type(case[0]()).__name__ in ("Linear", "Conv1D", "Embedding")}


@pytest.mark.parametrize("make, given", ROWS.values(), ids=ROWS)
def test_where_no_gradient_comes_an_input_tells_nothing(make, given):
    layer, x, g = called(make, given)
    flat = g.reshape(-1, g.shape[-1])
    flat[::2] = 0
    if x.is_floating_point():
        x.reshape(-1, x.shape[-1])[0] = torch.nan  # of a position that is masked
    told = kr.rows_told(layer, g)
    rows, columns = vectors(layer, x, g)
    assert kr.pairs_in(layer, x, told) == len(rows) == len(columns) <= len(flat) // 2
    seen = rows if kr.has_inputs_as_rows(layer) else columns
    torch.testing.assert_close(inputs_of(layer, x, g, 3), packed_of(gram(seen), 3), **close)


def test_an_output_pixel_is_told_something_if_any_channel_is():
    g = torch.zeros(2, 3, 2, 2)
    g[1, 2, 0, 1] = 1.0
    told = kr.rows_told(nn.Conv2d(1, 3, 2), g)
    assert told.nonzero().flatten().tolist() == [5]
    assert torch.equal(told, kr.rows_told(nn.Linear(1, 3), kr.rows_of(nn.Conv2d(1, 3, 2), g)))


CONVOLUTIONS = {name: case for name, case in LAYERS.items() if "conv" in name or "transposed" in name}


@pytest.mark.parametrize("make, given", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_images_under_a_kernel_need_no_padding_any_more(make, given):
    """A convolution is one of these images by the plain kernel; a transposed one goes from its output to its input."""
    layer, x, g = called(make, given)
    is_transposed = kr.has_inputs_as_rows(layer)
    images = kr.images_under(layer, g if is_transposed else x)
    plain = (F.conv1d, F.conv2d, F.conv3d)[len(layer.kernel_size) - 1]
    found = plain(images, layer.weight, None, layer.stride, 0, layer.dilation, layer.groups)
    if is_transposed:
        x = x.requires_grad_()
        (expected,) = torch.autograd.grad(layer(x), x, g)
    else:
        expected = layer(x) - layer.bias.view(-1, *[1] * len(layer.kernel_size))
    torch.testing.assert_close(found.reshape(expected.shape), expected, **close)


def test_padding_tells_an_embedding_nothing():
    layer, g = nn.Embedding(6, 3, padding_idx=0), random(2, 4, 3)
    kept = reaching(layer, TOKENS, g)
    assert not kept[TOKENS == 0].any() and torch.equal(kept[TOKENS != 0], g[TOKENS != 0])
    assert reaching(nn.Embedding(6, 3), TOKENS, g) is g


@every_layer
def test_inputs_of_another_precision_are_taken_as_they_are(make, given):
    layer, x, g = called(make, given)
    low = x.bfloat16() if x.is_floating_point() else x
    rounded = low.to(DOUBLE) if x.is_floating_point() else x
    found, expected = inputs_of(layer, low, g, 3), inputs_of(layer, rounded, g, 3)
    assert found.dtype == DOUBLE and torch.equal(found, expected)
    found = kr.sketch_of_gradients(layer, g.bfloat16(), 3, torch.float32)
    assert found.dtype == torch.float32


class OwnLinear(nn.Linear):
    """Whose forward may be anything."""


def replaced():
    layer = nn.Linear(2, 2)
    layer.forward = lambda x: x
    return layer


@pytest.mark.parametrize(
    "layer",
    [
        OwnLinear(2, 2),
        replaced(),
        nn.LayerNorm(2),
        nn.LSTM(2, 2),
        nn.Embedding(3, 2, sparse=True),
        nn.Embedding(3, 2, max_norm=1.0),
        nn.Embedding(3, 2, scale_grad_by_freq=True),
        nn.MultiheadAttention(4, 2).out_proj,
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_what_may_do_something_else_is_not_factored(layer):
    assert not kr.is_factored(layer)


@every_layer
def test_known_kinds_are_factored(make, given):
    assert kr.is_factored(make())


# -- another library -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer, shape",
    [
        (nn.Linear(4, 3), (5, 4)),
        (nn.Linear(4, 3), (5, 2, 4)),
        (nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (5, 2, 5, 4)),
    ],
    ids=["linear", "linear over positions", "conv2d"],
)
def test_factors_are_those_of_curvlinops(layer, shape):
    """Its KFAC of the empirical Fisher, a mean over N samples: N Σ g gᵀ ⊗ Σ a aᵀ / (N · positions)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it says when it is imported
        curvlinops = pytest.importorskip("curvlinops", reason="make test installs it")
    layer = layer.double()
    x, N = random(*shape), shape[0]
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(layer(x).numel() // N, 3).double())
    y = torch.arange(N) % 3
    options = {"fisher_type": "empirical", "kfac_approx": "expand", "check_deterministic": False}
    kfac = curvlinops.KFACLinearOperator(model, nn.CrossEntropyLoss(), [layer.weight], [(x, y)], **options)

    z = layer(x)
    (g,) = torch.autograd.grad(nn.functional.cross_entropy(model[1:](z), y), z)
    G, A = kr.sketch_of_gradients(layer, g, 1000, DOUBLE), inputs_of(layer, x, g, 1000)
    positions = g[0].numel() // layer.weight.shape[0]
    expected = kfac @ torch.eye(layer.weight.numel(), dtype=DOUBLE)
    torch.testing.assert_close(torch.kron(dense(kr.form(G)), dense(kr.form(A))) / positions, expected, **close)
