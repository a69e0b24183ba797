"""How far functionals of the first leaf that bends reach, without chance: by all columns of the map from the image.

Only affine leaves are in front of it, whose maps are those of every image. Where the functionals a are so too
(`Forms.shared`), |A^T a|^2 = sum_c <a, A e_c>^2, over the unit vectors e_c of images, and the images of a batch may
show different columns: all of them together cost as much as one. What comes in on the way to that leaf, with weights
w_n at the outputs of leaves, adds at most (w_n ||J_n|| |a|)^2, and what torch rounds in a column, ||J_n|| |a| times it.
Random vectors (ellipsoid.py) find lengths to a third, and the remainders of units to the square of that. Proof:
docs/proofs.md#columns.

Letters: B images, M unit vectors an image.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from certify.maps.effort import at_once
from zoo.arithmetic import OUT, beside, product
from zoo.bounds.contracts import Forms
from zoo.bounds.tape import Tape

COLUMNS = 2**13  # at most: beyond, random vectors do
TOGETHER = 16  # columns an image, at most


@dataclass(frozen=True)
class Columns:
    """Of the first leaf that bends: its place, |A^T a|^2 of all its functionals, (1, ...), and how many columns."""

    at: int
    square: Tensor
    count: int

    @staticmethod
    def of(tape: Tape, images_BCHW: Tensor) -> "Columns | None":
        """None where functionals are not shared, or images have too many pixels."""
        at = tape.bent[0]
        forms = tape.leaves[at].forms
        if forms is None or not forms.shared or images_BCHW[0].numel() > COLUMNS:
            return None
        return Columns(at, _squares(tape, at, forms, images_BCHW), images_BCHW[0].numel())

    def lengths(self, tape: Tape, most_B: Tensor, outputs: Mapping[int, Tensor]) -> Tensor:
        """|M^T a| (B, ...) of the functionals, at most. M starts from the image, times `most_B`, and from the outputs
        of these leaves, times w_n (B,); the tape may be that of some of the images."""
        forms, room = tape.leaves[self.at].forms, self.square.shape[1:]
        assert forms is not None
        own = self.square.sqrt() + self.count**0.5 * self._rounded(tape, forms)
        total = product(beside(most_B, room), own).square()
        for at, weight_B in outputs.items():
            if at < self.at:
                through_B = weight_B * tape.gain_between(at, self.at)
                total = total + product(beside(through_B, room), forms.sizes).square()
        return OUT * total.sqrt()

    def _rounded(self, tape: Tape, forms: Forms) -> Tensor:
        """How far torch is from <a, A e_c> of one column, at most: (B, ...)."""
        room, off_B = self.square.shape[1:], torch.zeros_like(tape.leaves[self.at].gain_B)
        before_B, computed_B = torch.ones_like(off_B), torch.ones_like(off_B)
        for at, leaf in tape.leaves.items():
            if at == self.at:
                break
            off_B = off_B + leaf.rounding * computed_B * tape.gain_between(at, self.at)
            before_B, computed_B = before_B * leaf.gain_B, computed_B * (leaf.gain_B + leaf.rounding)
        return product(beside(off_B, room), forms.sizes) + product(beside(before_B + off_B, room), forms.slack)


def _squares(tape: Tape, first: int, forms: Forms, images_BCHW: Tensor) -> Tensor:
    found = list[Tensor]()

    def visit(at: int, v: Tensor) -> None:
        if at == first:
            found.append(forms.squares(v).sum(0, keepdim=True))

    size, together = images_BCHW[0].numel(), len(images_BCHW) * min(TOGETHER, at_once(images_BCHW.numel()))
    for column in torch.arange(size, device=images_BCHW.device).split(together):
        units = images_BCHW.new_zeros(together, size)  # the last ones may stay 0
        units[column - column[0], column] = 1.0
        tape.push(units.view(-1, *images_BCHW.shape), visit, first)
    return torch.stack(found).sum(0)
