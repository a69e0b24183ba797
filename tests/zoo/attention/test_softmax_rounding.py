"""The rounding of softmax attention: what errors of scores do to rows, against ascent on errors and on the ball."""

import pytest
import torch
from torch import Tensor

from tests.tools.ascent import ascend
from zoo.attention.softmax.qkv import Mixing, MixingError
from zoo.attention.softmax.rounding import Core, SquareSum
from zoo.attention.softmax.rows import Rows
from zoo.attention.theory.core import Score
from zoo.bounds.contracts import Rounded
from zoo.bounds.rounding import PRECISIONS

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
