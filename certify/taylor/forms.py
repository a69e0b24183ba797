"""Hidden units around a clean batch, to second order exactly.

With d_h the change of unit h within its reach and c_h the mean of sigma'' on the way (docs/proofs.md#mean-hull),

    -w_h R_h  =  -w_h c_h d_h^2 / 2  <=  c'_h d_h^2 / 2,      c'_h = max(-w_h lo_h, -w_h hi_h),

which may be negative: as the reach shrinks, sum_h c'_h d_h^2 tends to minus the Hessian of the margin.

Letters as in zoo/bounds/elementwise.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.arithmetic import U, at_least_near, broadcast_batch
from zoo.bounds.activations import Smooth
from zoo.bounds.contracts import Forms, QuadraticForm
from zoo.bounds.elementwise import UnitForms
from zoo.bounds.third_order import second_range


def smooth_units(forms: Forms | None) -> UnitForms | None:
    """Return the forms if they are those of units with a second derivative."""
    known = isinstance(forms, UnitForms) and isinstance(forms.activation, Smooth)
    return forms if known and isinstance(forms, UnitForms) else None


def hull(forms: UnitForms, reach: Tensor) -> tuple[Tensor, Tensor]:
    """Return bounds (lo, hi) of 2 R / d^2 within the reach."""
    around = second_range(forms.activation, forms.z_BNH, at_least_near(reach))
    assert around is not None
    return around.s + around.lo, around.s + around.hi


@dataclass(frozen=True)
class Curvature:
    """The second order of the margins of some rivals at one leaf: the coefficients c' (C, B, N, H) of its units."""

    forms: UnitForms
    c: Tensor

    @staticmethod
    def of(forms: UnitForms, g: Tensor, reach: Tensor) -> "Curvature":
        """Return the coefficients for gradients at the output of the leaf."""
        (lo, hi), w = hull(forms, reach), forms.outputs_T(g)
        return Curvature(forms, -torch.minimum(w * lo, w * hi))

    @property
    def absolute(self) -> QuadraticForm:
        """The form with |c'|."""
        return self.forms.weighted(self.c.abs())

    def with_share(self, absolute: QuadraticForm, share: Tensor) -> QuadraticForm:
        """Return the form with c' + share |c'|, for shares (C, B); `absolute` bounds its size and rounding."""
        c = self.c + broadcast_batch(share, self.c.shape[2:]) * self.c.abs()
        more = (1 + share) * (1 + 8 * U)
        return QuadraticForm(
            lambda v: self.forms.units_T(c * self.forms.units(v)),
            more * absolute.largest,
            rounding=more * absolute.rounding,
        )
