"""The cost of computed queries, keys, values and scores: X of zoo/attention/theory/score_errors.py under direct ascent.

The exact core has q, k, v and scores S; the rules see others, off by known amounts. The bounds of the errors themselves
are tested too. Letters: as in tests/tools/attention_cores.py.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from certify import certified_radius
from tests.tools.ascent import ascend
from tests.tools.attention_cases import random_
from tests.tools.attention_cores import SCORES, B, Case, H, N, W, X, case_of, share_of_gradient, share_of_rest
from tests.tools.cases import mostly_slow
from tests.tools.grid_models import IMAGES, plain
from zoo.attention.dot_product import DotProductAttention
from zoo.attention.gpsa import GPSA
from zoo.attention.l2 import L2Attention
from zoo.attention.lipschitz_norm import LipschitzNormAttention
from zoo.attention.scsa import ScaledCosineAttention
from zoo.attention.softmax.computed import scores
from zoo.attention.softmax.parts import core_leaf
from zoo.attention.softmax.qkv import AttentionBounds
from zoo.attention.theory.core import QKVRadii, Score
from zoo.attention.theory.score_errors import Errors, Inexact
from zoo.attention.theory.separate import SeparateCore
from zoo.attention.theory.squares import QKV, at_tokens
from zoo.attention.window import WindowAttention
from zoo.bounds.curvature import expansion_of

SIZES = (1e-6, 0.03, 0.5)


@dataclass(frozen=True)
class Pair:
    """The computed core, and the difference of the exact core's movement."""

    case: Case
    inexact: Inexact
    exact: SeparateCore

    def apart(self, eta: Tensor) -> Tensor:
        """Return X(eta) (many B, H, N, W)."""
        return self._moved(self.exact, eta) - self._moved(self.case.core, eta)

    def _moved(self, core: SeparateCore, eta: Tensor) -> Tensor:
        """Return the change of a core, with Q and J of its own q, k, v, P and M."""
        many, score = len(eta) // B, core.score
        q, k, v = eta.view(many, B, 3, H, N, W).unbind(2)
        delta = core.q @ k.mT + q @ core.k.mT - score.kappa * (core.k * k).sum(-1).unsqueeze(-2)
        delta = score.s * delta + scores(score, q, k)
        change = (core.p.log() + delta).softmax(-1) - core.p
        return (core.mixed @ v + change @ (core.values + core.gain_H[:, None, None] * v)).flatten(0, 1)


def pair_of(score: Score, size: float, seed: int = 0) -> Pair:
    """Return a pair whose values are off by about `size`, and by less in some cores."""
    case, generator = case_of(score, seed), torch.Generator().manual_seed(seed + 1)
    core = case.core
    scale = size * 10 ** torch.linspace(-2, 0, B, dtype=torch.float64).view(-1, 1, 1, 1)

    def off(like: Tensor) -> Tensor:
        return scale * (2 * torch.rand(like.shape, generator=generator, dtype=torch.float64) - 1)

    e_q, e_k, e_v, e_s, e_m = (off(z) for z in (core.q, core.k, core.q, core.p, core.p))
    if score.tied:
        e_k = e_q
    p = (core.p.log() + e_s).softmax(-1)
    v = core.values / core.gain_H[:, None, None]
    mixed = core.mixed + core.gain_H[:, None, None] * (p - core.p) + e_m
    exact = SeparateCore(score, core.q + e_q, core.k + e_k, v + e_v, p, mixed, core.gain_H)
    errors = Errors((e_s.abs() + e_m.abs()).flatten(1).amax(1), *(e.flatten(1).norm(dim=1) for e in (e_q, e_k, e_v)))
    inexact = Inexact(core, v, errors)
    return Pair(replace(case, leaf=core_leaf(core, v, inexact)), inexact, exact)


def lengths(eta: Tensor) -> QKV:
    return QKV(*(part.norm(dim=-1) for part in eta.unbind(1)))


@pytest.mark.parametrize("size", mostly_slow(SIZES, 0.03))
@pytest.mark.parametrize("score", SCORES)
def test_no_ascent_beats_what_errors_cost(score: str, size: float) -> None:
    """Check the norm for given radii, and the squares within the reaches."""
    for r in (0.01, 1.0, 10.0):
        pair = pair_of(SCORES[score], size)
        forms = pair.case.forms.core
        reach = forms.reach(pair.case.reach(r))
        squares, (more, constant) = pair.inexact.squares(reach), pair.inexact.along(pair.case.g, reach)

        def by_norm(u: Tensor, pair: Pair = pair) -> Tensor:
            eta = pair.case.eta(u)
            radii = QKVRadii(*(part.flatten(1).norm(dim=1) for part in eta.unbind(1)))
            bound = pair.inexact.norm(radii, radii)
            return pair.apart(eta).flatten(1).norm(dim=1) / bound

        def by_squares(u: Tensor, pair: Pair = pair, squares: Any = squares) -> Tensor:
            eta = pair.case.eta(u)
            return pair.apart(eta).flatten(1).square().sum(1) / at_tokens(squares.d, lengths(eta))

        def by_gradient(u: Tensor, pair: Pair = pair, more: Any = more, constant: Tensor = constant) -> Tensor:
            eta = pair.case.eta(u)
            bound = at_tokens(more.d, lengths(eta))[0] + constant[0]
            return -(pair.case.g[0] * pair.apart(eta)).flatten(1).sum(1) / bound

        for share in (by_norm, by_squares, by_gradient):
            found = ascend(share, torch.zeros(B, X).double(), torch.full((B,), r).double(), 30, 1)
            assert (found <= 1 + 1e-9).all(), (share.__name__, r, found)


