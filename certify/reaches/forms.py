"""Hidden units around a clean batch, to second order exactly.

With d_h the change of unit h within its reach and c_h the mean of sigma'' on the way (docs/proofs.md#mean-hull),

    -w_h R_h  =  -w_h c_h d_h^2 / 2  <=  c'_h d_h^2 / 2,      c'_h = max(-w_h lo_h, -w_h hi_h),

which may be negative: as the reach shrinks, sum_h c'_h d_h^2 tends to minus the Hessian of the margin.

Letters as in zoo/bounds/elementwise.py.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zoo.arithmetic import U, at_least_near
from zoo.bounds.activations import Smooth
from zoo.bounds.contracts import QuadraticForm
from zoo.bounds.elementwise import UnitForms, smooth_units
from zoo.bounds.tape import Tape
from zoo.bounds.third_order import Cubic, cubic, second_range


def smooth_leaves(tape: Tape) -> dict[int, UnitForms]:
    """Return the leaves with such units."""
    found = {at: smooth_units(tape.leaves[at].forms) for at in tape.nonlinear}
    return {at: forms for at, forms in found.items() if forms is not None}


def units_at(tape: Tape, at: int) -> UnitForms:
    """Return the forms of a leaf with such units."""
    forms = smooth_units(tape.leaves[at].forms)
    assert forms is not None
    return forms


def hull(forms: UnitForms, reach: Tensor) -> tuple[Tensor, Tensor]:
    """Return bounds (lo, hi) of 2 R / d^2 within the reach."""
    around = second_range(forms.activation, forms.z_BNH, at_least_near(reach))
    assert around is not None
    return around.s + around.lo, around.s + around.hi


def kappa(forms: UnitForms, reach: Tensor) -> Tensor:
    """Return the largest |2 R / d^2| within the reach."""
    lo, hi = hull(forms, reach)
    return torch.maximum(-lo, hi)


def cubic_of(forms: UnitForms, reach: Tensor) -> Cubic:
    """Return the first order of 2 R / d^2 less its value at 0, and what is left within the reach."""
    assert isinstance(forms.activation, Smooth)
    return cubic(forms.activation, forms.z_BNH, at_least_near(reach))


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

    def pulled(self, d: Tensor) -> Tensor:
        """Return what C makes of the changes d (M, B, N, H) of units, for one rival: (M, B, *x)."""
        return self.forms.units_T(self.c * d)

    def with_more(self, more: Tensor | None = None) -> QuadraticForm:
        """Return the form with c' + more."""
        whole, bound = self.c, self.c.abs()
        if more is not None:
            whole, bound = whole + more, (bound + more) * (1 + 8 * U)
        return replace(self.forms.weighted(bound), apply=lambda v: self.forms.units_T(whole * self.forms.units(v)))
