"""No method certifies beyond a change that is enough where a product of weight matrices cancels."""

from itertools import product

import pytest
import torch

from certify.api import certifier
from certify.methods.served import SERVED_METHODS
from certify.shared.ball import NORMS
from tests.tools.cases import mostly_slow
from tests.tools.forgeries import BEYOND, at_sufficient_changes, attacked, change_needed, image
from tests.tools.forgeries_more import FAMILIES, SCALES

METHODS = ("lofast", "lofast_local", "adjoint", "image", "best")
SEEN = [family for family in FAMILIES if not family.endswith(("_exact", "l2_values"))]
EVERY = list(product(FAMILIES, SCALES, METHODS, NORMS))
CASES = mostly_slow(EVERY, *(case for case in EVERY if case[1:] in ((2.0**100, "lofast", "l2"),)))
SERVED = list(product(FAMILIES, SERVED_METHODS))
SERVED_CASES = mostly_slow(SERVED, *(case for case in SERVED if case[1] == "lofast"))


@pytest.mark.parametrize("family", SEEN)
def test_the_served_model_gives_the_image_to_another_class(family: str) -> None:
    change = change_needed(FAMILIES[family](0.0).double())
    points = torch.cat([image(), attacked(BEYOND[0] * change)])
    for scale in SCALES:
        forged = FAMILIES[family](scale)
        assert forged(points).argmax(-1).tolist() == [1, 0]
        assert forged.double()(points.double()).argmax(-1).tolist() == [1, 0]


@pytest.mark.parametrize(("family", "scale", "method", "norm"), CASES)
def test_no_method_certifies_the_change(family: str, scale: float, method: str, norm: str) -> None:
    change = change_needed(FAMILIES[family](0.0).double())
    found = at_sufficient_changes(lambda: certifier(FAMILIES[family](scale), method, "n", norm), change)
    assert found is None or not bool(found.certified_B.any()), f"a change of {change:.3g} is enough, and certified"


@pytest.mark.parametrize(("family", "method"), SERVED_CASES)
def test_no_method_certifies_the_change_of_the_served_model(family: str, method: str) -> None:
    change = change_needed(FAMILIES[family](0.0).double())
    served = SERVED_METHODS[method]
    found = at_sufficient_changes(lambda: served(FAMILIES[family](2.0**100), torch.float32, "n", "l2"), change)
    assert found is None or not bool(found.certified_B.any())