@pytest.mark.parametrize("score", mostly_slow(SCORES, "dot product"))
def test_forms_of_a_core_whose_scores_are_off_hold_for_the_exact_one(score: str) -> None:
    """They hold with the errors, and fail without them."""
    worst = dict[bool, float]()
    for counted in (True, False):
        pair = pair_of(SCORES[score], 0.5)
        leaf = pair.case.leaf if counted else core_leaf(pair.case.core, pair.inexact.core.values)

        def moved(eta: Tensor, pair: Pair = pair) -> Tensor:
            return pair._moved(pair.exact, eta)

        case = replace(pair.case, leaf=leaf, moved=moved)
        shares = [share(case, r) for share in (share_of_rest, share_of_gradient) for r in (0.03, 1.0)]
        worst[counted] = float(torch.stack(shares).max())
    print(score, worst)
    assert worst[True] <= 1 + 1e-9
    assert worst[False] > 1


# sizes of the errors -----------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[], Any]] = {
    "dot product": lambda: DotProductAttention(12, 2),
    "gated positions": lambda: GPSA(DotProductAttention(12, 2)),
    "window": lambda: WindowAttention(DotProductAttention(12, 2), (2, 2)),
    "L2": lambda: L2Attention(12, 2),
    "L2 with keys": lambda: L2Attention(12, 2, tied=False),
    "SCSA": lambda: ScaledCosineAttention(12, 2),
    "LN": lambda: LipschitzNormAttention(12, 2),
    "window of L2": lambda: WindowAttention(L2Attention(12, 2), (2, 2)),
    "gated SCSA": lambda: GPSA(ScaledCosineAttention(12, 2)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ordinary_attention_is_hardly_off(kind: str) -> None:
    """The cost of errors is far below beta, and above 0."""
    torch.manual_seed(0)
    module = random_(KINDS[kind](), 1.0)
    x, r = torch.randn(3, 4, 12).double(), torch.full((3,), 0.1).double()
    expansion, content = expansion_of(module)(x), getattr(module, "content", module)
    _, off = AttentionBounds(module, content).expand_apart(x)
    assert (off(r) > 0).all()
    assert (off(r) < 1e-6 * expansion.beta(r)).all()


@pytest.mark.parametrize("size", [1.0, 1e6])
@pytest.mark.parametrize("kappa", [0.0, 1.0])
def test_errors_are_above_the_true_ones(kappa: float, size: float) -> None:
    """Compare with float128 arithmetic on the same input."""
    torch.manual_seed(0)
    module: Any = random_(L2Attention(12, 2) if kappa else DotProductAttention(12, 2), 1.0)
    x = size * torch.randn(3, 4, 12).double()
    bounds = AttentionBounds(module, module)
    transform = bounds.split.transform(bounds.split.project(x))
    core = bounds.core(transform)
    errors = bounds.inexact(x, core, transform).errors
    long: Any = np.longdouble
    weights = bounds.split.w_3HOD[:2].numpy().astype(long)
    q, k = np.einsum("bnd,xhod->xbhno", x.numpy().astype(long), weights)
    if not kappa:
        bias = module.qkv.bias.view(3, 2, 1, 6).numpy().astype(long)
        q, k = q + bias[0], k + bias[1]
    exact = long(bounds.split.score.s) * (q @ np.swapaxes(k, -1, -2) - kappa / 2 * (k * k).sum(-1)[..., None, :])
    computed = scores(bounds.split.score, core.q, core.k).numpy().astype(long)
    off = np.abs(computed - exact).reshape(3, -1).max(1)
    assert (off <= errors.scores.numpy()).all()
    assert (np.abs(core.q.numpy() - q).reshape(3, -1).max(1) <= errors.q.numpy()).all()
    assert (np.abs(core.k.numpy() - k).reshape(3, -1).max(1) <= errors.k.numpy()).all()


# a whole model --------------------------------------------------------------------------------------------------------


def biased(offset: float) -> tuple[Any, Any]:
    """Return a model, and the same function with large constants in one entry of all queries and keys."""
    truth = plain()
    truth.blocks[0].attn.qkv.weight.data[:32] *= 6
    for row in (0, 16):
        truth.blocks[0].attn.qkv.weight.data[row] = 0
        truth.blocks[0].attn.qkv.bias.data[row] = 0
    other = copy.deepcopy(truth)
    other.blocks[0].attn.qkv.bias.data[0] = offset
    other.blocks[0].attn.qkv.bias.data[16] = 1.5 * offset
    return truth, other


@pytest.mark.hostile
@pytest.mark.parametrize("method", mostly_slow(("adjoint", "image", "best"), "adjoint"))
@pytest.mark.parametrize("offset", [2.0**20, 2.0**24, 2.0**27])
def test_constants_that_no_softmax_sees_enlarge_no_radius(offset: float, method: str) -> None:
    truth, other = biased(offset)
    x = IMAGES[:6]
    with torch.no_grad():
        y = truth(x).argmax(-1)
    radii = [certified_radius(model, x, y, method=method, nonce="n") for model in (truth, other)]
    assert (radii[0] > 0).all()
    assert (radii[1] <= radii[0] * (1 - 1e-3)).all()
    if offset > 2.0**26:
        assert (radii[1] == 0).all()
