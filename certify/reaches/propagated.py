"""Bounds of what remainders of hidden units add to later units.

The input of leaf l changes by A_l G + b_l, b_l what remainders and errors of earlier leaves add to it. Let C >= 0
be diagonal in the units of some leaves, p_ku = C^(1/2) J_k B_k e_u what a remainder of size 1 of unit u of leaf k does
to all of them, and rho_ku at least |p_ku|. A remainder is r = c d^2 / 2 with |c| <= kappa and d = <a, A_k G> + b, so

    |C^(1/2) b|  <=  sum_ku rho_ku |r_ku| + rest  <=  sum_ku c'_ku d_ku^2 + rest,      c' = rho kappa / 2,

and d^2 <= (1 + sigma) <a, A_k G>^2 + (1 + 1 / sigma) b^2. The sum of the c' b^2 is the same question about earlier
leaves; with its largest answer times its answer for G, everything is a form of the image:

    |C^(1/2) b|  <=  sum_ku z_ku <a, A_k G>^2 + rest'.

The sum of lengths looks wasteful, but few units move at once: free vectors r with the lengths that remainders can have
are often four times too long. `rest` is what other leaves and rounding add.

<p_ku, epsilon> is normal for a Gaussian vector epsilon, so that a few pulls measure all |p_ku|. Some may come out too
short, but their sum with the remainders of the worst image seldom does (quantiles.py). Proof: docs/proofs.md#taylor.

Letters: B images, M vectors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from certify.ellipsoids.ellipsoid import Before, Grown
from certify.ellipsoids.joint import IMAGE, Sizes
from certify.ellipsoids.measured import COARSE, PROBE_FAILURE
from certify.reaches.aside import Aside, aside
from certify.reaches.bent import BentEllipsoids
from certify.reaches.forms import kappa, units_at
from certify.shared.quantiles import least_mean_length
from zoo.arithmetic import OUT, broadcast_batch, gamma, nan_to_inf, product
from zoo.bounds.tape import Vectors

VECTORS = 1024  # for rivals; with 256 the rho are a fifth longer
BEFORE = 512  # for earlier leaves
TOGETHER = 16
SIGMA = (1e-3, 10.0)  # range of sigma


@dataclass(frozen=True)
class Propagated:
    """The bound <u, Z u> + rest' of |C^(1/2) b| for some diagonal C, u = G / E, (1, B).

    `z` are the coefficients of Z, and `image` its largest eigenvalue; `rest` is what others add, and `more` the share
    of the rest' of `before`, the same question about earlier leaves.
    """

    z: Vectors
    image: Tensor
    rest: Aside
    most_B: Tensor
    more: Tensor
    before: "Propagated | None"

    def at(self, e_B: Tensor, grown: Grown | Before) -> Tensor:
        """Return the bound within e."""
        return nan_to_inf(product((e_B / self.most_B).square(), self.image) * OUT + self.aside(grown))

    def aside(self, grown: Grown | Before) -> Tensor:
        """Return rest'."""
        found = self.rest.at(grown)
        if self.before is not None:
            found = found + product(self.more, self.before.aside(grown))
        return nan_to_inf(found * OUT)

    def times(self, size: Tensor) -> "Propagated":
        """Return the bound for size^2 C, with sizes (1, B)."""
        z = {at: broadcast_batch(size, of_leaf.shape[2:]) * of_leaf for at, of_leaf in self.z.items()}
        image, more = product(size, self.image), product(size, self.more)
        return replace(self, z=z, image=image, rest=self.rest.times(size), more=more)


def propagated(
    ellipsoids: BentEllipsoids,
    c: Mapping[int, Tensor],
    word: str,
    numbers: Tensor,
    grown: Grown | Before,
    vectors: int = VECTORS,
) -> Propagated:
    """Return the bound for coefficients c (1, B, N, H) >= 0 of the units of some leaves.

    numbers (B, n) are seeds, and `grown` has the bounds of earlier leaves at the largest e.
    """
    joint, most_B = ellipsoids.joint, ellipsoids.joint.most_B
    rest = aside(ellipsoids, c, f"{word} others", numbers)
    units, zero = [k for k in joint.sources(max(c)) if k not in rest.leaves], torch.zeros_like(rest.half)
    if not units:
        return Propagated({}, zero, rest, most_B, zero, None)
    rho = _lengths(ellipsoids, c, units, f"{word} lengths", numbers, vectors)
    bent = {k: 0.5 * kappa_at(ellipsoids, k) * rho[k] for k in units}
    before = propagated(ellipsoids, bent, f"{word} before", numbers, grown, min(vectors, BEFORE))
    most = before.at(most_B, grown)
    sigma = most / _of_image(ellipsoids, bent, f"{word} share", numbers, COARSE).sqrt()
    sigma = sigma.nan_to_num(1.0, 1.0).clamp(*SIGMA)
    more = product(1 + 1 / sigma, most) * OUT
    z = {k: _sum(1 + sigma, of_leaf, more, before.z.get(k)) for k, of_leaf in bent.items()}
    image = _of_image(ellipsoids, z, f"{word} image", numbers, ellipsoids.budget.close)
    return Propagated(z, image, rest, most_B, more, before)


def _of_image(ellipsoids: BentEllipsoids, c: Vectors, word: str, numbers: Tensor, close: float) -> Tensor:
    """Return the largest eigenvalue of the form with coefficients c on the image: (1, B)."""
    forms = {k: units_at(ellipsoids.tape, k).weighted(of_leaf) for k, of_leaf in c.items()}
    scale = ellipsoids.joint.only((IMAGE,), max(c), forms[max(c)].largest)
    return ellipsoids.seminorms(forms, word, [numbers], close, scale).square()


def _sum(share: Tensor, c: Tensor, more: Tensor, z: Tensor | None) -> Tensor:
    """Return share c + more z, for shares (1, B)."""
    found = broadcast_batch(share, c.shape[2:]) * c
    return found if z is None else found + broadcast_batch(more, z.shape[2:]) * z


def kappa_at(ellipsoids: BentEllipsoids, at: int) -> Tensor:
    """Return kappa of a leaf's units: (B, N, H)."""
    reach = ellipsoids.rests[at].reach
    assert reach is not None
    return kappa(units_at(ellipsoids.tape, at), reach)


def _lengths(
    ellipsoids: BentEllipsoids, c: Mapping[int, Tensor], units: list[int], word: str, numbers: Tensor, vectors: int
) -> Vectors:
    """Return rho (1, B, N, H) of the units of some leaves, from so many random vectors."""
    tape, joint, rounding = ellipsoids.tape, ellipsoids.joint, ellipsoids.rounding
    roots = {at: of_leaf.sqrt() for at, of_leaf in c.items()}
    squares, off2_B = Vectors(), torch.zeros_like(joint.most_B)
    for first in range(0, vectors, TOGETHER):
        joining, lengths, off_MB = Vectors(), Sizes(), off2_B.new_zeros(TOGETHER, len(off2_B))
        for at, root in roots.items():
            room = torch.Size([TOGETHER, *root.shape[2:]])
            epsilon = ellipsoids.draw(room, f"{word} {at} {first}", numbers).movedim(1, 0)
            forms = units_at(ellipsoids.tape, at)
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
    least = least_mean_length(vectors, PROBE_FAILURE)
    return {
        k: (found.sqrt() + broadcast_batch(off2_B.sqrt(), found.shape[1:]) / joint.weights[k])[None] * (OUT / least)
        for k, found in squares.items()
    }
