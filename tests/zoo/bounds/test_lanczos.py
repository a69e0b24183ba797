"""Norms by Lanczos: above the truth for every spectrum and close to it; only an unlucky start can fail."""

import math

import pytest
import torch
from torch import Tensor

from zoo.bounds import lanczos

N, L = 400, 6
KINDS = ("flat", "isolated", "clustered", "crowded at the top", "low rank", "zero")


def spectrum(kind: str) -> Tensor:
    """Return singular values of A."""
    flat = torch.linspace(0, 1, N).double()
    return {
        "flat": flat,
        "isolated": torch.cat([0.5 * flat[:-1], flat[-1:] * 1.3]),
        "clustered": 1 + 1e-6 * flat,
        "crowded at the top": 1 - (1 - flat) ** 4,
        "low rank": flat * (torch.arange(N) >= N - 5),
        "zero": 0 * flat,
    }[kind]


def drawn(seed: int, count: int = L) -> Tensor:
    """Draw starts (STARTS, L, N) for L norms."""
    return torch.randn(lanczos.STARTS, count, N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def norms(gram: lanczos.Map, start_TLN: Tensor, off: float = 0.0) -> Tensor:
    """Return norms (L,) of products with an error of this size."""
    return lanczos.norms(gram, start_TLN[None], torch.full_like(start_TLN[None, 0, :, 0], off))[0]


def found(values_N: Tensor, start_TLN: Tensor) -> Tensor:
    """Return the norm of a diagonal matrix, which stands for all, since starts have a uniform direction."""
    return norms(lambda v: v * values_N.square(), start_TLN)


def least_share(n: int = N) -> float:
    """Return the least share of a start in the top direction; less is as rare as one failing start."""
    return lanczos.chance(n) ** (1 / lanczos.STARTS) / math.sqrt(2 * n / math.pi)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_above_the_norm_and_close_to_it(kind: str) -> None:
    values_N = spectrum(kind)
    bound_L, norm = found(values_N, drawn(0)), values_N.amax()
    assert (bound_L >= norm).all()
    assert (bound_L <= norm * 1.12 + 1e-12).all()


def test_the_couplings_are_those_of_the_characteristic_polynomial() -> None:
    """The bound rests on |p(M) v| = b_1 ... b_k."""
    values_N = spectrum("flat")
    start_LN = torch.randn(1, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ritz = next(lanczos.tridiagonal(lambda v: v * values_N, start_LN, (8,)))
    v_N = start_LN[0] / start_LN[0].norm()
    for theta in ritz.theta_LK[0]:
        v_N = (values_N - theta) * v_N
    torch.testing.assert_close(v_N.norm(), ritz.b_LK[0].prod())


def test_the_chance_to_fail_is_that_of_the_start() -> None:
    """A start with just the assumed share s of the top eigenvector is still bounded.

    Starts with a smaller share are as rare as claimed, for larger s that can be counted.
    """
    values_N = spectrum("isolated")
    start_TLN = drawn(2)
    start_TLN = start_TLN / start_TLN.norm(dim=-1, keepdim=True)
    start_TLN[..., -1] = 1.2 * least_share()
    assert (found(values_N, start_TLN) >= values_N.amax()).all()
    assert least_share() == pytest.approx(lanczos.FAILURE ** (1 / lanczos.STARTS) / math.sqrt(2 * N / math.pi))
    for n in (2, 3, 30):
        v = torch.randn(10**6, n, generator=torch.Generator().manual_seed(n))
        short = float((v[:, 0].abs() < 0.01 * v.norm(dim=1)).double().mean())
        chance = 0.01 * math.sqrt(2 * n / math.pi)
        assert 0.5 * chance < short < 1.03 * chance


def test_a_norm_fails_where_all_of_its_starts_do_and_only_there() -> None:
    """Starts miss the top direction: all of a norm's, or all but one."""
    values_N = spectrum("isolated")
    hidden_TLN = drawn(8)
    hidden_TLN[..., -1] = 0
    norm = values_N.amax()
    assert (found(values_N, hidden_TLN) < 0.9 * norm).all(), "nothing was hidden"
    for seeing in range(lanczos.STARTS):
        start_TLN = hidden_TLN.clone()
        start_TLN[seeing] = drawn(9)[seeing]
        bound_L = found(values_N, start_TLN)
        assert (bound_L >= norm).all()
        assert (bound_L <= 1.12 * norm).all()


def test_starts_of_several_maps_are_told_apart() -> None:
    """S maps with STARTS vectors each: every norm belongs to its own map."""
    squares_SLN = torch.stack([spectrum("flat"), 3 * spectrum("isolated")])[:, None].expand(-1, L, -1).square()
    start_STLN = torch.stack([drawn(10), drawn(11)])
    each = squares_SLN.repeat_interleave(lanczos.STARTS, 0)
    bound_SL = lanczos.norms(lambda v: v * each, start_STLN, torch.zeros(2, L, dtype=torch.float64))
    alone = [found(squares_LN[0].sqrt(), start) for squares_LN, start in zip(squares_SLN, start_STLN, strict=True)]
    torch.testing.assert_close(bound_SL, torch.stack(alone))


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_products_beyond_their_rounding_have_no_norm(share: float) -> None:
    bound_L = norms(lambda v: v * spectrum("flat").square(), drawn(0), share * lanczos.ROUNDING)
    assert torch.isfinite(bound_L).all() == (share < 1)


@pytest.mark.hostile
def test_a_map_that_is_not_one_is_seen_by_its_recurrence() -> None:
    """An asymmetric matrix is detected: the part of an image outside the last two vectors is measured.

    With noise within ROUNDING the norm is no less than the map's.
    """
    squares_N, noise = spectrum("isolated").square(), torch.Generator().manual_seed(12)
    top = squares_N.amax()

    def off_by(size: float) -> lanczos.Map:
        def apply(v: Tensor) -> Tensor:
            w = torch.randn(v.shape, generator=noise, dtype=v.dtype)
            return v * squares_N + size * top * w / w.norm(dim=-1, keepdim=True) * v.norm(dim=-1, keepdim=True)

        return apply

    assert torch.isinf(norms(off_by(1e-6), drawn(0))).all()
    within_L = norms(off_by(1e-10), drawn(0))
    assert torch.isfinite(within_L).all()
    assert (within_L >= top.sqrt()).all()


def test_ritz_values_are_never_above() -> None:
    values_N = spectrum("crowded at the top")
    start_LN = torch.randn(L, N, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert (lanczos.ritz(lambda v: v * values_N, start_LN, 12) <= values_N.amax() * (1 + 1e-12)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_basis_is_orthonormal_and_the_recurrence_holds(kind: str) -> None:
    """M v_k = b_{k-1} v_{k-1} + a_k v_k + b_k v_{k+1} up to ROUNDING times ||M||.

    It also holds when the space is exhausted.
    """
    squares_N = spectrum(kind).square()
    start_LN = torch.randn(L, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    basis = list[Tensor]()

    def apply(v: Tensor) -> Tensor:
        basis.append(v)
        return v * squares_N

    *_, last = lanczos.tridiagonal(apply, start_LN, lanczos.STEPS)
    v_LKN = torch.stack(basis, 1)
    assert v_LKN.shape[1] == lanczos.STEPS[-1]
    eye = torch.eye(v_LKN.shape[1]).double()
    torch.testing.assert_close(v_LKN @ v_LKN.mT, eye.expand(L, -1, -1), atol=1e-13, rtol=0)
    rest = v_LKN * squares_N
    rest = rest - (rest * v_LKN).sum(-1, keepdim=True) * v_LKN
    rest[:, 1:] -= last.b_LK[:, :-1, None] * v_LKN[:, :-1]
    rest[:, :-1] -= last.b_LK[:, :-1, None] * v_LKN[:, 1:]
    assert (torch.linalg.matrix_norm(rest[:, :-1], 2) <= lanczos.ROUNDING * squares_N.amax()).all()


def test_neighbours_that_need_more_steps_change_nothing() -> None:
    """Every vector stops where it would stop alone."""
    squares_LN = torch.stack([spectrum(kind).square() for kind in KINDS])
    start_TLN = drawn(4, len(KINDS))
    together_L = norms(lambda v: v * squares_LN, start_TLN)
    steps = set[int]()
    for square_N, start_TN, bound in zip(squares_LN, start_TLN.movedim(1, 0), together_L, strict=True):
        calls = list[int]()

        def apply(v: Tensor, square_N: Tensor = square_N, calls: list[int] = calls) -> Tensor:
            calls.append(1)
            return v * square_N

        torch.testing.assert_close(norms(apply, start_TN[:, None])[0], bound, rtol=1e-12, atol=1e-14)
        steps.add(len(calls))
    assert min(steps) < max(steps), "all of them stop alike: nothing was tried"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "zero"])
def test_the_bound_keeps_the_distance_that_rounding_asks_for(kind: str) -> None:
    """Beyond the bound rounding alone cannot hide a share s of the start, however close the Ritz value."""
    start_LN = torch.randn(L, N, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    s = least_share()
    for ritz in lanczos.tridiagonal(lambda v: v * spectrum(kind).square(), start_LN, lanczos.STEPS):
        x_L = lanczos.upper(ritz, N)
        gap_LK = x_L[:, None] - ritz.theta_LK
        rounding_L = lanczos.ROUNDING * x_L * (ritz.first_LK / gap_LK).norm(dim=-1)
        assert (rounding_L <= s * (1 + 1e-6)).all()
        assert (x_L <= 1.3 * ritz.theta_LK[:, -1] + 2e-9).all() or ritz.theta_LK.shape[1] < 24


@pytest.mark.parametrize("n", [3 * 10**4, 10**5, 4 * 10**6, 10**9])
def test_of_a_huge_map_the_chance_grows_and_the_bound_stays(n: int) -> None:
    """The share s stays above what rounding could hide."""
    start_LN = torch.randn(L, N, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    *_, ritz = lanczos.tridiagonal(lambda v: v * spectrum("isolated").square(), start_LN, lanczos.STEPS)
    x_L, s = lanczos.upper(ritz, n), least_share(n)
    assert lanczos.chance(3 * 10**4) == pytest.approx(lanczos.FAILURE)
    assert (lanczos.chance(n) > 1.01 * lanczos.FAILURE) == (n > 4 * 10**4)
    assert s >= 3.99 * lanczos.ROUNDING
    gap_LK = x_L[:, None] - ritz.theta_LK
    assert (lanczos.ROUNDING * x_L * (ritz.first_LK / gap_LK).norm(dim=-1) <= s * (1 + 1e-6)).all()
    assert x_L.isfinite().all()
    assert (x_L >= spectrum("isolated").square().amax()).all()


IMAGE = torch.rand(1, 1, 5, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def hidden_from(start_TN: Tensor) -> Tensor:
    """Return a unit vector orthogonal to these starts."""
    basis_NT, w_N = torch.linalg.qr(start_TN.mT).Q, torch.ones_like(start_TN[0])
    for _ in range(2):  # repeated against rounding
        w_N = w_N - basis_NT @ (w_N @ basis_NT)
    return w_N / w_N.norm()


@pytest.mark.hostile
@pytest.mark.parametrize("top", [1.1, 1.2, 1.3])
def test_a_direction_hidden_from_every_start_known_before_is_found(top: float) -> None:
    """An attacker who knows the image and all earlier nonces hides a direction from their starts.

    The largest direction w is orthogonal to the starts of those nonces, beside others that are found at once. Old
    nonces are deceived; new ones are not.
    """
    shape = torch.Size([lanczos.STARTS, N])
    known = lanczos.starts(IMAGE, shape, b"known").movedim(1, 0)
    w_N = hidden_from(known[:, 0])

    squares_N = (spectrum("isolated") / 1.3).square()

    def gram(v: Tensor) -> Tensor:
        rest = squares_N * (v - (v @ w_N)[..., None] * w_N)
        return rest + (top**2 * (v @ w_N) - rest @ w_N)[..., None] * w_N

    assert norms(gram, known)[0] < 0.99 * top, "nothing was hidden"
    for _ in range(20):
        seed = lanczos.seed_of(torch.nn.Identity(), lanczos.new_nonce())
        assert norms(gram, lanczos.starts(IMAGE, shape, seed).movedim(1, 0))[0] >= top


def test_starts_depend_on_nonce_weights_and_image() -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    shape = torch.Size([3, 4])
    seeds = [lanczos.seed_of(*pair) for pair in ((model, "a"), (model, "b"), (other, "a"))]
    drawn = [lanczos.starts(IMAGE, shape, seed) for seed in seeds] + [lanczos.starts(1 - IMAGE, shape, seeds[0])]
    assert len({tuple(start.flatten().tolist()) for start in drawn}) == 4
    assert torch.equal(lanczos.starts(IMAGE, shape, lanczos.seed_of(model, "a")), drawn[0])
    both = lanczos.starts(torch.cat([1 - IMAGE, IMAGE]), shape, seeds[0])
    assert torch.equal(both[1], drawn[0][0]), "neighbours change nothing"


@pytest.mark.parametrize("factor", [1e99, 1e200, torch.inf, torch.nan])
def test_a_map_beyond_the_numbers_has_an_infinite_norm_and_its_neighbours_their_own(factor: float) -> None:
    values_N, start_TLN = spectrum("flat"), drawn(0, 2)

    def gram(v: Tensor) -> Tensor:
        image = v * values_N.square()
        return torch.cat([image[..., :1, :] * factor, image[..., 1:, :]], -2)

    bound_L, ritz_L = norms(gram, start_TLN), lanczos.ritz(gram, start_TLN[0], 8)
    torch.testing.assert_close(bound_L[1:], found(values_N, start_TLN[:, 1:]))
    if factor < lanczos.HUGE:
        torch.testing.assert_close(bound_L[0], found(values_N, start_TLN[:, :1])[0] * factor**0.5)
    else:
        assert torch.isinf(bound_L[0])
        assert torch.isinf(ritz_L[0])
    assert torch.isfinite(ritz_L[1])
