"""The weights W_k of ellipsoid.py, estimated with a few vectors.

All numbers here are estimates; any positive weights are sound.

The bounded quantity is a seminorm |F G + sum_k F_k r_k|, with r_k anywhere where |r_k / W_k|^2 <= theta_k. The product
of |F_k W_k| and |r_k / W_k|, in Frobenius norms, is smallest for W_u^2 = |r_u| / |F_u|, entry by entry. Let a_k be the
part of leaf k's remainder in the seminorm, relative to that of the image. For theta_k proportional to a_k,

    (sum_k a_k)^2 = (sum_k a_k^2 / theta_k) (sum_k theta_k).

Both a_k and theta_k depend on the weights of earlier leaves. They are therefore estimated twice: a theta_k that is
overestimated tenfold gives an oversized W_k, which loosens the bound tenfold. Where the bounds know the second order
of units, only what is left of their remainders costs by theta_k, which may be larger for it.

Letters: B images, M random vectors.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from certify.ellipsoids.budget import budget
from certify.ellipsoids.ellipsoid import Known, Off
from certify.ellipsoids.joint import IMAGE, NOISE, Joint, Noise, Sizes
from certify.ellipsoids.measured import SIZES, Draw
from certify.ellipsoids.rounding import ALLOWED, Rounding
from certify.ellipsoids.samples import LENGTHS, Samples
from zoo.arithmetic import U, broadcast_batch
from zoo.bounds.contracts import QuadraticForm
from zoo.bounds.elementwise import smooth_units
from zoo.bounds.tape import Tape, Vectors

THETA = (0.002, 1.0)  # range of theta
THETA_0 = (1e-8, 1.0)  # range of theta_0; the errors of the exact function are tiny
UNKNOWN = 0.01  # theta_0 where there is no form to compare with
QUIET = 0.05  # smallest part of the noise in the seminorm, as room for rounding, relative to that of the image
ROOM = 0.8  # share of the allowed rounding that the maps may be expected to take
FLOOR = 1e-3  # the same relative to |M_i|, where there is no form
GUESS = 0.1  # theta while it is unknown
FREER = 2.0  # theta of units of a known second order over their part; cert_stem_vit_c10 loses 3 to 8 % less by it
LEAST_THETA = 1e-12  # smallest estimate, so that weights do not vanish
SEEN = 4.0  # most that a remainder adds, relative to what it adds where the image moves, approximately
ALIGNED = 0.75  # share of remainders that acts in the direction of the first order
LEAST = 0.1  # smallest entry, relative to the mean
LEAST_RADIUS = 1e-3  # smallest estimated radius, relative to the largest; the result where maps diverge
MOVED = 0.3  # |M_i| relative to its Frobenius norm, approximately
WEIGHTS = (1e-100, 1e30)  # range of weights; finite even where an estimate diverges


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The forms of one margin of each image, and how strongly they see each source.

    `image_B` is the part of the image, `pulled` the sensitivity |B_k^T J^T C A G| to each leaf, entry by entry, and
    `energy_B` <A G, C A G>, for random changes G. Without forms all of it is empty.
    """

    forms: Mapping[int, QuadraticForm]
    image_B: Tensor
    pulled: Vectors
    energy_B: Tensor


