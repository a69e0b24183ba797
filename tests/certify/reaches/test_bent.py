"""The second order of attention's core in later leaves: against ascent on images, and against dense maps."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from certify.ellipsoids import samples
from certify.ellipsoids.ellipsoid import Ellipsoids
from certify.ellipsoids.joint import NOISE
from certify.reaches.aside import aside
from certify.reaches.forms import smooth_leaves, units_at
from certify.reaches.pairs import Bent
from certify.taylor.rivals import Rival
from tests.tools.ascent import ascend
from tests.tools.image_stages import dense
from tests.tools.small_models import AVG, SMALL
from tests.tools.taylor_stages import analysed, exact_losses, fall, stage_of, taylor_of
from zoo.attention.softmax.parts import CoreLeafForms
from zoo.bounds.elementwise import UnitForms
from zoo.bounds.tape import Vectors

MORE = 1 + 1e-9


def attentive(seed: int, scale: float) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model of two blocks whose attention counts for more and more as `scale` grows, and two images."""
    torch.manual_seed(seed)
    options = SMALL | AVG | {"norm": "centernorm", "mlp": "gelu", "block": "prenorm"}
    model: Any = zoo.create_model("dp_vit_ti", **options).double().eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[: 2 * block.attn.qkv.weight.shape[1]] *= scale
            block.attn.proj.weight *= 10 * scale
        x = torch.rand(2, 1, 8, 8, dtype=torch.float64)
        return model, x, model(x).argmax(-1)


def exceeded(seed: int, scale: float, e: float) -> bool:
    """Check if an image moves units of an MLP beyond their reach."""
    model, x, y = attentive(seed, scale)
    found = stage_of(analysed(model, x, y), e).ellipsoids
    assert found.bent.leaves
    units = [at for at in found.tape.nonlinear if isinstance(found.tape.leaves[at].forms, UnitForms)]
    beyond = []
    for share in (1.0, 0.5):
        e_B, known = share * found.most_B, Vectors()

        def theta(at: int, before: Any, known: Vectors = known) -> Tensor:
            known[at] = found._reach(at, before)
            return found._theta(at, before)

        found._grow(e_B, theta)
        for number, at in enumerate(units):
            move = moves(model, x, number)

            def far(z: Tensor, move: Callable[[Tensor], Tensor] = move, reach: Tensor = known[at]) -> Tensor:
                return (move(z).abs() / reach.repeat(len(z) // len(x), 1, 1)).flatten(1).amax(1)

            beyond.append(bool((ascend(far, x, e_B, 60, 6) > MORE).any()))
    return any(beyond)


def moves(model: Any, x: Tensor, number: int) -> Callable[[Tensor], Tensor]:
    """Return the change of the units of one block: (many B, N, H)."""

    def units(z: Tensor) -> Tensor:
        seen: list[Tensor] = []
        hook = model.blocks[number].mlp.fc1.register_forward_hook(lambda *call: seen.append(call[2]))
        try:
            model(z)
        finally:
            hook.remove()
        return seen[0]

    return lambda z: units(z) - units(x).repeat(len(z) // len(x), 1, 1)


@pytest.mark.parametrize(
    "case",
    [
        (0, 2.0, 0.3),
        *(
            pytest.param((k, s, e), marks=pytest.mark.slow)
            for k in range(1, 13)
            for s, e in ((1.0, 1.0), (4.0, 0.3), (20.0, 0.1))
        ),
    ],
)
def test_ascent_moves_no_unit_beyond_its_reach(case: tuple[int, float, float]) -> None:
    assert not exceeded(*case)


def test_ascent_finds_no_image_that_loses_more() -> None:
    model, x, y = attentive(0, 4.0)
    assert not beaten(model, x[:1], y[:1], 0.3, (1.0,))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 13))
@pytest.mark.parametrize(("scale", "e"), [(1.0, 1.0), (4.0, 0.3), (10.0, 0.1), (20.0, 0.05)])
def test_models_of_many_scales_lose_no_more(seed: int, scale: float, e: float) -> None:
    assert not beaten(*attentive(seed, scale), e, (1.0, 0.5))


def beaten(model: nn.Module, x: Tensor, y: Tensor, e: float, shares: tuple[float, ...]) -> bool:
    """Check if an image loses more of a margin than the bound, where the second order of attention counts."""
    stage, more = stage_of(analysed(model, x, y), e), False
    assert stage.ellipsoids._counts_B.all()
    for share in shares:
        e_B = share * stage.most_B
        loss_BJ = exact_losses(stage, e_B)
        for rival_B in stage.here.rivals_BR.mT:
            bound_B = loss_BJ.gather(1, rival_B[:, None])[:, 0]
            more = more or bool((fall(model, x, y, rival_B, e_B) > bound_B * MORE).any())
    return more


def forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Bent, "theta", lambda self, at, grown: 0 * grown.before[self.leaves[0]])
    patch.setattr(CoreLeafForms, "shrink_third", lambda self, share: 0 * share)


