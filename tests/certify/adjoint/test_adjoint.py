"""The adjoint certificate end to end: never beaten by ascent, exact in first order, monotone, part of the union."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from certify import certified_radius
from certify.adjoint.adjoint import Adjoint, AdjointAnalysis
from certify.adjoint.operator_norms import dense, jacobian, random, unit_vectors
from certify.shared.bake import bake
from tests.tools.ascent import ascend, largest_change
from tests.tools.cases import mostly_slow
from tests.tools.small_models import PARTS, labelled, nodes_up_to_first_block, small_model
from zoo.bounds.curvature import trunk_of
from zoo.bounds.rule_table import NoRule


def analyse(model: Any, x: Tensor, y: Tensor) -> AdjointAnalysis:
    inner = Adjoint(model).analyse(x, y).parts[0][1]
    assert isinstance(inner, AdjointAnalysis)
    return inner


@pytest.mark.parametrize(("seed", "parts"), mostly_slow(product(range(3), PARTS), (2, "standard")))
def test_no_ascent_beats_the_loss_or_the_radii(seed: int, parts: str) -> None:
    """No pair's margin falls by more than its loss, and no node moves by more than its radius."""
    model = small_model(parts, seed)
    x, y = labelled(model, 6, seed)
    analysis = analyse(model, x, y)
    baked: Any = bake(model)
    nodes, _ = trunk_of(baked)
    for eps in (0.01, 0.1, 0.5):
        eps_B = torch.full((6,), eps, dtype=torch.float64)
        loss_BJ, _ = analysis.losses(analysis.radii(eps_B))

        def fall(z: Tensor) -> Tensor:
            """Return minus the smallest margin."""
            logits, labels = baked(z), y.repeat(len(z) // len(y))
            rest = logits.masked_fill(torch.nn.functional.one_hot(labels, 4).bool(), -torch.inf)
            return rest.amax(-1) - logits.gather(1, labels[:, None]).squeeze(1)

        found_B = ascend(fall, x.double(), eps_B, steps=60, starts=3)
        assert (-found_B >= (analysis.clean.margin_BJ - loss_BJ).amin(-1) - 1e-9).all()
        radii = analysis.radii(eps_B)
        first = nodes_up_to_first_block(baked)

        def pooled(z: Tensor) -> Tensor:
            return baked.forward_head(baked.forward_features(z), pre_logits=True)

        for f, k in ((lambda z: baked.blocks[0](baked.embed(z)), first), (pooled, len(nodes))):
            assert (largest_change(f, x.double(), eps_B, steps=40, starts=3) <= radii.e[k] * (1 + 1e-9)).all()


@pytest.mark.parametrize("parts", mostly_slow(PARTS, "standard", "stem"))
def test_first_order_is_exact(parts: str) -> None:
    """As eps -> 0, loss / eps -> ||g_0||, so only the gradient of the margin counts."""
    model = small_model(parts, 1)
    x, y = labelled(model, 5, 0)
    analysis = analyse(model, x, y)
    baked, eps = bake(model), 1e-7
    gradients = []
    for j in range(4):
        z = x.double().requires_grad_()
        logits = baked(z)
        (g,) = torch.autograd.grad((logits.gather(1, y[:, None]).squeeze(1) - logits[:, j]).sum(), z)
        gradients.append(g.flatten(1).norm(dim=1))
    radii = analysis.radii(torch.full((5,), eps, dtype=torch.float64))
    exact_RB = torch.stack(gradients).gather(0, analysis.rivals_BR.mT)
    rivals = analysis.rivals(0, 3)
    torch.testing.assert_close(rivals.lengths[0], exact_RB)
    rounding_RB = (rivals.lengths[1:] * torch.stack(list(radii.off))[:, None]).sum(0)
    tight_RB = rivals.tight(radii, torch.ones_like(exact_RB, dtype=torch.bool))
    assert (tight_RB <= exact_RB * eps * 1.001 + rounding_RB * 1.001).all()
    assert (rounding_RB < 1e-8).all()


@pytest.mark.parametrize("parts", mostly_slow(PARTS, "lofast", "standard"))
def test_cheap_bounds_stand_on_both_sides_of_the_dear_one(parts: str) -> None:
    """For every pair first <= tight <= coarse, in whatever order the pairs are requested."""
    model = small_model(parts, 1)
    x, y = labelled(model, 5, 0)
    analysis = analyse(model, x, y)
    rivals, everyone = analysis.rivals(0, 3), torch.ones(3, 5, dtype=torch.bool)
    for eps in (0.01, 0.1, 1.0):
        radii = analysis.radii(torch.full((5,), eps, dtype=torch.float64))
        tight = rivals.tight(radii, everyone)
        assert (rivals.first(radii).amin(0) <= tight).all()
        assert (tight <= rivals.coarse(radii)).all()
        few = torch.rand(3, 5) < 0.5
        again = analyse(model, x, y).rivals(0, 3)
        for wanted in (few, everyone):
            torch.testing.assert_close(again.tight(radii, wanted), torch.where(wanted, tight, torch.inf))


@pytest.mark.parametrize("parts", mostly_slow(PARTS, "smooth", "standard"))
def test_loss_grows_with_eps_and_infinity_is_unknown(parts: str) -> None:
    model = small_model(parts, 2)
    x, y = labelled(model, 5, 1)
    analysis = analyse(model, x, y)
    grid = [analysis.radii(torch.full((5,), eps, dtype=torch.float64)) for eps in (0.0, 1e-3, 0.01, 0.1, 1.0, 10.0)]
    closest = torch.ones(1, 5, dtype=torch.bool)
    losses = torch.stack([analysis.rivals(0, 1).tight(radii, closest)[0] for radii in grid])
    assert (losses[1:] >= losses[:-1]).all()
    assert analysis.at(0.0).certified_B.all()
    far = analysis.at(1e9)
    assert not far.certified_B.any()
    assert not torch.isnan(far.loss_B).any()


def test_the_jacobian_is_that_of_autograd() -> None:
    model = bake(small_model("standard", 0))
    nodes, _ = trunk_of(model)
    x, _ = labelled(model.float(), 2, 0)
    model.double()
    z = x.double()
    for _, expand in nodes[:3]:
        expansion = expand(z)
        written = jacobian(expansion)
        exact = torch.stack(
            [
                torch.autograd.functional.jacobian(lambda one, e=expand: e(one[None]).y[0].flatten(), z[i]).flatten(1)
                for i in range(2)
            ]
        )
        torch.testing.assert_close(written, exact)
        torch.testing.assert_close(expansion.push(unit_vectors(z)).flatten(2).movedim(0, 2), exact)
        z = expansion.y


@pytest.mark.parametrize("parts", mostly_slow(PARTS, "lofast", "standard"))
def test_norms_without_matrices_are_those_of_the_matrices(parts: str) -> None:
    """Lanczos norms are never below the verified norms of J_k and of the products, and at most 8 % above them.

    This includes the nodes of the first block and the whole trunk.
    """
    model = bake(small_model(parts, 1))
    x, _ = labelled(model.float(), 4, 1)
    model.double()
    expansions, z = [], x.double()
    nodes = trunk_of(model)[0]
    for _, expand in nodes:
        expansions.append(expand(z))
        z = expansions[-1].y

    def trunk(one: Tensor) -> Tensor:
        z = one[None]
        for _, expand in nodes:
            z = expand(z).y
        return z.flatten()

    exact, found = dense(expansions), random(expansions, x.double(), b"")
    assert exact.failure == 0 < found.failure <= 1e-7
    whole = torch.autograd.functional.jacobian(trunk, x[0].double()).flatten(1)
    ratio = float(exact.products[-1][0] / torch.linalg.matrix_norm(whole, 2))
    assert 1 <= ratio < 1.001, "from the image to the pooled token"
    for exact_B, found_B in zip(exact.nodes + exact.products, found.nodes + found.products, strict=True):
        assert (found_B >= exact_B * (1 - 1e-9)).all()
    for node, expansion in enumerate(expansions):
        if node and (expansion.gain_B > 1).all():
            assert (found.products[node] <= exact.products[node] * 1.08).all()


def radii_by(*methods: str) -> list[Tensor]:
    """Return the radii of the same images by each method."""
    model = small_model("smooth", 1)
    x, y = labelled(model, 12, 3)
    return [certified_radius(model, x, y, method=method, nonce="one") for method in methods]


def test_the_adjoint_certificate_is_tighter_than_lofast() -> None:
    lofast, adjoint = radii_by("lofast", "adjoint")
    assert (adjoint > lofast * 1.2).all(), "the adjoint certificate is there to be tighter"


@pytest.mark.slow
def test_best_is_the_strongest() -> None:
    adjoint, image, best = radii_by("adjoint", "image", "best")
    assert torch.equal(best, image)
    assert (image >= adjoint * (1 - 2**-8)).all(), "a search ends at 2^-9"


def test_a_model_without_remainders_is_refused() -> None:
    with pytest.raises(NoRule):
        Adjoint(zoo.create_model("dp_vit_ti", img_size=32, depth=1, mlp={"name": "gelu", "act_layer": nn.LogSigmoid}))


def test_memory_only_decides_how_many_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("smooth", 1)
    x, y = labelled(model, 7, 5)
    y[3] = (y[3] + 1) % 4
    together = Adjoint(model).analyse(x, y)
    monkeypatch.setattr("certify.adjoint.adjoint.BYTES", 1)
    alone = Adjoint(model).analyse(x, y)
    assert [len(together.parts), len(alone.parts)] == [1, 6]
    for eps in (0.01, 0.1):
        for one, other in zip(vars(together.at(eps)).values(), vars(alone.at(eps)).values(), strict=True):
            torch.testing.assert_close(one, other)
    assert not together.at(0.0).certified_B[3]
    assert torch.isnan(torch.stack(list(alone.breakdown(0.1).costs.values()))[:, 3]).all()
