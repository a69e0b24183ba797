"""Bounds of what remainders of hidden units add to later units.

The input of leaf l changes by A_l G + b_l, b_l what remainders and errors of earlier leaves add to it. Let C >= 0
be diagonal in the units of some leaves, p_ku = C^(1/2) J_k B_k e_u what a remainder of size 1 of unit u of leaf k does
to all of them, and rho_ku >= |p_ku|. A remainder is r = c d^2 / 2 with |c| <= kappa and d = <a, A_k G> + b, so

    |C^(1/2) b|  <=  sum_ku rho_ku |r_ku| + rest  <=  ( e lambda^(1/2) + |C'^(1/2) b| )^2 + rest,

lambda the largest eigenvalue of sum_k A_k^T C'_k A_k with C' = rho kappa / 2, and |C'^(1/2) b| the same question about
earlier leaves. The sum of lengths looks wasteful, but few units move at once: free vectors r with the lengths
that remainders can have are often four times too long. `rest` is what other leaves and rounding add.

<p_ku, epsilon> is normal for a Gaussian vector epsilon: a few pulls bound all rho_ku, as in ellipsoid.py. Proof:
docs/proofs.md#taylor.

Letters: B images, C rivals of each (1 while a bound is computed), M vectors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from certify.image.ellipsoid import COARSE, PROBE_FAILURE, Before, Ellipsoids, Grown
from certify.image.joint import IMAGE, Sizes
from certify.image.quantiles import least_square_sum
from certify.taylor.forms import kappa, smooth_leaves, smooth_units
from zoo.arithmetic import OUT, broadcast_batch, gamma, nan_to_inf, product
from zoo.bounds.contracts import QuadraticForm
from zoo.bounds.elementwise import UnitForms
from zoo.bounds.tape import Vectors

VECTORS = 1024  # for rivals; with 256 the rho are a quarter longer, and the bound twice as large
BEFORE = 256  # for earlier leaves, which matter less
TOGETHER = 16


@dataclass(frozen=True)
class Propagated:
    """The bound of |C^(1/2) b| for some diagonal C, (C, B).

    `image` is e lambda^(1/2) at the largest e, `before` the same question about earlier leaves, and `rest` bounds what
    others add for sources of length 1.
    """

    image: Tensor
    before: "Propagated | None"
    rest: Tensor
    others: tuple[int, ...]
    most_B: Tensor

    def at(self, e_B: Tensor, grown: Grown | Before) -> Tensor:
        """Return the bound within e."""
        of_units = self.image * (e_B / self.most_B)
        if self.before is not None:
            of_units = of_units + self.before.at(e_B, grown)
        return nan_to_inf((of_units.square() + product(self.rest, self.free_B(grown).sqrt())) * OUT)

    def times(self, size: Tensor) -> "Propagated":
        """Return the bound for size^2 C, with sizes (C, B)."""
        root = size.sqrt()
        before = None if self.before is None else self.before.times(root)
        return replace(self, image=product(root, self.image), before=before, rest=product(size, self.rest))

    def free_B(self, grown: Grown | Before) -> Tensor:
        """Return the square of the length of all other sources: (B,)."""
        return length2_of(self.others, grown)


def length2_of(others: tuple[int, ...], grown: Grown | Before) -> Tensor:
    """Return the square of the length of these sources and of errors: (B,)."""
    return sum((grown.theta[k] for k in others), grown.theta_0_B)


def others_before(ellipsoids: Ellipsoids, at: int) -> tuple[int, ...]:
    """Return the leaves without units that reach leaf `at`."""
    smooth = smooth_leaves(ellipsoids.tape)
    return tuple(k for k in ellipsoids.joint.sources(at) if k not in smooth)


def propagated(
    ellipsoids: Ellipsoids, c: Mapping[int, Tensor], word: str, numbers: Tensor, vectors: int = VECTORS
) -> Propagated:
    """Return the bound for coefficients c (1, B, N, H) >= 0 of the units of some leaves; numbers (B, n) are seeds."""
    joint = ellipsoids.joint
    forms = {at: units_at(ellipsoids, at).weighted(of_leaf) for at, of_leaf in c.items()}
    others = others_before(ellipsoids, max(c))
    units = [k for k in joint.sources(max(c)) if k not in others]
    zero = torch.zeros_like(forms[max(c)].largest)
    rest = aside(ellipsoids, forms, others, f"{word} others", numbers)
    if not units:
        return Propagated(zero, None, rest, others, joint.most_B)
    rho = _lengths(ellipsoids, c, units, f"{word} lengths", numbers, vectors)
    curved = {k: 0.5 * kappa_at(ellipsoids, k) * rho[k] for k in units}
    of_image = {k: units_at(ellipsoids, k).weighted(of_leaf) for k, of_leaf in curved.items()}
    image = ellipsoids.seminorms(
        of_image,
        f"{word} image",
        [numbers],
        ellipsoids.budget.close,
        ellipsoids.joint.only((IMAGE,), max(curved), zero),
    )
    before = propagated(ellipsoids, curved, f"{word} before", numbers, min(vectors, BEFORE))
    return Propagated(image, before, rest, others, joint.most_B)


def units_at(ellipsoids: Ellipsoids, at: int) -> UnitForms:
    forms = smooth_units(ellipsoids.tape.leaves[at].forms)
    assert forms is not None
    return forms


def kappa_at(ellipsoids: Ellipsoids, at: int) -> Tensor:
    """Return kappa of a leaf's units: (B, N, H)."""
    reach = ellipsoids.rests[at].reach
    assert reach is not None
    return kappa(units_at(ellipsoids, at), reach)