@dataclass(frozen=True, kw_only=True)
class WeightEstimate:
    """The weights W_k (B, ...) of all nonlinear leaves.

    `lengths` are the |M_i| of the inputs of all leaves, in the Frobenius norm. `parts` are those of the image and of
    the remainders in the seminorm of the margin's forms, if there are forms.
    """

    samples: Samples
    forms: Mapping[int, QuadraticForm]
    weights: dict[int, Tensor]
    lengths: Sizes
    parts: Sizes

    def joint(self, off: Off) -> Joint:
        """Return the maps with these weights, and with w_n for the expected errors at the ends of nodes."""
        nodes = enumerate(self.samples.tape.of_nodes)
        defects = {leaves[-1]: off(node, self._radius(leaves[0])) for node, leaves in nodes}
        return self.samples.joint(self.weights, self._noise(defects))

    def _radius(self, at: int) -> Tensor:
        """Estimate how far the input of a leaf moves: (B,)."""
        length_B = self.lengths[at]
        return MOVED * (torch.fmin(length_B, self.samples.sizes[at]) if at in self.samples.sizes else length_B)

    def _noise(self, defects: Sizes) -> Noise:
        """Return the noise, with theta_0 in proportion to its part, and room for rounding at every leaf."""
        floors = self._floors()
        if not self.parts:
            return Noise.of(defects, torch.full_like(self.samples.most_B, UNKNOWN), floors, self.lengths)
        alone = Noise.of(defects, torch.ones_like(self.samples.most_B), {}, {})
        return Noise.of(defects, self._adds(alone).clamp(*THETA_0), floors, self.lengths)

    def _floors(self) -> Sizes:
        """Return w_n so small that they cost next to nothing.

        They are proportional to |M_n| and to the root of the rounding of leaf n: their cost grows with their squares,
        and the gain is the sum of (rounding_n |M_n| / w_n)^2.
        """
        leaves = self.samples.tape.leaves
        own = {at: leaves[at].rounding.clamp_min(4 * U) for at in self.lengths}  # with that of a sum behind the leaf
        most_B = torch.stack(list(own.values())).amax(0).clamp(*LENGTHS)
        shape = {at: length_B * (own[at] / most_B).sqrt() for at, length_B in self.lengths.items()}
        if not self.parts:
            return self._widened({at: FLOOR * size_B for at, size_B in shape.items()})
        adds_B = self._adds(Noise(shape, {}))
        quiet_B = (QUIET / adds_B).nan_to_num(FLOOR, FLOOR)
        return self._widened({at: quiet_B * size_B for at, size_B in shape.items()})

    def _widened(self, floors: Sizes) -> Sizes:
        """Return larger w_n where the rounding of the maps would leave no bound: wide models need more room."""
        joint = self.samples.joint(self.weights, Noise(floors, self.lengths))
        expected = Rounding(joint, {at: MOVED * length_B for at, length_B in self.lengths.items()})
        share_B = SIZES * expected.share(max(self.lengths)) / (ROOM * ALLOWED)
        wider_B = share_B.nan_to_num(1.0, 1.0).clamp_min(1.0)
        return {at: wider_B * floor_B for at, floor_B in floors.items()}

    def _adds(self, noise: Noise) -> Tensor:
        """Return the part of the noise in the seminorm of the margin's forms, relative to that of the image: (B,)."""
        part_B = self.samples.part(self.samples.joint({}, noise), self.forms, NOISE)
        return (part_B / self.parts[IMAGE]).nan_to_num(THETA_0[1])

    def radius(self, first_B: Tensor, margin_B: Tensor) -> Tensor:
        """Estimate the eps where first order and remainders together reach the margin: (B,).

        With remainders a eps^2, the loss is first eps while that is at least twice as much, and a eps^2 + first^2 / 4 a
        above: the cost of coupled.py where b has no component in A.
        """
        most_B = self.samples.most_B
        whole_B = sum(self.parts.values(), torch.zeros_like(most_B))
        a_B = ALIGNED * 0.5 * (self.samples.budget.over * whole_B / most_B).square().clamp_min(1e-300)
        turn_B = first_B.square() / (4 * a_B)
        root_B = torch.where(margin_B < 2 * turn_B, margin_B / first_B, ((margin_B - turn_B) / a_B).sqrt())
        return torch.fmin(root_B, most_B).clamp_min(LEAST_RADIUS * most_B)


def estimate_weights(
    tape: Tape, images_BCHW: Tensor, most_B: Tensor, g: Vectors, draw: Draw, known: Known, second: bool = False
) -> WeightEstimate:
    """Estimate the weights for some images and all eps up to `most_B`.

    g (1, B, *y) are the gradients of one margin of each image at the leaves.
    """
    samples = Samples(
        tape=tape, images=images_BCHW, most_B=most_B, draw=draw, sizes=known(most_B), budget=budget(tape), second=second
    )
    margin = sensitivity(samples, g)
    rough = rough_weights(samples, margin)
    guess = {at: torch.full_like(most_B, GUESS) for at in rough}
    rebalanced = scaled(samples, rough, guess, parts_of(samples, margin, rough, guess))
    theta, lengths = thetas(samples, rebalanced)
    parts = parts_of(samples, margin, rebalanced, theta)
    weights = scaled(samples, rebalanced, theta, parts)
    return WeightEstimate(samples=samples, forms=margin.forms, weights=weights, lengths=lengths, parts=parts)


def sensitivity(samples: Samples, g: Vectors) -> Sensitivity:
    """Return the forms of the margin with gradients g, and what random changes of the image do to them."""
    zero_B = torch.zeros_like(samples.most_B)
    if not samples.formed:
        return Sensitivity(forms={}, image_B=zero_B, pulled=Vectors(), energy_B=zero_B)
    joint, last = samples.joint({}), max(samples.formed)
    forms, joining, energies = dict[int, QuadraticForm](), Vectors(), list[Tensor]()

    def visit(at: int, v: Tensor) -> None:
        if at in samples.formed:
            reach = samples.reach(at, v, torch.ones_like(samples.most_B))
            forms[at] = samples.formed[at].of_gradient(g[at], reach)
            joining[at] = forms[at].apply(v).nan_to_num(0.0, 0.0, 0.0)
            energies.append((v * joining[at]).flatten(2).sum(-1).mean(0))

    joint.push(samples.gaussian(torch.Size([joint.room(last)]), "sensitivity"), visit, last)
    _, seen = samples.tape.pull(None, joining, [at for at in samples.tape.nonlinear if at < last])
    pulled = {at: samples.tape.collected(seen, at).square().mean(0).sqrt() for at in seen}
    image_B = samples.part(joint, forms, IMAGE)
    return Sensitivity(forms=forms, image_B=image_B, pulled=pulled, energy_B=torch.stack(energies).sum(0))


