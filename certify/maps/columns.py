"""How far functionals of the first leaf that bends reach, without chance: by all columns of the map from the image.

Only affine leaves are in front of it, whose maps are those of every image. Where the functionals a are so too
(`Forms.shared`), |A^T a|^2 = sum_c <a, A e_c>^2, over the unit vectors e_c of images, and the images of a batch may
show different columns: all of them together cost as much as one. What comes in on the way to that leaf, with weights
w_n at the ends of nodes, adds at most (w_n ||J_n|| |a|)^2. Random vectors (ellipsoid.py) find lengths to a third, and
the remainders of units to the square of that. Proof: docs/proofs.md#columns.

Letters: B images, M unit vectors an image.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from certify.maps.effort import at_once
from zoo.arithmetic import product
from zoo.bounds.contracts import Forms
from zoo.bounds.tape import Tape

COLUMNS = 2**13  # at most: beyond, random vectors do
TOGETHER = 16  # columns an image, at most
OUT = 1 + 1e-9  # outwards over rounding


def lengths(tape: Tape, images_BCHW: Tensor, most_B: Tensor, ends: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """|M^T a| (B, ...) of all functionals of that leaf, at most, by its place; nothing where they are not shared, or
    images have too many pixels. M starts from the image, times `most_B`, and from these ends, times w_n (B,)."""
    forms = tape.leaves[tape.bent[0]].forms
    if forms is None or not forms.shared or images_BCHW[0].numel() > COLUMNS:
        return {}
    square = _squares(tape, forms, images_BCHW)
    room = (-1, *(1,) * (square.ndim - 1))
    total = product(most_B.square().view(room), square)
    for end, weight_B in ends.items():
        if end < tape.bent[0]:
            total = total + product((weight_B * tape.gain_between(end, tape.bent[0])).view(room), forms.sizes).square()
    return {tape.bent[0]: OUT * total.sqrt()}


def _squares(tape: Tape, forms: Forms, images_BCHW: Tensor) -> Tensor:
    """|A^T a|^2 of all functionals: (1, ...)."""
    found = list[Tensor]()

    def visit(at: int, v: Tensor) -> None:
        if at == tape.bent[0]:
            found.append(forms.squares(v).sum(0, keepdim=True))

    size, together = images_BCHW[0].numel(), len(images_BCHW) * min(TOGETHER, at_once(images_BCHW.numel()))
    for column in torch.arange(size, device=images_BCHW.device).split(together):
        units = images_BCHW.new_zeros(together, size)  # the last ones may stay 0
        units[column - column[0], column] = 1.0
        tape.push(units.view(-1, *images_BCHW.shape), visit, tape.bent[0])
    return torch.stack(found).sum(0)