def aside(
    ellipsoids: Ellipsoids,
    forms: Mapping[int, QuadraticForm],
    others: tuple[int, ...],
    word: str,
    numbers: Tensor,
) -> Tensor:
    """Return the largest |C^(1/2) H| for sources of length 1 at other leaves, and errors: (1, B)."""
    if not others:  # errors alone are small enough for a crude bound
        crude = [form.largest.sqrt() * ellipsoids.rounding.sizes[at] for at, form in forms.items()]
        return nan_to_inf(torch.stack(crude).sum(0) * OUT)
    scale = ellipsoids.joint.only(others, max(forms), forms[max(forms)].largest)
    return ellipsoids.seminorms(forms, word, [numbers], COARSE, scale)


def free(ellipsoids: Ellipsoids, forms: Mapping[int, QuadraticForm], word: str, numbers: Tensor) -> Tensor:
    """Return the largest (sum <H, C H>)^(1/2) for sources of length 1 other than the image: (1, B)."""
    last = max(forms)
    scale = ellipsoids.joint.only(ellipsoids.joint.sources(last), last, forms[last].largest)
    return ellipsoids.seminorms(forms, word, [numbers], COARSE, scale)


def _lengths(
    ellipsoids: Ellipsoids, c: Mapping[int, Tensor], units: list[int], word: str, numbers: Tensor, vectors: int
) -> Vectors:
    """Return rho (1, B, N, H) of the units of some leaves, from so many random vectors."""
    tape, joint, rounding = ellipsoids.tape, ellipsoids.joint, ellipsoids.rounding
    roots = {at: of_leaf.sqrt() for at, of_leaf in c.items()}
    count, squares, off2_B = sum(tape.rooms[k].numel() for k in units), Vectors(), torch.zeros_like(joint.most_B)
    for first in range(0, vectors, TOGETHER):
        joining, lengths, off_MB = Vectors(), Sizes(), off2_B.new_zeros(TOGETHER, len(off2_B))
        for at, root in roots.items():
            room = torch.Size([TOGETHER, *root.shape[2:]])
            epsilon = ellipsoids.draw(room, f"{word} {at} {first}", numbers).movedim(1, 0)
            forms = units_at(ellipsoids, at)
            joining[at] = forms.units_T(epsilon * root)
            length_MB = torch.linalg.vector_norm(epsilon.flatten(2), dim=-1) * root.flatten(2).amax(-1)
            share = gamma(forms.terms + 8) * forms.absolute
            off_MB = off_MB + product(length_MB * share, rounding.sizes[at])

        def visit(at: int, g: Tensor, lengths: Sizes = lengths) -> None:
            lengths[at] = torch.linalg.vector_norm(g.flatten(2), dim=-1)

        _, seen = tape.pull(None, joining, units, visit, min(units))
        off2_B = off2_B + (off_MB + rounding.of_gradients(lengths)).square().sum(0)
        for k in units:
            squares[k] = tape.collected(seen, k).square().sum(0) + squares.get(k, 0.0)
    ellipsoids.failure += PROBE_FAILURE
    share = least_square_sum(vectors, PROBE_FAILURE / count)
    return {
        k: (found.sqrt() + broadcast_batch(off2_B.sqrt(), found.shape[1:]) / joint.weights[k])[None]
        * (OUT / share**0.5)
        for k, found in squares.items()
    }
