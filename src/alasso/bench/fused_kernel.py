"""The kernel of :mod:`alasso.bench.fused`, apart because it can be imported only where Triton is."""

import triton
import triton.language as tl


@triton.jit
def move_tile(
    dy_at, x_at, theta_at, m_at, v_at, anchor_at, k_minus_at, k_plus_at, path_at, step_size_at, root_at, active_at,
    batch, outs, inputs, beta1, beta2, epsilon,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(1).to(tl.int64)
    tiles_across = tl.cdiv(inputs, BN)
    row = (tl.program_id(0) // tiles_across) * BM + tl.arange(0, BM)
    column = (tl.program_id(0) % tiles_across) * BN + tl.arange(0, BN)

    # gradient = dyᵀ · x, summed over the batch
    dy_at += lane * batch * outs
    x_at += lane * batch * inputs
    gradient = tl.zeros((BM, BN), dtype=tl.float32)
    for first in range(0, batch, BK):
        example = first + tl.arange(0, BK)
        dy = tl.load(
            dy_at + example[None, :] * outs + row[:, None],
            mask=(row[:, None] < outs) & (example[None, :] < batch), other=0.0,
        )  # fmt: skip
        x = tl.load(
            x_at + example[:, None] * inputs + column[None, :],
            mask=(example[:, None] < batch) & (column[None, :] < inputs), other=0.0,
        )  # fmt: skip
        gradient = tl.dot(dy, x, gradient, input_precision=PRECISION)

    # penalty, Adam and ω, as in lanes.spring_and_adam_
    inside = (row[:, None] < outs) & (column[None, :] < inputs) & (tl.load(active_at + lane) != 0)
    at = lane * outs * inputs + row[:, None] * inputs + column[None, :]
    theta = tl.load(theta_at + at, mask=inside)
    d = theta - tl.load(anchor_at + at, mask=inside)
    stiffness = tl.where(d < 0, tl.load(k_minus_at + at, mask=inside), tl.load(k_plus_at + at, mask=inside))
    total = gradient + 2 * stiffness * d
    m = tl.load(m_at + at, mask=inside)
    m = m + (1 - beta1) * (total - m)
    v = beta2 * tl.load(v_at + at, mask=inside) + (1 - beta2) * total * total
    moved = theta - tl.load(step_size_at + lane) * m / (tl.sqrt(v) / tl.load(root_at + lane) + epsilon)
    path = tl.load(path_at + at, mask=inside) - gradient * (moved - theta)
    tl.store(theta_at + at, moved, mask=inside)
    tl.store(m_at + at, m, mask=inside)
    tl.store(v_at + at, v, mask=inside)
    tl.store(path_at + at, path, mask=inside)
