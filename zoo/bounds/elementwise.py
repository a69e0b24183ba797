"""Units sigma(z_h + d_h) around a clean batch, and the element-wise modules, where every entry is a unit of its own.

Letters as in activations.py: B images, C classes, P pairs (class, image), N tokens, H hidden units.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from zoo.arithmetic import FAR, U, at_least_near, gamma, length, product
from zoo.bounds.activations import Smooth, activation_of, lipschitz, slope_range
from zoo.bounds.contracts import (
    Activation,
    Bound,
    Expand,
    Expansion,
    Forms,
    LambdaMax,
    Layer,
    Precision,
    QuadraticForm,
    Rounding,
    SignedForm,
)
from zoo.bounds.first_order import scaled
from zoo.bounds.primitives import function
from zoo.bounds.products import SLOPE
from zoo.bounds.rounding import NO_BOUND, exact
from zoo.bounds.rule_table import M, ModuleRules, NoRule
from zoo.bounds.third_order import second_range

PAIR_BYTES = 2**24  # memory for one array over the units of a few pairs


@dataclass(frozen=True)
class Form:
    """The dependence of the units on the input of a token, d_h = <a_h, eta>.

    lengths_H: |a_h|. scales_H: s > 0, free; R is measured as |S R|. norm: never below ||S W_1||. lambda_max: of the
    forms sum_h c_h d_h^2 of all tokens, see activations.py.
    """

    lengths_H: Tensor
    scales_H: Tensor
    norm: Tensor
    lambda_max: LambdaMax


@dataclass(frozen=True)
class UnitForms:
    """The quadratic forms sum c_h d_h^2 of units d = W_1 H, R = W_2 r with r = R_sigma. See `Forms` in contracts.py.

    Linear maps of (C, B, ...): `units` is W_1, `outputs` is W_2; the others are their transposes.
    """

    activation: Activation
    form: Form
    z_BNH: Tensor
    units: Callable[[Tensor], Tensor]  # *x -> N, H
    units_T: Callable[[Tensor], Tensor]
    outputs: Callable[[Tensor], Tensor]  # N, H -> *y
    outputs_T: Callable[[Tensor], Tensor]
    terms: int = 0  # number of terms of the sums in W_1 and in its transpose, together
    absolute: Tensor | float = 1.0  # an upper bound of the norm of |W_1|
    spread_rounding: Tensor | float = 0.0

    @property
    def shared(self) -> bool:
        return True

    @property
    def sizes(self) -> Tensor:
        return self.form.lengths_H

    @property
    def slack(self) -> Tensor:
        return gamma(self.terms + 2) * self.form.lengths_H

    def squares(self, probes: Tensor) -> Tensor:
        return self.units(probes).square().sum(0)

    def of_gradient(self, g: Tensor, reach: Tensor) -> QuadraticForm:
        c_CBNH, s_CBNH = self.activation.parabola(self.z_BNH, self.outputs_T(g), at_least_near(reach))
        return replace(self.weighted(c_CBNH), constant=s_CBNH.sum((-2, -1)))

    def of_rest(self, reach: Tensor, weight: Tensor) -> QuadraticForm:
        return self.weighted((weight * self.activation.chord(self.z_BNH, at_least_near(reach))).square()[None])

    def signed(self, g: Tensor, reach: Tensor) -> SignedForm:
        around = second_range(self.activation, self.z_BNH, at_least_near(reach))
        if around is None:
            form = self.of_gradient(g, reach)
            return SignedForm(form, form)
        c_CBNH = around.against(self.outputs_T(g))
        absolute = self.weighted(c_CBNH.abs())
        return SignedForm(replace(absolute, apply=lambda v: self.units_T(c_CBNH * self.units(v))), absolute)

    @property
    def pooled(self) -> int:
        return 0

    def size(self, reach: Tensor) -> Tensor:
        return self.activation.chord(self.z_BNH, reach) * reach

    def shrink(self, small: Tensor, large: Tensor) -> Tensor:
        """Compare the forms entry by entry, since they are diagonal in d."""
        less, more = (self.activation.chord(self.z_BNH, at_least_near(reach)) for reach in (small, large))
        return largest_share(less, more).square()

    def spread(self, r: Tensor) -> Tensor:
        return self.outputs(r)

    def collect(self, g: Tensor) -> Tensor:
        return self.outputs_T(g)

    def weighted(self, c_CBNH: Tensor) -> QuadraticForm:
        """Return the form sum c_h d_h^2, for c >= 0."""
        largest_P = self.form.lambda_max(c_CBNH.amax(2, keepdim=True).flatten(0, 1))
        return QuadraticForm(
            lambda v: self.units_T(c_CBNH * self.units(v)),
            largest_P.view(c_CBNH.shape[:2]),
            rounding=gamma(self.terms + 8) * self.absolute**2 * c_CBNH.amax((-2, -1)),
        )


def smooth_units(forms: Forms | None) -> UnitForms | None:
    """Return the forms if they are those of units with a second derivative."""
    known = isinstance(forms, UnitForms) and isinstance(forms.activation, Smooth)
    return forms if known and isinstance(forms, UnitForms) else None


def largest_share(less: Tensor, more: Tensor) -> Tensor:
    """Return max of less / more over the entries of each of B images, 0 <= less <= more: (B,)."""
    return torch.where(less < more, less / more, (less > 0).to(less)).flatten(1).amax(1)


def units_beta(activation: Activation, form: Form, z_BNH: Tensor) -> Bound:
    """Bound |S R|, also by the range of slopes times ||S W_1|| r.

    The latter holds as R = (D' - D) d with slopes D' that sigma takes.
    """

    def beta(z_PNH: Tensor, r_P: Tensor) -> Tensor:
        finite_P = r_P.clamp(max=FAR)
        quadratic = activation.beta(z_PNH, form.scales_H, _reach(form, finite_P), finite_P, form.lambda_max)
        return _within(r_P, quadratic, slope_range(activation) * form.norm * r_P)

    return lambda r: _in_chunks(beta, r, z_BNH)


def units_remainder(activation: Activation, form: Form, z_BNH: Tensor, w_CBNH: Tensor) -> Bound:
    """Bound -sum w_h R_h, also by |S^{-1} w| |S R|."""

    def remainder(z_PNH: Tensor, r_P: Tensor, w_PNH: Tensor) -> Tensor:
        finite_P = r_P.clamp(max=FAR)
        quadratic = activation.remainder(z_PNH, w_PNH, _reach(form, finite_P), finite_P, form.lambda_max)
        weight_P = length((w_PNH / form.scales_H).flatten(1))
        return _within(r_P, quadratic, product(slope_range(activation) * form.norm * weight_P, r_P))

    return lambda r: _in_chunks(remainder, r.expand(torch.broadcast_shapes(r.shape, w_CBNH.shape[:2])), z_BNH, w_CBNH)


def _reach(form: Form, r_P: Tensor) -> Tensor:
    """Return D_h, large enough to be squared."""
    return at_least_near(form.lengths_H * r_P[:, None, None])


def _within(r_P: Tensor, quadratic_P: Tensor, linear_P: Tensor) -> Tensor:
    """Return the lesser of two bounds. The first is computed for radii up to FAR, and holds for those."""
    return torch.where(r_P > FAR, linear_P, torch.minimum(quadratic_P, linear_P))


def _in_chunks(value: Callable[..., Tensor], r: Tensor, *units: Tensor) -> Tensor:
    """Return value(z, r, ...) for every entry of r (..., B) or (..., C, B), a few pairs at a time; 0 at 0."""
    z_BNH = units[0]
    flat = [unit.flatten(0, -3) for unit in units]
    r_P = r.flatten()
    few = max(1, PAIR_BYTES // (8 * z_BNH[0].numel()))
    value_P = torch.zeros_like(r_P)
    for p in (r_P > 0).nonzero().flatten().split(few):
        z, *rest = (unit[p % len(unit)] for unit in flat)
        value_P[p] = value(z, r_P[p], *rest)
    return value_P.view(r.shape)


def elementwise(module: nn.Module, activation: Activation) -> Expand:
    """Expand a module where every entry is a unit of its own, d = eta."""

    def largest(c_PNH: Tensor) -> Tensor:
        return c_PNH.amax((-2, -1)).clamp_min(0)

    def rows(v: Tensor) -> Tensor:
        return v.flatten(2).unsqueeze(2)

    def expand(x: Tensor) -> Expansion:
        def back(d: Tensor) -> Tensor:
            return d.view(-1, *x.shape)

        one, z_B1H = x.new_ones(()), x.flatten(1).unsqueeze(1)
        form, slope = Form(one, one, one, largest), activation.slope(z_B1H).view(x.shape)
        return Expansion(
            y=module(x),
            gain_B=slope.abs().flatten(1).amax(1),
            beta=units_beta(activation, form, z_B1H),
            remainder=lambda g: units_remainder(activation, form, z_B1H, g.flatten(2).unsqueeze(2)),
            pull=lambda g: g * slope,
            own_push=lambda v: v * slope,
            rounding_B=(SLOPE + U) * lipschitz(activation) * x.new_ones(len(x)),
            forms=UnitForms(activation, form, z_B1H, rows, back, back, rows),
        )

    return expand


# the rules of an activation module ------------------------------------------------------------------------------------


def scalar(activation: Callable[[M], Activation]) -> ModuleRules[M]:
    """Return all rules of an activation module, from the known properties of sigma."""
    return ModuleRules(rule=by_slope, expansion=by_units, activation=activation, rounding=by_kernel)


def by_slope(module: nn.Module) -> Layer:
    """Bound ||sigma(x') - sigma(x)|| <= max |sigma'| ||x' - x||, entry by entry."""
    return scaled(module, lipschitz(activation_of(module)))


def by_units(module: nn.Module) -> Expand:
    """Expand the module with one unit per entry."""
    return elementwise(module, activation_of(module))


def by_kernel(module: nn.Module, precision: Precision) -> Rounding:
    """Return the rounding of the operations that compute sigma. Raises `NoRule` where these are unknown."""
    activation = activation_of(module)
    if activation.operations is None:
        raise NoRule(module, NO_BOUND)
    if activation.operations == 0:
        return exact(module)
    return function(module, lipschitz(activation), activation.operations, precision)
