"""Weights that make float64 forget what decides: no method may certify beyond the change that gives the image away."""

import copy
from itertools import product

import pytest
import torch

from benchmarks.redteam.scales import places
from certify.api import certified_radius, certifier
from certify.methods.ball import NORMS
from certizoo import UserError
from tests.tools.cases import mostly_slow
from tests.tools.forgeries import FAMILIES, SCALES, attacked, change_needed, image
from tests.tools.trials import Subject
from zoo.bounds import float_error

METHODS = ("lofast", "lofast_local", "adjoint", "image", "best")
BEYOND = (1.001, 8.0)  # of the change that is known to be enough


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_change_of_one_pixel_gives_the_image_to_another_class(family: str) -> None:
    """As exact function: with S and without, the model is the same, and the one without hardly rounds. As served in
    float32, too."""
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
    """In the gate: one scale, at which `best` says what `image` says, which takes long where nothing is forged."""
    return (
        scale == 2.0**80
        and not (method == "best" and family != "mixing")
        and not (method == "image" and family in ("patches_scores", "convolutions", "value_projection_layernorm"))
    )


EVERY = list(product(FAMILIES, SCALES, METHODS, NORMS))
CASES = mostly_slow(EVERY, *(case for case in EVERY if quick(*case)))


@pytest.mark.parametrize(("family", "scale", "method", "norm"), CASES)
def test_no_method_certifies_a_radius_that_holds_the_change(family: str, scale: float, method: str, norm: str) -> None:
    """One image, asked twice: at the change that is enough, and far beyond."""
    change = change_needed(FAMILIES[family](0.0).double())
    images, labels = image().expand(2, -1, -1, -1), torch.ones(2, dtype=torch.long)
    try:
        analysis = certifier(FAMILIES[family](scale), method, "n", norm).analyse(images, labels)
    except UserError:
        return
    certified_B = analysis.at(change * torch.tensor(BEYOND)).certified_B
    assert not bool(certified_B.any()), f"a change of {change:.3g} is enough, and {BEYOND} times that are certified"


@pytest.mark.parametrize("exponent", [-560, 560])
@pytest.mark.parametrize("method", ["lofast", "lofast_local", "adjoint"])
def test_a_scale_that_the_next_layer_takes_off_again_grows_no_radius(method: str, exponent: int) -> None:
    """Of float64 weights, layer after layer: the same function, also where squares under- or overflow."""
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
