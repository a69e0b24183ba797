"""Pairs of linear maps that cancel, in random architectures.

They are those of tests/tools/forgeries.py with other sizes, norms, depths, poolings and scales between 2^20 and 2^100.
For every model a change of one pixel is known that changes the class, and also the resulting fall of the margin: ratio
= fall / claimed loss at a radius that contains the change, for all methods and both norms.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch

from benchmarks.redteam.claims import METHODS, SLACK
from benchmarks.redteam.finding import Finding
from certify.api import certifier
from certify.shared.ball import NORMS
from tests.tools import forgeries
from tests.tools.forgeries import (
    BEYOND,
    FAMILIES,
    GAIN,
    MOST,
    SWIN,
    Build,
    at_sufficient_changes,
    attacked,
    change_needed,
    image,
)

NORMALISATIONS: tuple[Any, ...] = (
    "centernorm",
    {"name": "layernorm", "eps": 1.0},
    {"name": "smoothproject", "radius": 8.0},
    {"name": "layerproject", "radius": 8.0},
)
PLACES = {
    "mixing": forgeries.mixing,
    "value, projection": forgeries.value_and_projection,
    "patches, attention": forgeries.patches_and_attention,
    "patches, mlp": forgeries.patches_and_mlp,
    "projection, mlp": forgeries.projection_and_mlp,
    "mlp, mlp": forgeries.mlp_and_mlp,
}
GAINED = ("mixing", "value, projection")  # places that may have the gain before the unit
TURNS = tuple((method, norm) for method in ("adjoint", "image", "adjoint", "taylor", *METHODS) for norm in NORMS)


def findings(seed: int) -> Iterator[Finding]:
    """Alternate between the tests' families at a random scale and a place in a random architecture."""
    for number in count(seed):
        generator = torch.Generator().manual_seed(number)
        scale = 2.0 ** _number(generator, 20, 101)
        name = list(FAMILIES)[number // 2 % len(FAMILIES)]
        what, build = (name, FAMILIES[name]) if number % 2 else drawn(generator)
        method, norm = TURNS[number // 2 % len(TURNS)]
        found = ratio(build, scale, method, norm)
        if found is not None:
            where = {"seed": number, "family": what, "scale": scale}
            yield Finding(f"{method} {norm}", found, len(BEYOND), where)


def _number(generator: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high, (), generator=generator))


def drawn(generator: torch.Generator) -> tuple[str, Build]:
    """Draw a place in an architecture."""

    def one(choices: Any) -> Any:
        return tuple(choices)[_number(generator, 0, len(choices))]

    place = one(PLACES)
    own: dict[str, Any] = {"norm": one(NORMALISATIONS), "embed_dim": one((16, 32, 96))}
    if place != "mixing":
        own |= {"gpsa_layers": one((0, 0, 1)), "global_pool": one(("avg", "avg", "cls")), "depth": one((1, 2))}
    if place == "mlp, mlp":
        own |= {"depth": 2, "gpsa_layers": one((0, 2))}
    if place in GAINED:
        own |= {"gain": one((1.0, 2.0**6, GAIN))}
    if place == "value, projection" and one((False, False, True)):
        own = {"name": "dp_swin_t", "norm": own["norm"], "gain": own["gain"], **SWIN}
    return f"{place} {own}", lambda scale: PLACES[place](scale, **own)


def ratio(build: Build, scale: float, method: str, norm: str) -> float | None:
    """Return the fall of the margin by the known change, over the claimed loss.

    None if no change of one pixel decides; 0 if the model is refused.
    """
    truth = build(0.0).double()
    change = change_needed(truth)
    if change == MOST:
        return None
    points = torch.cat([image(), attacked(change * BEYOND[0])]).double()
    if truth(points).argmax(-1).tolist() != [1, 0] or not torch.equal(build(scale).double()(points), truth(points)):
        return None
    logits = truth(points)
    fall = float((logits[:, 1] - logits[:, 0]).diff().neg()) - SLACK * float(1 + logits.abs().max())
    found = at_sufficient_changes(lambda: certifier(build(scale), method, "n", norm), change)
    return 0.0 if found is None else float((fall / found.loss_B.clamp_min(1e-300)).amax())
