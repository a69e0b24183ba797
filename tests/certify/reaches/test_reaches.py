"""Reaches of a linear part, higher orders and a rest: against ascent, and their parts against dense matrices."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from certify.ellipsoids.ellipsoid import Before
from certify.reaches import triples
from certify.reaches.forms import kappa, smooth_leaves
from certify.reaches.reaches import CloserEllipsoids
from certify.taylor.cross import crossed
from certify.taylor.curved import signed_form, units_of
from certify.taylor.rivals import Rival
from certify.taylor.taylor import TaylorStage
from tests.tools.ascent import ascend
from tests.tools.cases import mostly_slow
from tests.tools.image_stages import dense
from tests.tools.taylor_stages import analysed, stage_of, taylor_of
from zoo.bounds.activations import Smooth
from zoo.bounds.contracts import QuadraticForm
from zoo.bounds.elementwise import UnitForms
from zoo.bounds.tape import Vectors

MORE = 1 + 1e-9


def deep(seed: int, scale: float) -> tuple[nn.Sequential, Tensor, Tensor]:
    """Return a network of three layers of GELU units on 12 pixels, and two images of it."""
    torch.manual_seed(seed)
    layers = [layer for width in (10, 9, 8) for layer in (nn.LazyLinear(width), nn.GELU())]
    net = nn.Sequential(nn.Flatten(), *layers, nn.LazyLinear(3)).double().eval()
    x = torch.rand(2, 1, 3, 4, dtype=torch.float64)
    with torch.no_grad():
        net(x)
        for p in net.parameters():
            p.copy_(torch.randn_like(p) * (scale / p.shape[1] ** 0.5 if p.ndim > 1 else 1.0))
        return net, x, net(x).argmax(-1)


def ellipsoids_of(stage: TaylorStage) -> CloserEllipsoids:
    assert isinstance(stage.ellipsoids, CloserEllipsoids)
    return stage.ellipsoids


def exceeded(seed: int, scale: float, e: float) -> bool:
    """Check if an image moves units beyond their reach, or off their third order by more than `third`."""
    net, x, y = deep(seed, scale)
    found = ellipsoids_of(stage_of(analysed(net, x, y), e))
    beyond = []
    for share in (1.0, 0.4):
        e_B, known, third = share * found.most_B, Vectors(), Vectors()

        def theta(at: int, before: Before, known: Vectors = known, third: Vectors = third) -> Tensor:
            known[at] = found._reach(at, before)
            theta_B = found._theta(at, before)
            third.update(before.third)
            return theta_B

        found._grow(e_B, theta)
        assert third
        for number, (at, forms) in enumerate(smooth_leaves(found.tape).items()):
            move = moves(net, x, 2 + 2 * number)

            def far(z: Tensor, move: Callable[[Tensor], Tensor] = move, reach: Tensor = known[at]) -> Tensor:
                return (move(z).abs() / reach.flatten(1).repeat(len(z) // len(x), 1)).amax(1)

            def off(
                z: Tensor, move: Callable[[Tensor], Tensor] = move, at: int = at, forms: UnitForms = forms
            ) -> Tensor:
                return third_of(found, forms, at, z, x, move(z))

            beyond.append(bool((ascend(far, x, e_B, 60, 6) > MORE).any()))
            if at in third:
                beyond.append(bool((ascend(off, x, e_B, 60, 6) > third[at] * MORE + 1e-20).any()))
    return any(beyond)


def moves(net: nn.Sequential, x: Tensor, layers: int) -> Callable[[Tensor], Tensor]:
    """Return the change of what the first layers compute."""
    return lambda z: net[:layers](z) - net[:layers](x).repeat(len(z) // len(x), 1)


def third_of(found: CloserEllipsoids, forms: UnitForms, at: int, z: Tensor, x: Tensor, d: Tensor) -> Tensor:
    """Return |t / W|^2 of a leaf for images z: what its remainders have beyond their third order."""
    many, linear = len(z) // len(x), Vectors()
    found.tape.push(z.view(many, *x.shape) - x, lambda k, v: linear.update({k: v}), at)
    clean, d = forms.z_BNH.flatten(1), d.view(many, len(x), -1)
    slope, second = forms.activation.slope(clean), forms.activation.second(clean)  # type: ignore[attr-defined]
    gelu = nn.functional.gelu
    r = gelu(clean + d) - gelu(clean) - slope * d
    third, first = forms.activation.third(clean), forms.units(linear[at]).flatten(2)  # type: ignore[attr-defined]
    t = r - second * first.square() / 2 - third * first**3 / 6
    return (t / found.joint.weights[at].flatten(1)).square().sum(-1).flatten()


SIZES = [(0, 0.8, 0.3), (1, 2.0, 0.1), (2, 0.5, 1.5)]


@pytest.mark.parametrize(
    "case",
    [
        *SIZES,
        *(pytest.param((k, s, e), marks=pytest.mark.slow) for k in range(3, 23) for s, e in ((0.7, 0.7), (2.5, 0.15))),
    ],
)
def test_ascent_moves_no_unit_beyond_its_reach(case: tuple[int, float, float]) -> None:
    assert not exceeded(*case)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "pairs too short": lambda patch: patch.setattr(triples, "least_square_sum", lambda *_: 1e4),
    "third order forgotten": lambda patch: patch.setattr(
        CloserEllipsoids, "_third", lambda self, at, known: 1e-6 * known.total_B
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen_by_ascent(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    assert exceeded(0, 1.5, 0.4)


@pytest.mark.parametrize("parts", mostly_slow(("standard", "stem", "smooth"), "stem"))
def test_both_orders_are_those_of_dense_maps(parts: str) -> None:
    """They are never below the exact ones, for functionals of every kind of leaf, and not far above."""
    found, moved, squares = moved_by_pixels(parts)
    orders = found._orders
    assert orders is not None
    for at, square in squares.items():
        close(orders.first[at], square.sqrt(), 1.5)
    total = Vectors()
    for pixel in range(len(moved[min(moved)])):
        push(found, total, {at: derivative(found, at, 2) * d * d[pixel] for at, d in moved.items()}, 1.0)
    for at, square in total.items():
        close(orders.second[at], 0.5 * square.sqrt(), 3.0)
    assert max(float(square.max()) for square in total.values()) > 0


@pytest.mark.slow
def test_the_third_order_is_that_of_dense_maps() -> None:
    found, moved, _ = moved_by_pixels("stem")
    orders, total = found._orders, Vectors()
    assert orders is not None
    for one in range(len(moved[min(moved)])):
        for other in range(one + 1):
            sources = {at: derivative(found, at, 3) * d * d[one] * d[other] for at, d in moved.items()}
            push(found, total, sources, 1.0 if one == other else 2.0)
    for at, square in total.items():
        close(orders.third[at], square.sqrt() / 6, 5.0)
    assert max(float(square.max()) for square in total.values()) > 0


def moved_by_pixels(parts: str) -> tuple[CloserEllipsoids, Vectors, Vectors]:
    """Return what unit vectors of the image do to units, and the squares of all functionals."""
    _, analysis = taylor_of(parts, count=1)
    found = ellipsoids_of(stage_of(analysis, 0.2))
    assert found._orders is not None
    units, last, size = smooth_leaves(found.tape), max(found._orders.first), analysis.images[0].numel()
    eye, moved, squares = torch.eye(found.joint.room(last), dtype=torch.float64)[:size, None], Vectors(), Vectors()

    def visit(at: int, v: Tensor) -> None:
        if at in units:
            moved[at] = units[at].units(v)
        if at in found.formed:
            squares[at] = found.formed[at].squares(v)

    found.joint.push(eye, visit, last)
    return found, moved, squares


def derivative(found: CloserEllipsoids, at: int, order: int) -> Tensor:
    forms = smooth_leaves(found.tape)[at]
    assert isinstance(forms.activation, Smooth)
    return (forms.activation.second if order == 2 else forms.activation.third)(forms.z_BNH)


def push(found: CloserEllipsoids, total: Vectors, sources: Vectors, times: float) -> None:
    """Add the squares of all functionals of what these remainders do, that many times."""

    def bent(at: int, v: Tensor) -> Tensor | None:
        if at in found.formed:
            total[at] = total.get(at, 0.0) + times * found.formed[at].squares(v)
        return found.tape.spread(sources[at], at) if at in sources else None

    count = len(sources[min(sources)])
    found.tape.push(torch.zeros(count, *found.joint.images.shape, dtype=torch.float64), bent, max(found.formed))


def close(bound: Tensor, exact: Tensor, times: float) -> None:
    finite = torch.isfinite(exact)
    assert (bound >= exact * (1 - 1e-9))[finite].all()
    assert (bound <= times * exact + 1e-6 * exact[finite].max() + 1e-100)[finite].all()


@pytest.mark.parametrize("parts", mostly_slow(("standard", "stem", "smooth"), "stem"))
def test_ascent_finds_no_larger_product_than_its_form(parts: str) -> None:
    """Maximise the sum of <A G, C J r>, less that of x d^2 / 2, over G, d and the signs of r."""
    _, analysis = taylor_of(parts, count=1)
    stage = stage_of(analysis, 0.2)
    found, formed = ellipsoids_of(stage), stage._formed_of(stage.here.rivals_BR[:, :1].mT)
    g = stage.here.gradients(formed.class_CB).leaves
    units = units_of(found, formed.margins, g)
    others = {at: signed_form(found, at, g[at]) for at in formed.margins.forms if at not in units}
    (x,), last = crossed(found, [units], [others], torch.zeros_like(formed.first)), max(units.keys() | others.keys())
    signed = {at: of_leaf.with_more() for at, of_leaf in units.items()} | others
    maps, size = dense(found.joint, last), analysis.images[0].numel()
    for k, bound in x.items():
        reach = found.rests[k].reach
        assert reach is not None
        y = sum((between(found, form, at, maps, k) for at, form in signed.items() if at > k), torch.zeros(()))
        weight = kappa(units[k].forms, reach).flatten()[:, None]

        def excess(g: Tensor, y: Tensor = y, weight: Tensor = weight, bound: Tensor = bound) -> Tensor:
            return (weight * (y @ g.T).abs() / bound.flatten()[:, None]).amax(0)

        assert ascend(excess, torch.zeros(1, size).double(), torch.ones(1).double(), 60, 8) <= MORE
        exact = weight[:, 0] * y.norm(dim=1)
        assert (bound.flatten() >= exact * (1 - 1e-9)).all()
        assert (bound.flatten() <= 2 * exact + 1e-9 * exact.max()).all()
    assert x


def between(found: CloserEllipsoids, form: QuadraticForm, at: int, maps: Vectors, k: int) -> Tensor:
    """Return E Y of the units of leaf k, for the form C of leaf `at` alone."""
    columns, size = columns_of(found, maps, at), found.joint.images[0].numel()
    part = found.joint.part(k, max(maps)).bool()
    pulled = form.apply(columns[:size]).flatten(1)
    return columns[part].flatten(1) @ pulled.mT / found.joint.weights[k].flatten()[:, None]


@pytest.mark.parametrize("parts", mostly_slow(("standard", "stem", "smooth"), "stem"))
def test_what_orders_of_units_do_to_forms_is_at_least_the_dense_norm(parts: str) -> None:
    """It is close to the norm of all <K_a, K_a'> of the rows a of C^(1/2), and ascent on images stays below it."""
    _, analysis = taylor_of(parts, count=1)
    stage = stage_of(analysis, 0.2)
    found, (rival,) = ellipsoids_of(stage), Rival.of(stage.here, stage.ellipsoids, stage.here.rivals_BR[:, :1].mT)
    forms = {at: rival.margins.forms[at] for at in rival.curved.others}
    bound = found.through(forms, rival.margins.norm.square())
    last, size = max(forms), analysis.images[0].numel()
    maps, units = dense(found.joint, last), {k: one for k, one in smooth_leaves(found.tape).items() if k < last}
    moved_UX = torch.cat([one.units(columns_of(found, maps, k)[:size]).flatten(1).mT for k, one in units.items()])
    for order, most in ((2, bound.second), (3, bound.third)):
        gram_UU = sum((through_units(found, forms, maps, units, at, order) for at in forms), torch.zeros(()))
        root_UU = torch.linalg.cholesky(gram_UU + 1e-14 * gram_UU.trace() * torch.eye(len(gram_UU)))
        inner_UU = root_UU.mT @ (moved_UX @ moved_UX.mT) ** order @ root_UU
        exact = torch.linalg.eigvalsh(inner_UU)[-1].sqrt()
        assert exact * (1 - 1e-6) <= most[0, 0] <= 4 * exact

        def norm(g: Tensor, order: int = order, root_UU: Tensor = root_UU) -> Tensor:
            return torch.linalg.vector_norm((g @ moved_UX.mT) ** order @ root_UU, dim=1)

        assert ascend(norm, torch.zeros(1, size).double(), torch.ones(1).double(), 60, 8) <= MORE * most[0, 0]


def columns_of(found: CloserEllipsoids, maps: Vectors, at: int) -> Tensor:
    """Return the columns of M of a leaf, (n, 1, *x)."""
    leaf = found.tape.leaves[at]
    return maps[at][0].mT.unflatten(-1, leaf.pull(leaf.y[None])[0].shape[1:])[:, None]


def through_units(
    found: CloserEllipsoids,
    forms: Mapping[int, QuadraticForm],
    maps: Vectors,
    units: Mapping[int, UnitForms],
    at: int,
    order: int,
) -> Tensor:
    """Return S J^T C J S of one leaf, S the coefficients of one order of all units, and J what these do to the leaf."""
    columns, rows = columns_of(found, maps, at), []
    for k in units:
        share = derivative(found, k, order) / (2 if order == 2 else 6) / found.joint.weights[k]
        rows.append(columns[found.joint.part(k, max(maps)).bool()].flatten(1) * share.flatten()[:, None])
    moved = torch.cat(rows)
    return moved @ forms[at].apply(moved.unflatten(-1, columns.shape[2:])[:, None]).flatten(1).mT
