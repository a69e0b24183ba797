"""The set that the ball of images reaches at every leaf: an ellipsoid, the image of one ball under a linear map.

The change H_i of the input of leaf i is linear in the image's change G, in the remainders of earlier leaves, and in the
errors d_n at their outputs (rounding),

    H_i = A_i G + sum_{k<i} J_{k->i} B_k r_k + sum_{n<i} J_{n->i} d_n = M_i u,    u = (G / E, r_k / W_k, d_n / w_n),

with weights W_k > 0, entry by entry, and w_n > 0, that may be chosen freely (weights.py), and E the largest radius that
is asked for. Every leaf has a w_n, with or without an error: torch computes M_i u for a slightly different u
(rounding.py). With |G| <= e <= E, |r_k / W_k|^2 <= theta_k(e) and sum_n |d_n / w_n|^2 <= theta_0,

    |u|^2 <= Theta_i(e) = (e / E)^2 + theta_0 + sum_{k<i} theta_k(e),

theta_0 that of the errors before leaf i, so a functional <a, H_i> stays within |M_i^T a| Theta_i^(1/2), and a form
within lambda_max(M_i^T C M_i) Theta_i. A bound of |H_i| from elsewhere also bounds both. The weights in M_i are fixed
before any of the random vectors that measure M_i is drawn; proved bounds of remainders enter Theta alone. Proof:
docs/proofs.md#image-forms.

Letters: B images, C rivals of each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from certify.ellipsoids.columns import Columns
from certify.ellipsoids.joint import Joint, Sizes
from certify.ellipsoids.measured import COARSE, Draw, MeasuredMaps
from zoo.arithmetic import OUT, broadcast_batch, nan_to_inf, product
from zoo.bounds.contracts import Bound, Forms, QuadraticForm
from zoo.bounds.tape import Vectors

COUNTS = 1e-3  # theta_0 that the growth of a node's error on the way adds

Known = Callable[[Tensor], Sizes]  # e (B,) -> bounds of |H_i| within e for some leaves, from elsewhere
Off = Callable[[int, Tensor], Tensor]  # node, r (B,) -> error at its end for inputs within r: (B,)


@dataclass(frozen=True)
class Grown:
    """The bounds at one e.

    `before` is Theta before every nonlinear leaf, `theta` that of each leaf, `third` what a subclass knows of leaves,
    `sizes` bounds of |H| for some leaves, `defects` the errors at the ends of nodes, `theta_0` that of the errors
    before every leaf, and `whole_B` Theta of everything.
    """

    before: Sizes
    theta: Sizes
    third: Sizes
    sizes: Sizes
    defects: Sequence[Tensor]
    theta_0: Sizes
    whole_B: Tensor


@dataclass(frozen=True)
class Before:
    """The bounds before a leaf at one e.

    `total_B` is Theta, `before` that of each earlier leaf, `theta` that of its remainder, `theta_0` that of the errors
    before every leaf so far, and `sizes` bounds of |H| for some leaves. `third` is what a subclass knows of earlier
    leaves.
    """

    e_B: Tensor
    total_B: Tensor
    before: Sizes
    theta: Sizes
    theta_0: Sizes
    sizes: Sizes
    third: Sizes


@dataclass(frozen=True)
class Rest:
    """The bound of |r / W| of a leaf at the largest e.

    `norm_B` is the seminorm of the leaf's form for Theta = 1, or that of |H| for a leaf without forms; `reach` is the
    reach of its functionals there, `form` the form, and `constant_B` its constant.
    """

    norm_B: Tensor
    reach: Tensor | None
    form: QuadraticForm | None
    constant_B: Tensor


@dataclass(frozen=True)
class Margins:
    """The largest costs of remainders for the margins of some rivals.

    `norm` and `constant`, (C, B), are the cost of remainders with forms; `bounds` are those of leaves without a form.
    """

    norm: Tensor
    constant: Tensor
    last: int  # leaf with a form
    bounds: Mapping[int, Bound]
    forms: Mapping[int, QuadraticForm]
    numbers: Sequence[Tensor]  # seeds of the random starts, one tensor per rival


class Ellipsoids(MeasuredMaps):
    """The ellipsoids of all leaves around a batch of clean images."""

    def __init__(self, joint: Joint, draw: Draw, known: Known, off: Off, first: Columns | None) -> None:
        super().__init__(joint, draw, first)
        self._known, self._off = known, off
        self._norms = {} if self.budget.large else self._norms_of_sizes()
        self.rests, self._inputs = dict[int, Rest](), dict[int, Tensor]()

        def measured(at: int, known: Before) -> Tensor:
            self.rests[at] = self._rest(at, known)
            return self._theta(at, known)

        self.most = self._grow(self.most_B, measured)

    def _norms_of_sizes(self) -> Sizes:
        """Return ||M_i|| of leaves with an infinite reach; elsewhere the reaches of single coordinates are enough."""
        return {at: self.norm_of(at) for at, length in self.lengths_of.items() if bool(torch.isinf(length).any())}

    def at(self, eps_B: Tensor) -> Grown:
        """Return the bounds for eps <= the largest."""
        return self._grow(eps_B, self._theta)

    def _grow(self, eps_B: Tensor, theta_of: Callable[[int, Before], Tensor]) -> Grown:
        """Compute the bounds node by node: the error at the end of a node depends on how far its input moves."""
        before, theta, third, theta_0 = Sizes(), Sizes(), Sizes(), Sizes()
        defects, sizes = list[Tensor](), self._known(eps_B)
        total_B, errors_B = (eps_B / self.most_B).square(), torch.zeros_like(self.most_B)
        for node, leaves in enumerate(self.tape.of_nodes):
            theta_0 |= dict.fromkeys(leaves, errors_B)
            radius_B = self._moved(node, total_B, sizes)
            defects.append(self._off(node, radius_B))
            for at in leaves:
                if at in self.tape.nonlinear:
                    known = Before(eps_B, total_B, dict(before), dict(theta), dict(theta_0), sizes, third)
                    before[at], theta[at] = total_B, theta_of(at, known)
                    total_B = total_B + theta[at]
            square_B = nan_to_inf(defects[-1] / self.joint.noise.weights[leaves[-1]]).square() * OUT
            total_B, errors_B = total_B + square_B, errors_B + square_B
        return Grown(before, theta, third, sizes, defects, theta_0, total_B)

    def _moved(self, node: int, total_B: Tensor, sizes: Sizes) -> Tensor:
        """Bound how far the input of a node moves, for the error at its end: (B,).

        ||M_i|| is measured for a node whose error grows so much on the way that a closer radius pays for itself.
        """
        at = self.tape.of_nodes[node][0]
        radius_B = product(self.rounding.sizes[at], total_B.sqrt()) * OUT
        radius_B = torch.fmin(radius_B, sizes[at]) if at in sizes else radius_B
        if node not in self._inputs:
            self._inputs[node] = self._norm_of_input(node, radius_B)
        return torch.fmin(radius_B, product(self._inputs[node], total_B.sqrt()) * OUT)

    def _norm_of_input(self, node: int, radius_B: Tensor) -> Tensor:
        """Return ||M_i|| of a node's input, or infinity where it is not worth its time: (B,)."""
        leaves = self.tape.of_nodes[node]
        grows_B = self._off(node, radius_B) - self._off(node, torch.zeros_like(radius_B))
        counts_B = nan_to_inf(grows_B / self.joint.noise.weights[leaves[-1]]).square() > COUNTS
        if self.budget.large or not bool(counts_B.any()):
            return torch.full_like(radius_B, torch.inf)
        return torch.where(counts_B, self.norm_of(leaves[0]), torch.inf)  # image by image: independent of the others

    def margins(self, g: Vectors, class_CB: Tensor) -> Margins:
        """Return the costs for the margins over these classes.

        g (C, B, *y) are their gradients at the outputs of the nonlinear leaves. Forms are those of `of_gradient`.
        """
        return self._margins(class_CB, *self._of_gradients(g, signed=False))

    def signed_margins(self, g: Sequence[Vectors], class_CB: Tensor) -> list[Margins]:
        """Return `margins` with the absolute forms of `signed`, rival by rival; norms are measured together."""
        together = {at: torch.cat([of_one[at] for of_one in g]) for at in g[0]}
        whole = self._margins(class_CB, *self._of_gradients(together, signed=True))
        found = list[Margins]()
        for k, of_one in enumerate(g):
            forms, bounds = self._of_gradients(of_one, signed=True)
            costs = whole.norm[k : k + 1], whole.constant[k : k + 1]
            found.append(Margins(*costs, whole.last, bounds, forms, whole.numbers[k : k + 1]))
        return found

    def _margins(self, class_CB: Tensor, forms: Mapping[int, QuadraticForm], bounds: Mapping[int, Bound]) -> Margins:
        zero = torch.zeros_like(self.most_B).expand(class_CB.shape)
        numbers = [torch.stack([self.most_B, class_B.to(self.most_B)], 1) for class_B in class_CB]
        if not forms:
            return Margins(zero, zero, self.tape.nonlinear[-1], bounds, forms, numbers)
        norm = self.seminorms(forms, "margin", numbers, COARSE)
        constant = torch.stack([zero + form.constant for form in forms.values()]).sum(0)
        return Margins(norm, constant, max(forms), bounds, forms, numbers)

    def _of_gradients(self, g: Vectors, signed: bool) -> tuple[dict[int, QuadraticForm], dict[int, Bound]]:
        """Return the forms for gradients at leaves, and the bounds of leaves without any."""
        forms, bounds = dict[int, QuadraticForm](), dict[int, Bound]()
        for at in self.tape.nonlinear:
            leaf, reach = self.tape.leaves[at], self.rests[at].reach
            if leaf.forms is None or reach is None:
                bounds[at] = leaf.remainder(g[at])
            else:
                of_leaf = leaf.forms
                forms[at] = of_leaf.signed(g[at], reach).absolute if signed else of_leaf.of_gradient(g[at], reach)
        return forms, bounds

    def cost(self, margins: Margins, grown: Grown) -> Tensor:
        """Bound what remainders can cost of the margins: (C, B)."""
        half = 0.5 * product(margins.norm.square(), grown.before[margins.last])
        return nan_to_inf(half) + self.beside_forms(margins, grown)

    def beside_forms(self, margins: Margins, grown: Grown) -> Tensor:
        """Return the part of `cost` from constants and from leaves without a form."""
        bounds = (bound(self._radius(at, grown.before[at], grown.sizes)) for at, bound in margins.bounds.items())
        return sum((nan_to_inf(bound) for bound in bounds), nan_to_inf(margins.constant))

    def held(self, at: int) -> Tensor:
        """Return 1 where a leaf's remainder is bounded best by its form alone, at the largest e, else 0: (B,)."""
        rest, before_B = self.rests[at], self.most.before[at]
        if rest.form is None:
            return torch.zeros_like(self.most_B)
        closest_B = product(rest.norm_B.square(), before_B) <= self.most.theta[at]
        return (closest_B & (rest.constant_B == 0)).to(self.most_B)

    def end(self, grown: Grown) -> Tensor:
        """Bound how far the features move, without the last node's own error: (B,).

        Infinite where the last leaf is nonlinear or ends in a sum.
        """
        if self.tape.nonlinear[-1] == max(self.tape.leaves) or self.tape.ends_in_sum:
            return torch.full_like(self.most_B, torch.inf)
        return product(self._norm_of_end, self.whole(grown))

    @cached_property
    def _norm_of_end(self) -> Tensor:
        at = max(self.tape.leaves)
        leaf = self.tape.leaves[at]
        moved = 3 * leaf.rounding * (leaf.gain_B + leaf.rounding)
        whole = {at: QuadraticForm(lambda v: leaf.pull(leaf.push(v)), self.joint.ones_B[None], rounding=moved[None])}
        return self.seminorms(whole, "end", [self.most_B[:, None]], COARSE)[0]

    def lengths(self, g: Vectors) -> Vectors:
        """Return |W_k B_k^T g_k| of all nonlinear leaves, (C, B).

        Times theta^(1/2), this bounds the cost of remainders. The rounding of B_k^T is a part of `slip`.
        """
        return {
            at: torch.linalg.vector_norm((self.tape.collected(g, at) * self.joint.weights[at]).flatten(2), dim=-1)
            for at in self.tape.nonlinear
        }

    def slip(self, lengths: Sizes) -> Tensor:
        """Bound the cost of the rounding of gradients for a margin at |u| = 1: (C, B).

        `lengths` (C, B) are those of the gradients at the outputs of all leaves.
        """
        return self.rounding.of_gradients(lengths)

    def whole(self, grown: Grown) -> Tensor:
        """Bound |u|, including everything that moves any leaf: (B,)."""
        return grown.whole_B.sqrt()

    def _theta(self, at: int, known: Before) -> Tensor:
        """Return theta of a leaf; the bound at the largest e holds below it, and shrinks."""
        leaf, rest, sizes = self.tape.leaves[at], self.rests[at], known.sizes
        if leaf.forms is None or rest.reach is None or rest.form is None:
            weight_B = self.joint.weights[at].flatten(1).amin(1)
            return nan_to_inf(leaf.beta(self._radius(at, known.total_B, sizes)) / weight_B).square()
        square_B = nan_to_inf(product(rest.norm_B.square(), known.total_B))
        if at in sizes:
            square_B = torch.fmin(square_B, product(rest.form.largest[0], sizes[at].square()))
        square_B = square_B + rest.constant_B
        return nan_to_inf(product(square_B, leaf.forms.shrink(self._reach(at, known), rest.reach)))

    def _rest(self, at: int, known: Before) -> Rest:
        leaf = self.tape.leaves[at]
        if leaf.forms is None:
            return Rest(self.norm_of(at), None, None, torch.zeros_like(self.most_B))
        reach = self._reach(at, known)
        form = leaf.forms.of_rest(reach, 1 / self.joint.weights[at])
        norm_B = self.seminorms({at: form}, f"rest {at}", [self.most_B[:, None]], self.budget.close)[0]
        return Rest(norm_B, reach, form, (form.constant + torch.zeros_like(form.largest))[0])

    def _radius(self, at: int, total_B: Tensor, sizes: Sizes) -> Tensor:
        """Bound |H_i| (B,)."""
        radius_B = product(self.rests[at].norm_B, total_B.sqrt())
        return torch.fmin(radius_B, sizes[at]) if at in sizes else radius_B

    def _reach(self, at: int, known: Before) -> Tensor:
        """Bound the functionals of a leaf's forms (B, ...)."""
        forms, length, root_B = self.tape.leaves[at].forms, self.lengths_of[at], known.total_B.sqrt()
        assert forms is not None
        reach = product(length, broadcast_batch(root_B, length.shape[1:]))
        if at in self._norms:
            reach = within(product(self._norms[at], root_B), forms, reach)
        return within(known.sizes[at], forms, reach) if at in known.sizes else reach


def within(size_B: Tensor, forms: Forms, reach: Tensor) -> Tensor:
    """Return the reaches of functionals (B, ...), none larger than its length times |H|."""
    return torch.fmin(reach, forms.sizes * broadcast_batch(size_B, reach.shape[1:]))
