"""The product of what the image and what remainders do to a unit: third order, with signs.

Let c' be the coefficients of units as in forms.py, and let A_h G + b_h be what unit h sees, b_h the effect of the
remainders r_k of earlier units. Then, with linear functionals Y_k of the image,

    sum_h c'_h (A_h G) b_h  =  sum_k <Y_k, G> r_k  <=  e sum_k |Y_k| |r_k|  <=  sum_k x_k d_k^2 / 2,   x = e |Y| kappa.

This is a form of the units k, whereas (A_h G)^2 and b_h^2 one by one forget that the effects of a remainder on
later units cancel in Y.

A push of a Gaussian vector G and a pull give <Y_k, G> of all units, and so measure all |Y_k|, as in propagated.py. The
pushed vectors serve all rivals. Proof: docs/proofs.md#taylor.

Letters: B images, C rivals of each, M vectors.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from certify.image.measured import PROBE_FAILURE
from certify.shared.quantiles import least_mean_length
from certify.taylor.bent import BentEllipsoids
from certify.taylor.forms import Curvature, smooth_leaves, units_at
from certify.taylor.propagated import TOGETHER, kappa_at
from zoo.arithmetic import OUT, broadcast_batch, product
from zoo.bounds.tape import Vectors

VECTORS = 256


def crossed(ellipsoids: BentEllipsoids, rivals: Sequence[Mapping[int, Curvature]], off_CB: Tensor) -> list[Vectors]:
    """Return x (1, B, N, H) of all units that others follow, at the largest e, for each of these rivals.

    `rivals` have the coefficients of the same leaves. `off_CB` bounds the error of torch's product with the forms of
    the units, for vectors of length 1.
    """
    joint, last = ellipsoids.joint, max(rivals[0])
    smooth = smooth_leaves(ellipsoids.tape)
    before = [k for k in joint.sources(last) if k in smooth]
    squares, length2_B = [Vectors() for _ in rivals], torch.zeros_like(joint.most_B)
    if not before:
        return squares
    for first in range(0, VECTORS, TOGETHER):
        room = torch.Size([TOGETHER, joint.images[0].numel()])
        u = ellipsoids.draw(room, f"crossed {first}", joint.most_B[:, None]).movedim(1, 0)
        length2_B = length2_B + u.square().sum((0, 2))
        d = _of_units(ellipsoids, rivals[0].keys(), u)
        for units, found in zip(rivals, squares, strict=True):
            y = joint.pull({at: of_leaf.pulled(d[at]) for at, of_leaf in units.items()}, last)
            for k in before:
                found[k] = joint.piece(y, k, last).square().sum(0) + found.get(k, 0.0)
    ellipsoids.failure += PROBE_FAILURE * len(rivals)
    far_CB = product(off_CB, length2_B.sqrt())
    return [_bounds(ellipsoids, found, far_B) for found, far_B in zip(squares, far_CB, strict=True)]


def _of_units(ellipsoids: BentEllipsoids, leaves: Collection[int], u: Tensor) -> Vectors:
    """Return the changes (M, B, N, H) of the units of some leaves for vectors u (M, B, n) of the image."""
    joint, last, d = ellipsoids.joint, max(leaves), Vectors()

    def visit(at: int, v: Tensor) -> None:
        if at in leaves:
            d[at] = units_at(ellipsoids.tape, at).units(v)

    joint.push(pad(u, (0, joint.room(last) - u.shape[-1])), visit, last)
    return d


def _bounds(ellipsoids: BentEllipsoids, squares: Vectors, far_B: Tensor) -> Vectors:
    """Return x (1, B, N, H) of one rival from the sums of the squares of all <Y, G>, each sum off by at most far^2."""
    least = least_mean_length(VECTORS, PROBE_FAILURE)
    return {
        k: product(kappa_at(ellipsoids, k), found.sqrt() + broadcast_batch(far_B, found.shape[1:]))[None]
        * (OUT / least / ellipsoids.joint.weights[k])
        for k, found in squares.items()
    }