def test_a_planted_fault_is_seen_by_ascent(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten(monkeypatch)
    assert exceeded(0, 20.0, 2.0)


def test_rows_have_the_norms_of_dense_maps() -> None:
    _, analysis = taylor_of("standard", count=1)
    found = stage_of(analysis, 0.1).ellipsoids
    maps = dense(found.joint, max(found.hessians))
    for at, hessian in found.hessians.items():
        leaf = found.tape.leaves[at]
        columns = maps[at].permute(2, 0, 1).unflatten(-1, leaf.pull(leaf.y[None])[0].shape[1:])
        exact, bound = torch.linalg.matrix_norm(hessian.rows(columns).movedim(0, -1), 2), found.bent.rows[at]
        assert (exact * (1 - 1e-9) <= bound).all()
        assert (bound <= 1.6 * exact).all()


def test_no_error_and_no_third_order_move_units_further_than_is_said() -> None:
    """Sources along the top singular vectors of dense maps reach a good part of the bound, but never all of it."""
    model, x, y = attentive(0, 4.0)
    found = stage_of(analysed(model, x[:1], y[:1]), 0.1).ellipsoids
    last = max(found.formed)
    coefficients = {last: torch.rand_like(found.lengths_of[last])[None]}
    bound, joint = aside(found, coefficients, "test", found.most_B[:, None]), found.joint
    root = coefficients[last].flatten(2).mT[0].sqrt()
    leaf, columns = found.tape.leaves[last], dense(joint, last)[last].permute(2, 0, 1)
    moved = columns.unflatten(-1, leaf.pull(leaf.y[None])[0].shape[1:])
    units = root * units_at(found.tape, last).units(moved)[:, 0].flatten(1).T
    errors = units * joint.part(NOISE, last)
    of_leaves = units * torch.stack([joint.part(k, last) for k in bound.leaves]).amax(0)
    for of_errors, of_others in ((1e-8, 0.1), (1e-3, 0.1), (0.1, 0.1), (0.1, 1e-8)):
        grown = replace(
            found.most,
            theta_0={last: of_errors * found.most_B},
            third={},
            theta={k: of_others / len(bound.leaves) * found.most_B for k in bound.leaves},
        )
        free = bound.at(grown)
        sizes = (of_errors * found.most_B).sqrt(), (of_others * found.most_B).sqrt()
        parts = [size * matrix for size, matrix in zip(sizes, (errors, of_leaves), strict=True)]
        least = max(float(torch.linalg.matrix_norm(part, 2)) for part in parts)
        most = sum(float(torch.linalg.matrix_norm(part, 2)) for part in parts)
        together = torch.linalg.vector_norm(sum(part @ torch.linalg.svd(part)[2][0] for part in parts))
        assert together <= free * MORE
        assert least <= free * MORE
        assert free <= 1.3 * most


@pytest.mark.slow
def test_second_orders_are_those_of_dense_maps() -> None:
    """All bounds are never below the exact ones, and not far above.

    With L L^T = M M^T, |M^T T M|_F = |L^T T L|_F, and so for all sums over pairs of vectors u.
    """
    _, analysis = taylor_of("standard", count=1)
    stage = stage_of(analysis, 0.1)
    found = stage.ellipsoids
    hessians, formed, total = found.hessians, found.formed, Vectors()
    units = {at: forms for at, forms in smooth_leaves(found.tape).items() if at > min(hessians)}
    c = {at: torch.rand_like(found.lengths_of[at])[None] for at in units}
    (rival,) = Rival.of(stage.here, found, stage.here.rivals_BR[:, :1].mT)
    curved, joint, size = rival.curved.units, found.joint, analysis.images[0].numel()
    last, grams = max(units), dict.fromkeys(("together", "image", "leaf"), torch.zeros(()).double())
    maps = dense(joint, max(hessians))
    whole = torch.cat([maps[at][0] for at in hessians])
    values, vectors = torch.linalg.eigh(whole @ whole.mT)
    columns = (vectors * values.clamp_min(0).sqrt()).mT.split([len(maps[at][0]) for at in hessians], 1)
    entering = {at: found.tape.leaves[at].pull(found.tape.leaves[at].y[None])[0].shape[1:] for at in hessians}
    moved = {at: column.unflatten(1, entering[at])[:, None] for at, column in zip(hessians, columns, strict=True)}

    def add(name: str, of_pairs: Tensor) -> None:
        flat = of_pairs.flatten(1)
        grams[name] = grams[name] + flat.mT @ flat

    for one in range(len(vectors)):
        d = Vectors()

        def bent(at: int, v: Tensor, one: int = one, d: Vectors = d) -> Tensor | None:
            if at in formed and at > min(hessians):
                total[at] = total.get(at, 0.0) + formed[at].squares(v)
            if at in units:
                d[at] = units[at].units(v)
            if at not in hessians:
                return None
            r = hessians[at].bilinear(moved[at], moved[at][one : one + 1])
            if at == min(hessians):
                add("leaf", r / joint.weights[at])
            return r

        found.tape.push(torch.zeros(len(vectors), *analysis.images.shape, dtype=torch.float64), bent, max(formed))
        add("together", torch.cat([(d[at] * c[at].sqrt()).flatten(1) for at in units], 1))
        add("image", joint.pull({at: curved[at].pulled(d[at]) for at in units}, last)[..., :size])
    assert found.bent.halves.keys() == total.keys()
    for at, square in total.items():
        exact, bound = 0.5 * square.sqrt(), found.bent.halves[at]
        assert (bound >= exact * (1 - 1e-9)).all()
        assert (bound <= 4 * exact + 1e-6 * exact.max()).all()
    pairs, within = found._pairs("test", found.most_B[:, None], 2), rival.margins.norm.square()
    own = found._pairs("test", found.most_B[:, None], 2, min(hessians))
    bounds = {
        "together": pairs.together(units, c),
        "image": pairs.with_image(curved, within)[0],
        "leaf": own.of_leaf(),
    }
    for name, of_bound in bounds.items():
        exact = 0.5 * torch.linalg.eigvalsh(grams[name])[-1].sqrt()
        assert exact * (1 - 1e-9) <= of_bound[0] <= 4 * exact, name


def test_weights_are_those_of_the_whole_remainder_where_the_third_order_is_out_of_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With weights for the second order alone, the remainder would take up most of every reach."""
    model, x, y = attentive(0, 16.0)

    def largest_theta() -> float:
        found = stage_of(analysed(model, x, y), 0.3).ellipsoids
        assert all((found.most.third[at] > 1e3).all() for at in found.hessians)
        return max(float(found.most.theta[at].max()) for at in found.hessians)

    assert largest_theta() < 2
    monkeypatch.setattr(samples, "FAR", math.inf)
    assert largest_theta() > 10


def test_a_short_remainder_does_not_take_the_place_of_what_its_orders_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The known orders are those of all leaves together, so that none may be counted without its own."""
    model, x, y = attentive(0, 1.0)
    found = stage_of(analysed(model, x, y), 0.1).ellipsoids
    before = found.at(found.most_B).third
    assert len(before.keys() & found.hessians.keys()) > 1
    assert before.keys() - found.hessians.keys()
    monkeypatch.setattr(Ellipsoids, "_theta", lambda self, at, known: torch.full_like(self.most_B, 1e-30))
    after = found.at(found.most_B).third
    assert all((after[at] > 1e-6 * third).all() for at, third in before.items())
