"""Norms by Lanczos: above the truth for every spectrum, close to it, and an unlucky start is really what may fail."""

import math

import pytest
import torch
from torch import Tensor

from zoo.bounds import lanczos

N, L = 400, 6
KINDS = ("flat", "isolated", "clustered", "crowded at the top", "low rank", "zero")


def spectrum(kind: str) -> Tensor:
    """Singular values of A."""
    flat = torch.linspace(0, 1, N).double()
    return {
        "flat": flat,
        "isolated": torch.cat([0.5 * flat[:-1], flat[-1:] * 1.3]),
        "clustered": 1 + 1e-6 * flat,
        "crowded at the top": 1 - (1 - flat) ** 4,
        "low rank": flat * (torch.arange(N) >= N - 5),
        "zero": 0 * flat,
    }[kind]


def found(values_N: Tensor, start_LN: Tensor) -> Tensor:
    """Of the diagonal matrix: any other is that one, turned, and starts are as likely in all directions."""
    return lanczos.norms(lambda v: v * values_N.square(), start_LN[None])[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_above_the_norm_and_close_to_it(kind: str) -> None:
    values_N = spectrum(kind)
    start_LN = torch.randn(L, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bound_L, norm = found(values_N, start_LN), values_N.amax()
    assert (bound_L >= norm).all()
    assert (bound_L <= norm * 1.12 + 1e-12).all()


def test_the_couplings_are_those_of_the_characteristic_polynomial() -> None:
    """|p(M) v| = b_1 ... b_k, on which the bound stands."""
    values_N = spectrum("flat")
    start_LN = torch.randn(1, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ritz = next(lanczos.tridiagonal(lambda v: v * values_N, start_LN, (8,)))
    v_N = start_LN[0] / start_LN[0].norm()
    for theta in ritz.theta_LK[0]:
        v_N = (values_N - theta) * v_N
    torch.testing.assert_close(v_N.norm(), ritz.b_LK[0].prod())


def test_the_chance_to_fail_is_that_of_the_start() -> None:
    """A start that is short of the top eigenvector by just the share s reckoned with is bounded still; and shorter ones
    are as rare as it is said, for larger s that can be counted."""
    values_N = spectrum("isolated")
    start_LN = torch.randn(L, N, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    start_LN = start_LN / start_LN.norm(dim=1, keepdim=True)
    start_LN[:, -1] = 1.2 * lanczos.FAILURE / math.sqrt(2 * N / math.pi)
    assert (found(values_N, start_LN) >= values_N.amax()).all()
    for n in (2, 3, 30):
        v = torch.randn(10**6, n, generator=torch.Generator().manual_seed(n))
        short = float((v[:, 0].abs() < 0.01 * v.norm(dim=1)).double().mean())
        chance = 0.01 * math.sqrt(2 * n / math.pi)
        assert 0.5 * chance < short < 1.03 * chance


def test_ritz_values_are_never_above() -> None:
    values_N = spectrum("crowded at the top")
    start_LN = torch.randn(L, N, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert (lanczos.ritz(lambda v: v * values_N, start_LN, 12) <= values_N.amax() * (1 + 1e-12)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_basis_is_orthonormal_and_the_recurrence_holds(kind: str) -> None:
    """M v_k = b_{k-1} v_{k-1} + a_k v_k + b_k v_{k+1} up to the share ROUNDING of ||M||, when the space is exhausted
    too."""
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
    start_LN = torch.randn(len(KINDS), N, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    together_L = lanczos.norms(lambda v: v * squares_LN, start_LN[None])[0]
    steps = set[int]()
    for square_N, start_N, bound in zip(squares_LN, start_LN, together_L, strict=True):
        calls = list[int]()

        def apply(v: Tensor, square_N: Tensor = square_N, calls: list[int] = calls) -> Tensor:
            calls.append(1)
            return v * square_N

        torch.testing.assert_close(lanczos.norms(apply, start_N[None, None])[0, 0], bound, rtol=1e-12, atol=1e-14)
        steps.add(len(calls))
    assert min(steps) < max(steps), "all of them stop alike: nothing was tried"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "zero"])
def test_the_bound_keeps_the_distance_that_rounding_asks_for(kind: str) -> None:
    """Beyond the bound rounding alone cannot hide a share s of the start, however close the Ritz value is."""
    start_LN = torch.randn(L, N, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    s = lanczos.FAILURE / math.sqrt(2 * N / math.pi)
    for ritz in lanczos.tridiagonal(lambda v: v * spectrum(kind).square(), start_LN, lanczos.STEPS):
        x_L = lanczos.upper(ritz, N)
        gap_LK = x_L[:, None] - ritz.theta_LK
        rounding_L = lanczos.ROUNDING * x_L * (ritz.first_LK / gap_LK).norm(dim=-1)
        assert (rounding_L <= s * (1 + 1e-6)).all()
        assert (x_L <= 1.3 * ritz.theta_LK[:, -1] + 2e-9).all() or ritz.theta_LK.shape[1] < 24


@pytest.mark.parametrize("n", [10**6, 4 * 10**6, 10**9])
def test_of_a_huge_map_the_chance_grows_and_the_bound_stays(n: int) -> None:
    """No share of a start is asked about that rounding could hide."""
    start_LN = torch.randn(L, N, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    *_, ritz = lanczos.tridiagonal(lambda v: v * spectrum("isolated").square(), start_LN, lanczos.STEPS)
    x_L, s = lanczos.upper(ritz, n), lanczos.chance(n) / math.sqrt(2 * n / math.pi)
    assert lanczos.chance(10**5) == lanczos.FAILURE
    assert (lanczos.chance(n) > lanczos.FAILURE) == (n > 2 * 10**6)
    assert s >= 3.99 * lanczos.ROUNDING
    gap_LK = x_L[:, None] - ritz.theta_LK
    assert (lanczos.ROUNDING * x_L * (ritz.first_LK / gap_LK).norm(dim=-1) <= s * (1 + 1e-6)).all()
    assert x_L.isfinite().all()
    assert (x_L >= spectrum("isolated").square().amax()).all()


IMAGE = torch.rand(1, 1, 5, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def hidden_from(start_N: Tensor) -> Tensor:
    """A unit vector orthogonal to a start."""
    start_N, w_N = start_N / start_N.norm(), torch.ones_like(start_N)
    for _ in range(2):  # the second time against rounding
        w_N = w_N - (w_N @ start_N) * start_N
    return w_N / w_N.norm()


@pytest.mark.hostile
@pytest.mark.parametrize("top", [1.1, 1.2, 1.3])
def test_a_direction_hidden_from_every_start_known_before_is_found(top: float) -> None:
    """Whoever makes the weights knows the image, and every nonce that was drawn so far, and gives the map a largest
    direction w orthogonal to the start of those, beside others that are found at once. That start is deceived; a new
    one is not."""
    shape = torch.Size([1, N])
    known = lanczos.starts(IMAGE, shape, b"known").flatten(1)
    w_N = hidden_from(known[0])

    squares_N = (spectrum("isolated") / 1.3).square()

    def gram(v: Tensor) -> Tensor:
        rest = squares_N * (v - (v @ w_N)[..., None] * w_N)
        return rest + (top**2 * (v @ w_N) - rest @ w_N)[..., None] * w_N

    assert lanczos.norms(gram, known[None])[0, 0] < 0.99 * top, "nothing was hidden"
    for _ in range(20):
        seed = lanczos.seed_of(torch.nn.Identity(), lanczos.new_nonce())
        assert lanczos.norms(gram, lanczos.starts(IMAGE, shape, seed).flatten(1)[None])[0, 0] >= top


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
    values_N = spectrum("flat")
    start_LN = torch.randn(2, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def gram(v: Tensor) -> Tensor:
        image = v * values_N.square()
        return torch.cat([image[..., :1, :] * factor, image[..., 1:, :]], -2)

    bound_L, ritz_L = lanczos.norms(gram, start_LN[None])[0], lanczos.ritz(gram, start_LN, 8)
    torch.testing.assert_close(bound_L[1:], found(values_N, start_LN[1:]))
    if factor < lanczos.HUGE:
        torch.testing.assert_close(bound_L[0], found(values_N, start_LN[:1])[0] * factor**0.5)
    else:
        assert torch.isinf(bound_L[0])
        assert torch.isinf(ritz_L[0])
    assert torch.isfinite(ritz_L[1])
