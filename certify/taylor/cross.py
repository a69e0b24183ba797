"""The product of what the image and what remainders of units do to a leaf: third order, with signs.

Let c' be the coefficients of units as in forms.py, and let A_h G + b_h be what unit h sees, b_h the effect of the
remainders r_k of earlier units. Then, with linear functionals Y_k of the image,

    sum_h c'_h (A_h G) b_h  =  sum_k <Y_k, G> r_k  <=  e sum_k |Y_k| |r_k|  <=  sum_k x_k d_k^2 / 2,   x = e |Y| kappa.

The same holds for <A G, C b> with the form C of a leaf without units. This is a form of units k, whereas (A_h G)^2
and b_h^2 one by one forget that the effects of a remainder on later units cancel in Y.

A push of a Gaussian vector G and a pull give <Y_k, G> of all units, and so measure all |Y_k|, as in propagated.py. The
pushed vectors serve all rivals. Proof: docs/proofs.md#taylor.

Letters: B images, C rivals of each, M vectors.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from certify.ellipsoids.measured import PROBE_FAILURE
from certify.reaches.bent import BentEllipsoids
from certify.reaches.forms import Curvature, smooth_leaves, units_at
from certify.reaches.propagated import TOGETHER, kappa_at
from certify.shared.quantiles import least_mean_length
from zoo.arithmetic import OUT, broadcast_batch, product
from zoo.bounds.contracts import QuadraticForm
from zoo.bounds.tape import Vectors

VECTORS = 256


def crossed(
    ellipsoids: BentEllipsoids,
    units: Sequence[Mapping[int, Curvature]],
    others: Sequence[Mapping[int, QuadraticForm]],
    off_CB: Tensor,
) -> list[Vectors]:
    """Return x (1, B, N, H) of all units that others follow, at the largest e, for some rivals.

    These have coefficients of the units of the same leaves, and the forms C of others. `off_CB` bounds the error of
    torch's product with all of them, for vectors of length 1.
    """
    joint, last = ellipsoids.joint, max(units[0].keys() | others[0].keys())
    smooth = smooth_leaves(ellipsoids.tape)
    before = [k for k in joint.sources(last) if k in smooth]
    squares, length2_B = [Vectors() for _ in units], torch.zeros_like(joint.most_B)
    if not before:
        return squares
    for first in range(0, VECTORS, TOGETHER):
        room = torch.Size([TOGETHER, joint.images[0].numel()])
        u = ellipsoids.draw(room, f"crossed {first}", joint.most_B[:, None]).movedim(1, 0)
        length2_B = length2_B + u.square().sum((0, 2))
        d, v = _moved(ellipsoids, units[0].keys(), others[0].keys(), u)
        for of_units, forms, found in zip(units, others, squares, strict=True):
            joining = {at: of_leaf.pulled(d[at]) for at, of_leaf in of_units.items()}
            y = joint.pull(joining | {at: form.apply(v[at]) for at, form in forms.items()}, last)
            for k in before:
                found[k] = joint.piece(y, k, last).square().sum(0) + found.get(k, 0.0)
    ellipsoids.failure += PROBE_FAILURE * len(units)
    far_CB = product(off_CB, length2_B.sqrt())
    return [_bounds(ellipsoids, found, far_B) for found, far_B in zip(squares, far_CB, strict=True)]


def _moved(
    ellipsoids: BentEllipsoids, units: Collection[int], others: Collection[int], u: Tensor
) -> tuple[Vectors, Vectors]:
    """Return the changes (M, B, N, H) of units, and those of the inputs of others, for u (M, B, n) of the image."""
    joint, last, d, inputs = ellipsoids.joint, max({*units, *others}), Vectors(), Vectors()

    def visit(at: int, v: Tensor) -> None:
        if at in units:
            d[at] = units_at(ellipsoids.tape, at).units(v)
        elif at in others:
            inputs[at] = v

    joint.push(pad(u, (0, joint.room(last) - u.shape[-1])), visit, last)
    return d, inputs


def _bounds(ellipsoids: BentEllipsoids, squares: Vectors, far_B: Tensor) -> Vectors:
    """Return x (1, B, N, H) of one rival from the sums of the squares of all <Y, G>, each sum off by at most far^2."""
    least = least_mean_length(VECTORS, PROBE_FAILURE)
    return {
        k: product(kappa_at(ellipsoids, k), found.sqrt() + broadcast_batch(far_B, found.shape[1:]))[None]
        * (OUT / least / ellipsoids.joint.weights[k])
        for k, found in squares.items()
    }
