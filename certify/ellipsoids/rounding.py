"""The rounding errors of torch in the maps M_i, expressed in the maps' own units.

A push through leaf l has an error eps_l with |eps_l| <= rounding_l |M_l| |u|, and the noise in u has a part that enters
where eps_l does, with the weight w_l. The computed value is therefore exactly M_i u' for some u' with

    |u' - u|  <=  ( sum_l (|eps_l| / w_l)^2 )^(1/2)  <=  share / 2 |u|,

and the error of a pull is a vector shorter than what arrives by the same factor. Every product with sum_i M_i^T C_i M_i
is within `share` of its norm, relative to it. Neither grows with the depth of a network. Proof:
docs/proofs.md#rounding-of-maps.

Letters: B images, C forms.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from certify.ellipsoids.joint import Joint, Scale, Sizes
from zoo.arithmetic import OUT, U, nan_to_inf, product
from zoo.bounds import lanczos
from zoo.bounds.contracts import QuadraticForm

ALLOWED = 0.98 * lanczos.ROUNDING  # the rest covers the Lanczos recurrence


@dataclass(frozen=True)
class Rounding:
    """The rounding of all maps. `sizes` are upper bounds of |M_i|, of the inputs of all leaves."""

    joint: Joint
    sizes: Sizes

    def only(self, sure_B: Tensor) -> "Rounding":
        """Return the same for the sure images, with infinite sizes for the others."""
        return Rounding(self.joint, {at: torch.where(sure_B, n_B, torch.inf) for at, n_B in self.sizes.items()})

    def share(self, last: int, scale: Scale | None = None) -> Tensor:
        """Return the share of maps to leaves up to `last`: (B,), or (C, B) after a scale."""
        total = torch.zeros_like(self.joint.most_B)
        for at in self.sizes:
            if at < last:
                off = self._own(at) if scale is None else scale.most / scale.noise * self._own(at)
                total = total + (off / self.joint.noise.weights[at]).square()
        return nan_to_inf(2 * OUT * total.sqrt() + 16 * U)

    def left(self, last: int, scale: Scale | None = None) -> Tensor:
        """Return the part of the allowed product error that maps leave to forms.

        No bound holds where it is not positive.
        """
        return ALLOWED - self.share(last, scale)

    def shift(self, forms: Mapping[int, QuadraticForm], scale: Scale | None = None) -> Tensor:
        """Return what to add to all eigenvalues to leave room for the rounding of the forms: (C, B).

        With this shift, that rounding is at most `left` times the sum; the result is in units of the sum.
        """
        longest = 1.0 if scale is None else scale.most.square()
        off = [longest * self.of_form(at, form) for at, form in forms.items()]
        left = self.left(max(forms), scale).clamp_min(0)
        return nan_to_inf(torch.stack(torch.broadcast_tensors(*off)).sum(0) / left)

    def shift_of(self, forms: Mapping[int, QuadraticForm], within: Tensor) -> Tensor:
        """Return the same for forms of either sign, whose sum of absolute values has at most the norm `within`.

        All rounding is at most ALLOWED times this shift: (C, B).
        """
        off = [self.of_form(at, form) for at, form in forms.items()]
        total = torch.stack(torch.broadcast_tensors(*off)).sum(0) + product(self.share(max(forms)), within)
        return nan_to_inf(OUT * total / ALLOWED)

    def of_form(self, at: int, form: QuadraticForm) -> Tensor:
        """Bound the distance of M_i^T fl(C_i M_i u) from M_i^T C_i M_i u for |u| = 1: (C, B)."""
        rounding = torch.as_tensor(form.rounding, dtype=form.largest.dtype, device=form.largest.device)
        return OUT * product(rounding.expand(form.largest.shape), self.sizes[at].square())

    def of_gradients(self, lengths: Sizes) -> Tensor:
        """Return sum_l |delta_l| |M_l|, with delta_l the errors in pulls of gradients.

        `lengths` are those of the gradients at the outputs of leaves.
        """
        terms = [product(length, self._own(at)) for at, length in lengths.items()]
        return nan_to_inf(OUT * torch.stack(terms).sum(0))

    def _own(self, at: int) -> Tensor:
        """Bound |eps_l| for |u| = 1: of the leaf, of the remainder that enters after it, and of the sum there."""
        leaf, behind = self.joint.tape.leaves[at], [k for k in self.sizes if k > at]
        off_B = product(leaf.rounding, self.sizes[at])
        if at in self.joint.weights:
            spread = 0.0 if leaf.forms is None else leaf.forms.spread_rounding
            off_B = off_B + (spread + 2 * U) * self.joint.weights[at].flatten(1).amax(1)
        return off_B + 4 * U * self.sizes[behind[0]] if behind else off_B
