"""Claims of benchmarks/results about weights hold for the weights in the package or beside the results."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

import zoo
from benchmarks.record import RESULTS
from certify import certified_radius
from tests.tools.cases import mostly_slow

PLACES = (RESULTS, Path(zoo.weights.__file__).parent)
HANDOVERS = sorted(path.parent for place in PLACES for path in place.glob(f"*/{zoo.handover.WEIGHTS}"))


def test_there_are_weights() -> None:
    assert HANDOVERS


@pytest.mark.parametrize("handover", HANDOVERS, ids=lambda path: path.name)
def test_a_certificate_is_of_the_weights_beside_it(handover: Path) -> None:
    digest = hashlib.sha256((handover / zoo.handover.WEIGHTS).read_bytes()).hexdigest()
    _, config = zoo.handover.load(handover)
    files = RESULTS.glob(f"{handover.name}_{config['data']['name']}_*.json")
    claims = [json.loads(path.read_text()) for path in files]
    assert claims
    assert {claim["weights_sha256"] for claim in claims} == {digest}


@pytest.mark.parametrize("handover", mostly_slow(HANDOVERS, HANDOVERS[-1]), ids=lambda path: path.name)
def test_committed_weights_certify(handover: Path) -> None:
    model, config = zoo.handover.load(handover)
    size = config["data"]["img_size"]
    image = torch.rand(1, config["data"]["channels"], size, size, generator=torch.Generator().manual_seed(0))
    label = model(image).argmax(-1)
    assert float(certified_radius(model, image, label, method="adjoint")) > 0
