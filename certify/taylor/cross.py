"""The product of what the image and what remainders do to a unit: third order, with signs.

Let c' be the coefficients of units as in forms.py, and let A_h G + b_h be what unit h sees, b_h the effect of the
remainders r_k of earlier units. Then, with linear functionals Y_k of the image,

    sum_h c'_h (A_h G) b_h  =  sum_k <Y_k, G> r_k  <=  e sum_k |Y_k| |r_k|  <=  sum_k x_k d_k^2 / 2,   x = e |Y| kappa.

This is a form of the units k, whereas (A_h G)^2 and b_h^2 one by one forget that the effects of a remainder on
later units cancel in Y.

A push of a Gaussian vector G and a pull give <Y_k, G> of all units, and so measure all |Y_k|, as in propagated.py.
Proof: docs/proofs.md#taylor.

Letters: B images, C rivals of each, M vectors.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from certify.image.ellipsoid import PROBE_FAILURE, Ellipsoids
from certify.image.quantiles import least_mean_length
from certify.taylor.forms import Curvature, smooth_leaves
from certify.taylor.propagated import TOGETHER, kappa_at
from zoo.arithmetic import OUT, broadcast_batch, product
from zoo.bounds.tape import Vectors

VECTORS = 256


def crossed(ellipsoids: Ellipsoids, units: Mapping[int, Curvature], off: Tensor, word: str, numbers: Tensor) -> Vectors:
    """Return x (1, B, N, H) of all units that others follow, at the largest e; numbers (B, n) are seeds.

    `off` (1, B) bounds the error of torch's product with the forms of the units, for vectors of length 1.
    """
    joint, last = ellipsoids.joint, max(units)
    smooth = smooth_leaves(ellipsoids.tape)
    before = [k for k in joint.sources(last) if k in smooth]
    if not before:
        return Vectors()
    squares, length2_B = Vectors(), torch.zeros_like(joint.most_B)
    for first in range(0, VECTORS, TOGETHER):
        room = torch.Size([TOGETHER, joint.images[0].numel()])
        u = ellipsoids.draw(room, f"{word} {first}", numbers).movedim(1, 0)
        length2_B = length2_B + u.square().sum((0, 2))
        y = _pulled(ellipsoids, units, u)
        for k in before:
            squares[k] = joint.piece(y, k, last).square().sum(0) + squares.get(k, 0.0)
    ellipsoids.failure += PROBE_FAILURE
    least, far = least_mean_length(VECTORS, PROBE_FAILURE), product(off, length2_B.sqrt())
    return {
        k: product(kappa_at(ellipsoids, k), found.sqrt() + broadcast_batch(far, found.shape[1:]))
        * (OUT / least / joint.weights[k])
        for k, found in squares.items()
    }


def _pulled(ellipsoids: Ellipsoids, units: Mapping[int, Curvature], u: Tensor) -> Tensor:
    """Return M^T C' M u for vectors u (M, B, n) of the image: (M, B, n)."""
    joint, last, joining = ellipsoids.joint, max(units), Vectors()

    def visit(at: int, v: Tensor) -> None:
        if at in units:
            joining[at] = units[at].apply(v)

    joint.push(pad(u, (0, joint.room(last) - u.shape[-1])), visit, last)
    return joint.pull(joining, last)
