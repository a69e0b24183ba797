"""What torch rounds in the maps M_i, in the maps' own units.

A push through leaf l is off by eps_l with |eps_l| <= rounding_l |M_l| |u|, and the noise of u has a part that enters
where eps_l does, with the weight w_l. So what is computed is M_i u' exactly, for

    |u' - u|  <=  sum_l (|eps_l| / w_l)^2)^(1/2)  <=  share / 2 |u|,

and a pull is off by a vector that is that much shorter than what arrives: every product with sum_i M_i^T C_i M_i is
within `share` of its norm, times it. Neither grows with the depth of a network. Proof: docs/proofs.md#rounding-of-maps.

Letters: B images, C forms.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from certify.maps.joint import Joint, Scale, Sizes
from zoo.arithmetic import OUT, U, nan_to_inf, product
from zoo.bounds import lanczos
from zoo.bounds.contracts import QuadraticForm

ALLOWED = 0.98 * lanczos.ROUNDING  # the rest is that of the recurrence


@dataclass(frozen=True)
class Rounding:
    """`sizes`: |M_i| at most, of the inputs of all leaves."""

    joint: Joint
    sizes: Sizes

    def only(self, sure_B: Tensor) -> "Rounding":
        """Nothing is known of the other images."""
        return Rounding(self.joint, {at: torch.where(sure_B, n_B, torch.inf) for at, n_B in self.sizes.items()})

    def share(self, last: int, scale: Scale | None = None) -> Tensor:
        """Of maps to leaves up to `last`: (B,), or (C, B) behind a scale."""
        total = torch.zeros_like(self.joint.most_B)
        for at in self.sizes:
            if at < last:
                off = self._own(at) if scale is None else scale.most / scale.noise * self._own(at)
                total = total + (off / self.joint.noise.weights[at]).square()
        return nan_to_inf(2 * OUT * total.sqrt() + 16 * U)

    def left(self, last: int, scale: Scale | None = None) -> Tensor:
        """Of what products may be off by, what maps leave to forms; nothing is known where that is not positive."""
        return ALLOWED - self.share(last, scale)

    def shift(self, forms: Mapping[int, QuadraticForm], scale: Scale | None = None) -> Tensor:
        """What is added to all eigenvalues, so that the rounding of the forms themselves is what is left for them, in
        units of the sum: (C, B)."""
        longest = 1.0 if scale is None else scale.most.square()
        off = [longest * self.of_form(at, form) for at, form in forms.items()]
        left = self.left(max(forms), scale).clamp_min(0)
        return nan_to_inf(torch.stack(torch.broadcast_tensors(*off)).sum(0) / left)

    def of_form(self, at: int, form: QuadraticForm) -> Tensor:
        """How far M_i^T fl(C_i M_i u) is from M_i^T C_i M_i u at most, |u| = 1: (C, B)."""
        rounding = torch.as_tensor(form.rounding, dtype=form.largest.dtype, device=form.largest.device)
        return OUT * product(rounding.expand(form.largest.shape), self.sizes[at].square())

    def of_gradients(self, lengths: Sizes) -> Tensor:
        """sum_l |delta_l| |M_l| for what pulls of gradients with these lengths at the outputs of leaves are off by."""
        terms = [product(length, self._own(at)) for at, length in lengths.items()]
        return nan_to_inf(OUT * torch.stack(terms).sum(0))

    def _own(self, at: int) -> Tensor:
        """|eps_l| at most for |u| = 1: of the leaf, of the remainder that enters behind it, and of the sum there."""
        leaf, behind = self.joint.tape.leaves[at], [k for k in self.sizes if k > at]
        off_B = product(leaf.rounding, self.sizes[at])
        if at in self.joint.weights:
            spread = 0.0 if leaf.forms is None else leaf.forms.spread_rounding
            off_B = off_B + (spread + 2 * U) * self.joint.weights[at].flatten(1).amax(1)
        return off_B + 4 * U * self.sizes[behind[0]] if behind else off_B
