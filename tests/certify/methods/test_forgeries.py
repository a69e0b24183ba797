"""Weights that make float64 lose the deciding digits: no method may certify beyond the change that turns the image."""

import copy
from functools import cache
from itertools import product

import pytest
import torch

from benchmarks.redteam.scales import places
from certify.api import certified_radius, certifier
from certify.shared.ball import NORMS
from certizoo import UserError
from tests.tools.cases import mostly_slow
from tests.tools.forgeries import BEYOND, FAMILIES, SCALES, at_sufficient_changes, attacked, change_needed, image
from tests.tools.trials import Subject
from zoo.bounds import float_error

METHODS = ("lofast", "lofast_local", "adjoint", "image", "best")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_change_of_one_pixel_gives_the_image_to_another_class(family: str) -> None:
    """As an exact function the model is the same with S and without, and without S it hardly rounds.

    Served in float32 it changes its class too.
    """
    truth = FAMILIES[family](0.0).double()
    change = change_needed(truth)
    points = torch.cat([image(), attacked(BEYOND[0] * change)])
    logits = truth(points.double())
    assert logits.argmax(-1).tolist() == [1, 0]
    assert (logits[:, 0] - logits[:, 1]).abs().min() > 4 * float_error.defect(truth, points.double(), logits).max()
    for scale in SCALES:
        forged = FAMILIES[family](scale)
        assert forged(points).argmax(-1).tolist() == [1, 0]
        assert torch.equal(copy.deepcopy(forged).double()(points.double()), logits)
        assert all(p.dtype is torch.float32 and bool(p.isfinite().all()) for p in forged.parameters())


def quick(family: str, scale: float, method: str, norm: str) -> bool:
    """Select the gate's cases: one scale, with every family, method and norm.

    `lofast` and `lofast_local` are cheap, so every family has both norms. `adjoint` takes the norms in turn. `image`
    and `best`, which includes it, take seconds: each has one family of one kind.
    """
    own_norm = NORMS[list(FAMILIES).index(family) % 2]
    families = {"image": ("pool_head",), "best": ("gradient",)}.get(method, FAMILIES)
    return scale == 2.0**80 and family in families and (method.startswith("lofast") or norm == own_norm)


@cache
def sufficient_change(family: str) -> float:
    return change_needed(FAMILIES[family](0.0).double())


EVERY = list(product(FAMILIES, SCALES, METHODS, NORMS))
CASES = mostly_slow(EVERY, *(case for case in EVERY if quick(*case)))


@pytest.mark.parametrize(("family", "scale", "method", "norm"), CASES)
def test_no_method_certifies_a_radius_beyond_the_change(family: str, scale: float, method: str, norm: str) -> None:
    """Test one image at the sufficient change, and far beyond."""
    change = sufficient_change(family)
    found = at_sufficient_changes(lambda: certifier(FAMILIES[family](scale), method, "n", norm), change)
    assert found is None or not bool(found.certified_B.any()), f"a change of {change:.3g} is enough, and certified"


@pytest.mark.parametrize("exponent", [-560, 560])
@pytest.mark.parametrize("method", ["lofast", "lofast_local", "adjoint"])
def test_a_scale_that_the_next_layer_takes_off_again_grows_no_radius(method: str, exponent: int) -> None:
    """Scale float64 weights layer by layer: the function stays the same, also where squares under- or overflow."""
    subject = Subject("standard", "medium", 0)
    plain, x = subject.model().double(), subject.images(1)
    y = plain(x.double()).argmax(-1)
    eps_B = 1.01 * certified_radius(plain, x, y, method)
    assert (eps_B > 0).all()
    grown = []
    for place in places(plain):
        scaled = copy.deepcopy(plain)
        places(scaled)[place](2.0**exponent)
        try:
            if bool(certifier(scaled, method).analyse(x, y).at(eps_B).certified_B.any()):
                grown.append(place)
        except UserError:
            continue
    assert not grown
