"""The pure functions: derivative against autograd, worked examples, limits in which two methods are one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alasso import AlassoError
from alasso.methods.alasso import NO_PAST, AlassoState, AlassoSurrogate
from alasso.methods.base import AnchorState, add_to_path_, noisy_move
from alasso.methods.ewc import EWCState, EWCSurrogate, OnlineEWCSurrogate
from alasso.methods.mas import MASSurrogate
from alasso.methods.si import PathState, SISurrogate


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


numbers = st.one_of(st.just(0.0), st.floats(-3, 3, allow_subnormal=False))
shapes = st.sampled_from([(), (1,), (5,), (2, 3), (2, 1, 4)])


@st.composite
def spring(draw):
    """θ, anchor, Ω and side over shapes, signs, zeros, unmoved weights, both sides and weights without a past."""
    shape = draw(shapes)
    count = int(torch.Size(shape).numel())

    def fill(elements):
        values = draw(st.lists(elements, min_size=count, max_size=count))
        return torch.tensor(values, dtype=torch.float64).reshape(shape)

    theta, anchor, omega = fill(numbers), fill(numbers), fill(numbers).abs()
    if draw(st.booleans()):
        theta = torch.where(fill(st.integers(0, 1).map(float)) > 0, anchor, theta)  # some stand on the anchor
    side = fill(st.sampled_from([-1.0, 0.0, 1.0, float(NO_PAST)])).to(torch.int8)
    return theta, anchor, omega, side


def surrogates(anchor, omega, side, a, epsilon):
    zero = torch.zeros_like(anchor)
    yield AlassoSurrogate(a=a, c=0.7, epsilon=epsilon), AlassoState(anchor, omega, zero, side, tensor(0.0))
    yield SISurrogate(c=0.7), PathState(anchor, omega, zero, tensor(0.0))
    yield EWCSurrogate(lam=3.0), EWCState(anchor, omega, torch.tensor(2.0, dtype=torch.float64))
    yield OnlineEWCSurrogate(lam=3.0), AnchorState(anchor, omega)
    yield MASSurrogate(lam=3.0), AnchorState(anchor, omega)


@settings(max_examples=150, deadline=None)
@given(spring(), st.sampled_from([0.5, 1.0, 1.8, 4.0]), st.sampled_from([0.0, 1e-6, 0.5]))
def test_penalty_grad_is_the_derivative_of_penalty(drawn, a, epsilon):
    theta, anchor, omega, side = drawn
    for surrogate, state in surrogates(anchor, omega, side, a, epsilon):
        theta = theta.detach().requires_grad_()
        (expected,) = torch.autograd.grad(surrogate.penalty(theta, state), theta)
        torch.testing.assert_close(surrogate.penalty_grad(theta.detach(), state), expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(spring(), st.sampled_from([0.5, 1.0, 1.8]))
def test_alasso_penalty_is_equation_5_weight_by_weight(drawn, a):
    theta, anchor, omega, side = drawn
    surrogate = AlassoSurrogate(a=a, c=1.5, epsilon=0.25)
    expected = 0.0
    columns = (theta.flatten(), anchor.flatten(), omega.flatten(), side.flatten())
    for t, o, big, s in zip(*(c.tolist() for c in columns), strict=True):
        if s != NO_PAST:
            alpha = (t - o) * s
            expected += 1.5 * (big if alpha > 0 else a * big + 0.25) * (t - o) ** 2
    state = AlassoState(anchor, omega, torch.zeros_like(anchor), side, tensor(0.0))
    assert float(surrogate.penalty(theta, state)) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_omega_worked_by_hand_over_three_tasks_as_the_authors_ran_it():
    """Three weights x, y, z; one step a task; ξ = 1, a′ = 2, c′ = ½, ε′ = ½; monotone; a still weight moved right."""
    surrogate = AlassoSurrogate(a_prime=2, c_prime=0.5, epsilon_prime=0.5, xi=1.0, unmoved="moved_right")
    state = surrogate.init(tensor(0, 0, 0))

    # Task 1: (0, 0, 0) → (1, −1, 0) with g = (−2, 3, 5).     ω = −g·Δ = (2, 3, 0); no past.
    #   Ω = ω / (Δ² + ξ) = (2/2, 3/2, 0/1) = (1, 1.5, 0)
    #   sides: x came from the left, y from the right, z stood still and so counts as come from the left
    add_to_path_(state.path, tensor(-2, 3, 5), tensor(0, 0, 0), tensor(1, -1, 0))
    state = surrogate.consolidate(state, tensor(1, -1, 0))
    torch.testing.assert_close(state.omega, tensor(1, 1.5, 0), rtol=0, atol=0)
    assert state.side.tolist() == [-1, 1, -1]

    # Task 2: → (2, −0.5, 1) with g = (−4, −2, −1).           Δ = (1, 0.5, 1), ω = (4, 1, 1).
    #   past: x to the right, unobserved: ½·(2·1 + ½)·1² = 1.25
    #         y to the right, observed:   ½·1.5·0.5²     = 0.1875
    #         z to the right, unobserved: ½·(2·0 + ½)·1² = 0.25
    #   Eq. 7: ((4−1.25)/2, (1−0.1875)/1.25, (1−0.25)/2) = (1.375, 0.65, 0.375)
    #   never falling: y keeps 1.5
    add_to_path_(state.path, tensor(-4, -2, -1), tensor(1, -1, 0), tensor(2, -0.5, 1))
    state = surrogate.consolidate(state, tensor(2, -0.5, 1))
    torch.testing.assert_close(state.omega, tensor(1.375, 1.5, 0.375), rtol=0, atol=0)
    assert state.side.tolist() == [-1, -1, -1]

    # Task 3: → (1.5, −0.5, 2) with g = (1, 7, −3).           Δ = (−0.5, 0, 1), ω = (0.5, 0, 3).
    #   past: x to the left, observed:    ½·1.375·0.5²        = 0.171875
    #         y stood still:              0
    #         z to the right, unobserved: ½·(2·0.375 + ½)·1²  = 0.625
    #   Eq. 7: (0.328125/1.25, 0/1, 2.375/2) = (0.2625, 0, 1.1875)
    #   never falling: (1.375, 1.5, 1.1875)
    add_to_path_(state.path, tensor(1, 7, -3), tensor(2, -0.5, 1), tensor(1.5, -0.5, 2))
    state = surrogate.consolidate(state, tensor(1.5, -0.5, 2))
    torch.testing.assert_close(state.omega, tensor(1.375, 1.5, 1.1875), rtol=0, atol=0)
    assert state.side.tolist() == [1, -1, -1]
    assert state.path.tolist() == [0, 0, 0]


def test_a_side_kept_as_the_sign_of_omega_is_lost_where_omega_is_zero():
    """ω = (2, −1, 0), so Ω = (1, 0, 0): the last two are free on the right, ε on the left."""
    surrogate = AlassoSurrogate(xi=1.0, epsilon=0.25, unmoved="sign_of_omega")
    state = surrogate.init(tensor(0, 0, 0))
    add_to_path_(state.path, tensor(-2, -1, 5), tensor(0, 0, 0), tensor(1, -1, 0))
    state = surrogate.consolidate(state, tensor(1, -1, 0))
    assert state.omega.tolist() == [1, 0, 0] and state.side.tolist() == [-1, 1, 1]
    k_minus, k_plus = surrogate.stiffness(state)
    assert k_minus.tolist() == [1, 0.25, 0.25] and k_plus.tolist() == [1.8 + 0.25, 0, 0]


def test_a_weight_that_stood_still_does_not_divide_by_zero_and_keeps_its_omega():
    surrogate = AlassoSurrogate(xi=0.0, monotone=False, unmoved="unobserved")
    state = surrogate.init(tensor(0, 0))
    add_to_path_(state.path, tensor(-1, -1), tensor(0, 0), tensor(2, 0))
    state = surrogate.consolidate(state, tensor(2, 0))
    assert state.omega.tolist() == [0.5, 0.0]
    assert state.side.tolist() == [-1, 0]
    state = surrogate.consolidate(state, tensor(2, 0))
    assert state.omega.tolist() == [0.5, 0.0]
    state = SISurrogate(xi=0.0).consolidate(PathState(tensor(1.0), tensor(3.0), tensor(0.0), tensor(0.0)), tensor(1.0))
    assert state.omega.tolist() == [3.0]


def test_a_still_weight_is_unobserved_on_both_sides():
    surrogate = AlassoSurrogate(a=3.0, c=1.0, epsilon=0.5)
    state = AlassoState(tensor(0, 0), tensor(2, 2), tensor(0, 0), torch.zeros(2, dtype=torch.int8), tensor(0.0))
    assert surrogate.penalty_grad(tensor(-1, 1), state).tolist() == [-13.0, 13.0]  # ±2·(3·2 + 0.5)


def test_omega_may_fall_but_not_below_zero_when_not_monotone():
    surrogate = AlassoSurrogate(monotone=False, xi=0.0)
    state = AlassoState(
        tensor(0, 0), tensor(2, 2), tensor(0.5, 3), torch.tensor([-1, -1], dtype=torch.int8), tensor(0.0)
    )
    # Both move by −1 onto the observed side: past = −2·1, so (0.5 − 2)/1 → 0 and (3 − 2)/1 → 1.
    assert surrogate.consolidate(state, tensor(-1, -1)).omega.tolist() == [0.0, 1.0]


def test_negative_path_integral_lowers_si_importance_down_to_zero():
    """As SI's authors do: the rectifier of Ω + ω/(Δ² + ξ), not of each task's share."""
    state = PathState(tensor(0, 0), tensor(2, 2), tensor(-1, -9), tensor(0.0))
    assert SISurrogate(xi=0.0).consolidate(state, tensor(1, 1)).omega.tolist() == [1.0, 0.0]


def test_ewc_single_spring_equals_the_sum_over_all_tasks_also_in_value():
    generator = torch.Generator().manual_seed(3)
    surrogate = EWCSurrogate(lam=0.8)
    anchors = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    fishers = torch.rand(7, 4, generator=generator, dtype=torch.float64)
    fishers[2, 1] = fishers[:, 3] = 0.0  # a task, and a weight, without any importance
    state = surrogate.init(anchors[0])
    for theta, F in zip(anchors, fishers, strict=True):
        state = surrogate.consolidate(state, theta, F)
    for _ in range(5):
        theta = 3 * torch.randn(4, generator=generator, dtype=torch.float64)
        expected = 0.4 * (fishers * (theta - anchors) ** 2).sum()
        torch.testing.assert_close(surrogate.penalty(theta, state), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: AlassoSurrogate(a=-1.0), "a must be"),
        (lambda: AlassoSurrogate(xi=float("nan")), "xi must be"),
        (lambda: AlassoSurrogate(omega_rule="exact"), "omega_rule must be one of accurate, si"),
        (lambda: AlassoSurrogate(unmoved="left"), "unmoved must be one of"),
        (lambda: AlassoSurrogate(monotone="no"), "monotone must be True or False, not 'no'"),
        (lambda: SISurrogate(c=float("inf")), "c must be"),
        (lambda: OnlineEWCSurrogate(gamma=1.5), "between 0 and 1"),
        (lambda: EWCSurrogate().consolidate(EWCSurrogate().init(tensor(1.0)), tensor(1.0)), "loader"),
    ],
)
def test_bad_settings_are_named(make, word):
    with pytest.raises(AlassoError, match=word):
        make()


@pytest.mark.parametrize(
    ("path", "gradient", "times"),
    [(30.0, 4.0, 5.0), (3.0, 4.0, 1.0), (-7.0, 4.0, 1.0), (30.0, 0.0, 1.0), (30.0, None, 1.0)],
)
def test_a_move_counts_more_the_noisier_its_path_was(path, gradient, times):
    """‖d‖ = 3 and ‖g‖ = 2: a straight path lowers the loss by 6 at most."""
    gradient = None if gradient is None else torch.tensor(gradient)
    assert float(noisy_move(torch.tensor(9.0), torch.tensor(path), gradient)) == 9.0 * times
