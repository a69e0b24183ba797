"""Deterministic bounds on the functionals of the first nonlinear leaf, from all columns of the map from the image.

Only affine leaves precede it, and their maps are the same for every image. Where the functionals a are the same, too
(`Forms.shared`), |A^T a|^2 = sum_c <a, A e_c>^2 over the unit vectors e_c of images. The images of a batch can then
carry different columns, so all of them together cost as much as one. Inputs on the way to that leaf, with weights w_n
at the outputs of leaves, add at most (w_n ||J_n|| |a|)^2, and an error of torch in a column adds at most ||J_n|| |a|
times that error. Random vectors (measured.py) find lengths only to within a third, and hence the remainders of units
to the square of that factor. Proof: docs/proofs.md#columns.

Letters: B images, M unit vectors an image.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from certify.ellipsoids.budget import at_once
from zoo.arithmetic import OUT, broadcast_batch, product
from zoo.bounds.contracts import Forms
from zoo.bounds.tape import Tape

COLUMNS = 2**13  # largest number of columns; random vectors are used above it
TOGETHER = 16  # columns per image and push, at most


@dataclass(frozen=True)
class Columns:
    """The columns of the first nonlinear leaf.

    `at` is its place, `square` the |A^T a|^2 of all its functionals, (1, ...), and `count` the number of columns.
    """

    at: int
    square: Tensor
    count: int

    @staticmethod
    def of(tape: Tape, images_BCHW: Tensor) -> "Columns | None":
        """Return the columns; None where functionals are not shared, or images have too many pixels."""
        at = tape.nonlinear[0]
        forms = tape.leaves[at].forms
        if forms is None or not forms.shared or images_BCHW[0].numel() > COLUMNS:
            return None
        return Columns(at, _squares(tape, at, forms, images_BCHW), images_BCHW[0].numel())

    def lengths(self, tape: Tape, most_B: Tensor, outputs: Mapping[int, Tensor]) -> Tensor:
        """Return upper bounds of |M^T a| (B, ...) for the functionals.

        M starts from the image, times `most_B`, and from the outputs of these leaves, times w_n (B,). The tape may
        cover a subset of the images.
        """
        forms, room = tape.leaves[self.at].forms, self.square.shape[1:]
        assert forms is not None
        own = self.square.sqrt() + self.count**0.5 * self._rounded(tape, forms)
        total = product(broadcast_batch(most_B, room), own).square()
        for at, weight_B in outputs.items():
            if at < self.at:
                through_B = weight_B * tape.gain_between(at, self.at)
                total = total + product(broadcast_batch(through_B, room), forms.sizes).square()
        return OUT * total.sqrt()

    def _rounded(self, tape: Tape, forms: Forms) -> Tensor:
        """Bound how far torch's value is from <a, A e_c> for one column: (B, ...)."""
        room, off_B = self.square.shape[1:], torch.zeros_like(tape.leaves[self.at].gain_B)
        before_B, computed_B = torch.ones_like(off_B), torch.ones_like(off_B)
        for at, leaf in tape.leaves.items():
            if at == self.at:
                break
            off_B = off_B + leaf.rounding * computed_B * tape.gain_between(at, self.at)
            before_B, computed_B = before_B * leaf.gain_B, computed_B * (leaf.gain_B + leaf.rounding)
        return product(broadcast_batch(off_B, room), forms.sizes) + product(
            broadcast_batch(before_B + off_B, room), forms.slack
        )


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
