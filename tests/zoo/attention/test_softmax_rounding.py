"""The rounding of softmax attention: what errors of scores do to rows, against ascent on errors and on the ball.

And that of Lipschitz normalisation, whose divisor may vanish within a ball.
"""

import copy

import pytest
import torch
from torch import Tensor

from tests.tools.ascent import ascend
from zoo.attention.lipschitz_norm import LipschitzNormAttention
from zoo.attention.softmax.qkv import Mixing, MixingError
from zoo.attention.softmax.rounding import Core, SquareSum
from zoo.attention.softmax.rows import Rows
from zoo.attention.theory.core import Score
from zoo.bounds.contracts import Rounded
from zoo.bounds.rounding import PRECISIONS, roundings_of

H, N, WIDTH = 2, 5, 3
FLOAT = PRECISIONS[torch.float32]
SHAPE = (1, 1, H, N, WIDTH)
GAINS = {"content": torch.ones(H, dtype=torch.float64), "gated": torch.tensor([0.2, 0.9], dtype=torch.float64)}


def core(score: Score, gain_H: Tensor, radii: tuple[float, float, float]) -> Core:
    """Return a core whose queries, keys and values move by these multiples of r, and are otherwise exact."""
    torch.manual_seed(0)
    bases = 2 * torch.randn(3, *SHAPE, dtype=torch.float64)
    rows = Rows(*(moving(y, share) for y, share in zip(bases, radii, strict=True)))
    fixed = torch.rand(H, N, N, dtype=torch.float64).softmax(-1)
    g = gain_H[:, None, None]
    return Core.of(score, Mixing(mix=lambda p: g * p + (1 - g) * fixed, gain_H=gain_H), MixingError(), rows, FLOAT)


def moving(y: Tensor, share: float) -> Rounded:
    return Rounded(y, lambda r: share * r, lambda r, e: torch.zeros_like(r))


def largest(one: Core, score: Score, gain_H: Tensor, r: float, tau: float) -> Tensor:
    """Return the largest change of P~ v that ascent finds for scores off by tau, within r."""
    clean = [rows.y for rows in one.rows]
    radii = [float(rows.radius(torch.tensor(r))) for rows in one.rows]

    def change(u: Tensor) -> Tensor:
        parts = u[:, : 3 * N * H * WIDTH].view(-1, 3, *SHAPE[1:])
        parts = parts / (1 + parts.flatten(2).norm(dim=2).view(-1, 3, 1, 1, 1, 1))
        far = [most * part for most, part in zip(radii, parts.unbind(1), strict=True)]
        q, k, v = (y + moved for y, moved in zip(clean, far, strict=True))
        s = score.s * (q @ k.mT - score.kappa / 2 * k.square().sum(-1).unsqueeze(-2))
        off = tau * torch.tanh(u[:, 3 * N * H * WIDTH :].view(-1, 1, H, N, N))
        turned = ((s + off).softmax(-1) - s.softmax(-1)) @ v
        return (gain_H[:, None, None] * turned).flatten(1).norm(dim=1)

    return ascend(change, torch.zeros(1, 3 * N * H * WIDTH + H * N * N).double(), torch.tensor([40.0]).double(), 200, 8)


