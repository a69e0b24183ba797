"""Models keep the logits, and at least the certified radii, that an earlier commit computed.

f6dab7c/models     hand-overs with random weights, one for each kind of attention and layer, a quarter of a megabyte
f6dab7c/facts.json their logits and certified radii on six random images, by that commit
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from certify import certified_radius
from tests.tools.cases import mostly_slow

HERE = Path(__file__).parent / "f6dab7c"
FACTS: dict[str, Any] = json.loads((HERE / "facts.json").read_text())
# The published rule is one formula. A sharper rule may raise the other radii, and another start vector of
# Lanczos' method may lower them by a few percent.
LEAST = {"lofast": 1 - 1e-6, "lofast_local": 1 - 1e-6, "adjoint": 0.97}
ROUNDED = 2e-9  # the rounding of the clean point may cost a step of the radius search


@pytest.mark.parametrize("name", mostly_slow(FACTS, "conv_4c3f_mnist", "dp_vit_ti"))
def test_a_hand_over_gives_its_logits_and_radii(name: str) -> None:
    model, config = zoo.handover.load(HERE / "models" / name)
    options = config["model"]
    size, channels = options["img_size"], options.get("in_chans", 3)
    x = torch.rand(6, channels, size, size, generator=torch.Generator().manual_seed(1))
    logits = torch.tensor(FACTS[name]["logits"])
    torch.testing.assert_close(model(x), logits, rtol=1e-4, atol=1e-5)
    for method, radius in FACTS[name]["radius"].items():
        again = certified_radius(model, x, logits.argmax(1), method=method)
        assert (again >= LEAST[method] * torch.tensor(radius, dtype=torch.float64) - ROUNDED).all()
        if method == "lofast":
            torch.testing.assert_close(again, torch.tensor(radius, dtype=torch.float64), rtol=1e-6, atol=ROUNDED)