def rough_weights(samples: Samples, margin: Sensitivity) -> dict[int, Tensor]:
    """Return the weights of the first estimate, for which |r / W|^2 is approximately GUESS at every leaf.

    Vectors are pushed through once, and what a leaf adds to them is chosen on the way.
    """
    weights, most_B = dict[int, Tensor](), samples.most_B
    joint = samples.joint(weights)  # it sees the weights chosen so far

    def choose(at: int, v: Tensor) -> Tensor:
        leaf, weight = samples.tape.leaves[at], torch.ones(())
        total_B = torch.full_like(most_B, 1 + GUESS * len(weights))
        if leaf.forms is not None:
            size = leaf.forms.size(samples.reach(at, v, total_B))
            pulled = _pooled(margin.pulled.get(at, torch.ones_like(size)), leaf.forms.pooled)
            weight = (_floored(_pooled(size, leaf.forms.pooled)) / _floored(pulled)).sqrt()
        weight = weight.to(leaf.y).expand(most_B.shape + samples.tape.rooms[at])
        factor_B = (samples.rest(at, v, joint, weight, total_B) / GUESS**0.5).nan_to_num(1.0, 1.0, 1.0)
        weights[at] = (weight * broadcast_batch(factor_B, weight.shape[1:])).clamp(*WEIGHTS)
        return weights[at]

    samples.walk(choose)
    return weights


def thetas(samples: Samples, weights: Mapping[int, Tensor]) -> tuple[Sizes, Sizes]:
    """Return theta of all nonlinear leaves for these weights, and |M_i| of the inputs of all leaves."""
    theta, joint = Sizes(), samples.joint(weights)

    def measure(at: int, v: Tensor) -> Tensor:
        total_B = 1 + sum(theta.values(), torch.zeros_like(samples.most_B))
        theta_B = samples.rest(at, v, joint, weights[at], total_B).square()
        theta[at] = theta_B.nan_to_num(THETA[1], THETA[1]).clamp_min(LEAST_THETA)
        return weights[at]

    return theta, samples.walk(measure)


def parts_of(samples: Samples, margin: Sensitivity, weights: Mapping[int, Tensor], theta: Sizes) -> Sizes:
    """Return the parts of the image and of leaves with these theta in the seminorm of the margin's forms."""
    if not margin.forms:
        return {}
    joint, parts = samples.joint(weights), {IMAGE: margin.image_B}
    for at in joint.sources(max(margin.forms)):
        large = samples.budget.large
        part_B = _part_seen(margin, at, weights[at]) if large else samples.part(joint, margin.forms, at)
        parts[at] = theta[at].sqrt() * part_B
    return parts


def _part_seen(margin: Sensitivity, at: int, weight: Tensor) -> Tensor:
    """Estimate the part of a leaf with theta = 1 to a factor of about two, at almost no cost."""
    length_B = (margin.pulled[at] * weight).flatten(1).norm(dim=1)
    return SEEN * length_B / margin.energy_B.sqrt()


def scaled(samples: Samples, weights: Mapping[int, Tensor], theta: Sizes, parts: Sizes) -> dict[int, Tensor]:
    """Scale the weights so that each theta equals the leaf's part in the seminorm, relative to that of the image."""
    found = dict(weights)
    for at in set(parts) - {IMAGE}:
        wanted_B = (parts[at] / parts[IMAGE]).nan_to_num(THETA[1]).clamp(*THETA)
        share = FREER if samples.second and smooth_units(samples.formed.get(at)) is not None else 1.0
        scale_B = (theta[at] / (share * wanted_B)).sqrt()
        found[at] = (weights[at] * broadcast_batch(scale_B, weights[at].shape[1:])).clamp(*WEIGHTS)
    return found


def _pooled(size: Tensor, axes: int) -> Tensor:
    """Return the root mean square along so many last axes, in every entry."""
    if not axes:
        return size
    return size.flatten(-axes).square().mean(-1).sqrt()[(..., *[None] * axes)].expand_as(size)


def _floored(size: Tensor) -> Tensor:
    """Return sizes not far below the mean, and above 0."""
    size = size.nan_to_num(1.0, 1.0)
    mean_B = size.flatten(1).mean(1)
    return torch.maximum(size, LEAST * broadcast_batch(mean_B, size.shape[1:])).clamp_min(1e-100)