@pytest.mark.parametrize("gains", GAINS)
@pytest.mark.parametrize("kappa", [0.0, 1.0])
def test_errors_of_scores_turn_rows_by_no_more(gains: str, kappa: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows keep their sum, so that only differences between values count; at r = 0 the bound is within three times."""
    score = Score(s=0.3, kappa=kappa)
    for r, tau, radii in ((0.0, 0.1, (1.0, 1.0, 1.0)), (0.6, 0.4, (1.0, 1.0, 1.0)), (1.0, 0.02, (0.1, 2.0, 0.5))):
        one = core(score, GAINS[gains], radii)
        monkeypatch.setattr(Core, "tau", lambda self, r, e, tau=tau: torch.full_like(r, tau))
        bound = one.turned(torch.tensor([r]).double(), torch.zeros(1).double())
        found = largest(one, score, GAINS[gains], r, tau)
        assert found <= bound
        assert r or bound <= 3 * found


@pytest.mark.parametrize("kappa", [0.0, 1.0])
def test_the_sum_of_squares_moves_by_no_more_than_its_bound(kappa: float) -> None:
    score = Score(s=0.3, kappa=kappa)
    one = core(score, GAINS["content"], (1.0, 1.0, 1.0))
    q, k, v = (rows.y for rows in one.rows)
    length2, known = v.square().sum(-1), one.squares

    def beyond(u: Tensor) -> Tensor:
        d_q, d_k = u.view(-1, 2, *SHAPE[1:]).unbind(1)
        size = torch.stack([d.flatten(1).norm(dim=1) for d in (d_q, d_k)]).amax(0)
        keys = k + d_k
        s = score.s * ((q + d_q) @ keys.mT - kappa / 2 * keys.square().sum(-1).unsqueeze(-2))
        found = (s.softmax(-1).sum(-2) * length2).flatten(1).sum(1)
        return found / (known.clean + known.steep * one.shift(size))

    for r in (0.05, 0.5, 3.0):
        assert ascend(beyond, torch.zeros(1, 2 * N * H * WIDTH).double(), torch.tensor([r]).double(), 100, 8) <= 1
    assert isinstance(known, SquareSum)


def off_served(module: LipschitzNormAttention, x: Tensor, reach: float) -> Tensor:
    """Return the largest error of the float32 module at float32 points within `reach` of x: a number."""
    served, size, errors = copy.deepcopy(module).float(), x.numel(), []
    torch.manual_seed(0)
    for h in torch.randn(200, *x.shape):
        point = (x + (reach / size**0.5) * h / h.abs().amax()).float()
        errors.append((module(point.double()) - served(point).double()).norm())
    return torch.stack(errors).amax()


def lipschitz_norm(q: Tensor, k: Tensor, v: Tensor, out: float) -> LipschitzNormAttention:
    """Return a module of one head with these weights (4, 4) of float32."""
    module = LipschitzNormAttention(4, 1)
    with torch.no_grad():
        module.qkv.weight.copy_(torch.cat([q, k, v]))
        module.qkv.bias.zero_()
        module.proj.weight.copy_(out * torch.eye(4))
        module.proj.bias.zero_()
    return module.double()


@pytest.mark.parametrize("r", [0.01, 0.05, 0.15, 0.3, 2.0])
@torch.no_grad()
def test_a_divisor_that_may_vanish_bounds_no_error(r: float) -> None:
    """In the largest balls, two of the three norms of q, k and v may vanish together."""
    large, small = torch.zeros(4, 4), torch.zeros(4, 4)
    large[0], large[1] = torch.tensor([1e4, 0.0, 0.0, -1e4]), torch.tensor([9999.0, 0.0, 0.0, -9999.0])
    small[0, 1] = 20.0
    values = torch.zeros(4, 4)
    values[0, 2] = 1.0
    module = lipschitz_norm(large, small, values, 1.0)
    x = torch.tensor([[[1.0001, 0.05, 1.0, 1.0], [0.9999, -0.05, -1.0, 1.0]]]).double()
    (rounding,) = roundings_of(module, FLOAT)
    found = rounding(x).error(torch.tensor([r]).double(), torch.zeros(1).double())
    assert off_served(module, x, min(r, 1e-4)) <= found


@pytest.mark.parametrize("size", [1e-17, 1e-19, 1e-20, 1e-21])
@torch.no_grad()
def test_squares_that_underflow_are_counted(size: float) -> None:
    large, small, values = torch.zeros(4, 4), torch.zeros(4, 4), torch.zeros(4, 4)
    large[0, 0], small[0, 1], values[0, 2] = 1e16, size, 1e-3 * size
    module = lipschitz_norm(large, small, values, 1 / size)
    x = torch.tensor([[[1.0, 1.0, 1.0, 1.0], [1.0, -1.0, -1.0, 1.0]]]).double()
    (rounding,) = roundings_of(module, FLOAT)
    found = rounding(x).error(torch.tensor([1e-3]).double(), torch.zeros(1).double())
    assert off_served(module, x, 0.0) <= found
