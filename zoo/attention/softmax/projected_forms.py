"""Quadratic forms of what a variant does to its projections, as forms of the change of the tokens.

The lengths of queries, keys and values are bounded by that of the tokens, each with its own matrix: one length for all
three would be that of the longest.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from zoo.arithmetic import OUT
from zoo.attention.softmax.parts import projection_leaf, unknown
from zoo.bounds.contracts import Expansion, Forms, QuadraticForm, SignedForm
from zoo.bounds.products import chained
from zoo.spectral import sigma_upper


@dataclass(frozen=True)
class Projection:
    """The map from tokens to queries, keys and values: y (B, 3, H, N, O), weights (3, H, O, D).

    The exact weights of the values may be `off_values` from these in norm.
    """

    y_B3HNO: Tensor
    w_3HOD: Tensor
    off_values: Tensor | float

    @cached_property
    def leaf(self) -> Expansion:
        return projection_leaf(self.y_B3HNO, self.w_3HOD, self.off_values)

    @property
    def rows_3HO(self) -> Tensor:
        """Upper bounds of the norms of rows."""
        return self.w_3HOD.norm(dim=-1) * OUT + self._off_3[:, None, None]

    @cached_property
    def heads_3H(self) -> Tensor:
        """Upper bounds of the norms of heads."""
        return sigma_upper(self.w_3HOD) + self._off_3[:, None]

    @property
    def _off_3(self) -> Tensor:
        return self.w_3HOD.new_tensor([0.0, 0.0, float(self.off_values)])


@dataclass(frozen=True)
class ProjectedForms:
    """The forms of f(W H) for those of f. `first` expands W, and `sizes` are the functionals' sizes in H."""

    inner: Forms
    first: Expansion
    sizes: Tensor

    @property
    def shared(self) -> bool:
        return False

    @property
    def slack(self) -> Tensor:
        return 2 * (self.inner.slack * self.first.gain_B.amax() + self.inner.sizes * self.first.rounding.amax())

    @property
    def spread_rounding(self) -> Tensor | float:
        return self.inner.spread_rounding

    @property
    def pooled(self) -> int:
        return self.inner.pooled

    def squares(self, probes: Tensor) -> Tensor:
        return self.inner.squares(self.first.push(probes))

    def of_gradient(self, g: Tensor, reach: Tensor) -> QuadraticForm:
        return self._through(self.inner.of_gradient(g, reach))

    def of_rest(self, reach: Tensor, weight: Tensor) -> QuadraticForm:
        return self._through(self.inner.of_rest(reach, weight))

    def signed(self, g: Tensor, reach: Tensor) -> SignedForm:
        return SignedForm(*map(self._through, self.inner.signed(g, reach)))

    def size(self, reach: Tensor) -> Tensor:
        return self.inner.size(reach)

    def shrink(self, small: Tensor, large: Tensor) -> Tensor:
        return self.inner.shrink(small, large)

    def spread(self, r: Tensor) -> Tensor:
        return self.inner.spread(r)

    def collect(self, g: Tensor) -> Tensor:
        return self.inner.collect(g)

    def _through(self, form: QuadraticForm) -> QuadraticForm:
        gain2, off = self.first.gain_B.square(), 2 * self.first.rounding * self.first.gain_B
        return replace(
            form,
            apply=lambda v: self.first.pull(form.apply(self.first.push(v))),
            largest=gain2 * form.largest,
            rounding=2 * (gain2 * form.rounding + off * form.largest),
        )


def behind(first: Expansion, second: Expansion, forms: Forms | None = None) -> Expansion:
    """Expand a map and what follows it as one leaf, of which these forms are all that is known."""
    return Expansion(
        y=second.y,
        gain_B=first.gain_B * second.gain_B,
        beta=unknown,
        remainder=lambda g: unknown,
        pull=lambda g: first.pull(second.pull(g)),
        own_push=lambda v: second.push(first.push(v)),
        rounding_B=chained((first, second)),
        forms=forms,
    )
