"""The weights W_k of ellipsoid.py, estimated with a few vectors.

All numbers here are estimates; any positive weights are sound.

The bounded quantity is a seminorm |F G + sum_k F_k r_k|, with r_k anywhere where |r_k / W_k|^2 <= theta_k. The product
of |F_k W_k| and |r_k / W_k|, in Frobenius norms, is smallest for W_u^2 = |r_u| / |F_u|, entry by entry. Let a_k be the
part of leaf k's remainder in the seminorm, relative to that of the image. For theta_k proportional to a_k,

    (sum_k a_k)^2 = (sum_k a_k^2 / theta_k) (sum_k theta_k).

Both a_k and theta_k depend on the weights of the leaves in front. They are therefore estimated twice: a theta_k that is
overestimated tenfold gives an oversized W_k, which loosens the bound tenfold.

Letters: B images, M random vectors.
"""

from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from torch import Tensor

from certify.image.budget import budget
from certify.image.ellipsoid import Draw, Known, Off, identity, within
from certify.image.joint import IMAGE, NOISE, Joint, Noise, Sizes
from zoo.arithmetic import broadcast_batch
from zoo.bounds import lanczos
from zoo.bounds.contracts import QuadraticForm
from zoo.bounds.tape import Tape, Vectors

THETA = (0.002, 1.0)  # range of theta
THETA_0 = (1e-8, 1.0)  # range of theta_0; the errors of the exact function are tiny
UNKNOWN = 0.01  # theta_0 where there is no form to compare with
QUIET = 0.05  # smallest part of the noise in the seminorm, as room for rounding, relative to that of the image
FLOOR = 1e-3  # the same relative to |M_i|, where there is no form
GUESS = 0.1  # theta while it is unknown
LEAST_THETA = 1e-12  # smallest estimate, so that weights do not vanish
SEEN = 4.0  # most that a remainder adds, relative to what it adds where the image moves, approximately
ALIGNED = 0.75  # share of remainders that acts in the direction of the first order
LEAST = 0.1  # smallest entry, relative to the mean
LEAST_RADIUS = 1e-3  # smallest estimated radius, relative to the largest; the result where maps diverge
MOVED = 0.3  # |M_i| relative to its Frobenius norm, approximately
LENGTHS = (1e-100, 1e100)  # range of lengths
WEIGHTS = (1e-100, 1e30)  # range of weights; finite even where an estimate diverges


class WeightEstimate:
    """The weights for some images and all eps up to `most_B`.

    g (1, B, *y) are the gradients of one margin of each image at the leaves.
    """

    def __init__(self, tape: Tape, images_BCHW: Tensor, most_B: Tensor, g: Vectors, draw: Draw, known: Known) -> None:
        self._tape, self._images, self._most_B, self._g, self._draw = tape, images_BCHW, most_B, g, draw
        self._sizes = known(most_B)
        self._budget = budget(tape)
        self._formed = {at: forms for at in tape.nonlinear if (forms := tape.leaves[at].forms) is not None}
        self._forms, self._pulled, self._energy_B = dict[int, QuadraticForm](), Vectors(), torch.zeros_like(most_B)
        if self._formed:
            self._forms, self._pulled, self._energy_B = self._sensitivity()

    def joint(self, off: Off) -> Joint:
        """Return the maps with the estimated weights.

        These are W_k (B, ...) of every nonlinear leaf, and w_n for the expected errors at the ends of nodes.
        """
        nodes = enumerate(self._tape.of_nodes)
        defects = {leaves[-1]: off(node, MOVED * self._lengths[leaves[0]]) for node, leaves in nodes}
        weights = _scaled(self._rebalanced_weights, self._theta, self._parts)
        return Joint(self._tape, self._images, self._most_B, weights, self._noise(defects))

    @cached_property
    def _rebalanced_weights(self) -> dict[int, Tensor]:
        """The weights of the second estimate: those of the first, rescaled by the parts of remainders.

        The parts are those for theta = GUESS everywhere. They differ from it where the weights in front were out of
        proportion.
        """
        theta = {at: torch.full_like(self._most_B, GUESS) for at in self._weights}
        return _scaled(self._weights, theta, self._parts_of(self._weights, theta))

    @property
    def _theta(self) -> Sizes:
        """The estimated theta of all nonlinear leaves, for the rebalanced weights."""
        return self._second[0]

    @property
    def _lengths(self) -> Sizes:
        """The estimated |M_i| of the inputs of all leaves, in the Frobenius norm, for the rebalanced weights."""
        return self._second[1]

    @cached_property
    def _second(self) -> tuple[Sizes, Sizes]:
        thetas, joint = Sizes(), self._silent(self._rebalanced_weights)

        def weight(at: int, v: Tensor) -> Tensor:
            total_B = 1 + sum(thetas.values(), torch.zeros_like(self._most_B))
            theta_B = self._length(at, v, joint, self._rebalanced_weights[at], total_B).square()
            thetas[at] = theta_B.nan_to_num(THETA[1], THETA[1]).clamp_min(LEAST_THETA)
            return self._rebalanced_weights[at]

        return thetas, self._walk(weight)

    @cached_property
    def _parts(self) -> dict[int, Tensor]:
        """The parts of the image and of the leaves' remainders in the seminorm of the margin's forms."""
        return self._parts_of(self._rebalanced_weights, self._theta)

    def _noise(self, defects: Sizes) -> Noise:
        """Return the noise, with theta_0 in proportion to its part, and room for rounding at every leaf."""
        floors = self._floors()
        if not self._parts:
            return Noise.of(defects, torch.full_like(self._most_B, UNKNOWN), floors, self._lengths)
        alone = Noise.of(defects, torch.ones_like(self._most_B), {}, {})
        return Noise.of(defects, self._adds(alone).clamp(*THETA_0), floors, self._lengths)

    def _floors(self) -> Sizes:
        """Return w_n so small that they cost next to nothing.

        They are proportional to |M_n| and to the root of the rounding of leaf n: their cost grows with their squares,
        and the gain is the sum of (rounding_n |M_n| / w_n)^2.
        """
        leaves = self._tape.leaves
        most_B = torch.stack([leaves[at].rounding for at in self._lengths]).amax(0).clamp(*LENGTHS)
        shape = {at: length_B * (leaves[at].rounding / most_B).sqrt() for at, length_B in self._lengths.items()}
        if not self._parts:
            return {at: FLOOR * size_B for at, size_B in shape.items()}
        adds_B = self._adds(Noise(shape, {}))
        return {at: (QUIET / adds_B).nan_to_num(FLOOR, FLOOR) * size_B for at, size_B in shape.items()}

    def _adds(self, noise: Noise) -> Tensor:
        """Return the part of the noise in the seminorm of the margin's forms, relative to that of the image: (B,)."""
        joint = Joint(self._tape, self._images, self._most_B, {}, noise)
        return (self._part(joint, NOISE) / self._parts[IMAGE]).nan_to_num(THETA_0[1])

    def radius(self, first_B: Tensor, margin_B: Tensor) -> Tensor:
        """Estimate the eps where first order and remainders together reach the margin: (B,).

        With remainders a eps^2, the loss is first eps while that is at least twice as much, and a eps^2 + first^2 / 4 a
        above: the cost of coupled.py where b has no component in A.
        """
        whole_B = sum(self._parts.values(), torch.zeros_like(self._most_B))
        a_B = ALIGNED * 0.5 * (self._budget.over * whole_B / self._most_B).square().clamp_min(1e-300)
        turn_B = first_B.square() / (4 * a_B)
        root_B = torch.where(margin_B < 2 * turn_B, margin_B / first_B, ((margin_B - turn_B) / a_B).sqrt())
        return torch.fmin(root_B, self._most_B).clamp_min(LEAST_RADIUS * self._most_B)

    def _weight(self, at: int, v: Tensor, joint: Joint, total_B: Tensor) -> Tensor:
        """Return weights for which |r / W|^2 is approximately GUESS; v are random changes of the input."""
        leaf, weight = self._tape.leaves[at], torch.ones(())
        if leaf.forms is not None:
            size = leaf.forms.size(self._reach(at, v, self._around(total_B)))
            weight = (_floored(size) / _floored(self._pulled.get(at, torch.ones_like(size)))).sqrt()
        weight = weight.to(leaf.y).expand(self._most_B.shape + self._tape.rooms[at])
        factor_B = (self._length(at, v, joint, weight, total_B) / GUESS**0.5).nan_to_num(1.0, 1.0, 1.0)
        return (weight * broadcast_batch(factor_B, weight.shape[1:])).clamp(*WEIGHTS)

    def _length(self, at: int, v: Tensor, joint: Joint, weight: Tensor, total_B: Tensor) -> Tensor:
        """Estimate |r / weight| (B,), for Theta in front of the leaf."""
        leaf, around_B = self._tape.leaves[at], self._around(total_B)
        form = identity(self._most_B)
        if leaf.forms is not None:
            form = leaf.forms.of_rest(self._reach(at, v, around_B), 1 / weight)
        start = self._draw(torch.Size([joint.room(at)]), f"length {at}", self._most_B[:, None])
        length_B = around_B * self._ritz(joint, {at: form}, start)
        if at in self._sizes:
            length_B = torch.fmin(length_B, form.largest[0].sqrt() * self._sizes[at])
        return leaf.beta(length_B) / weight.flatten(1).amin(1) if leaf.forms is None else length_B

    def _around(self, total_B: Tensor) -> Tensor:
        """Return Theta^(1/2), times what is proved relative to the estimate."""
        return self._budget.over * total_B.sqrt()

    @cached_property
    def _weights(self) -> dict[int, Tensor]:
        """The weights of the first estimate, with theta = GUESS everywhere.

        Vectors are pushed through once, and what a leaf adds to them is chosen on the way.
        """
        weights = dict[int, Tensor]()
        joint = self._silent(weights)

        def weight(at: int, v: Tensor) -> Tensor:
            total_B = torch.full_like(self._most_B, 1 + GUESS * len(weights))
            weights[at] = self._weight(at, v, joint, total_B)
            return weights[at]

        self._walk(weight)
        return weights

    def _walk(self, weight: Callable[[int, Tensor], Tensor]) -> Sizes:
        """Push random vectors through all leaves; return their root mean square lengths.

        At each nonlinear leaf, `weight` receives the vectors and returns the weight of what the leaf adds.
        """
        lengths = Sizes()

        def visit(at: int, v: Tensor) -> Tensor | None:
            square_B = v.flatten(2).square().sum(-1).mean(0)
            lengths[at] = square_B.sqrt().nan_to_num(1.0, 1.0).clamp(*LENGTHS)
            if at not in self._tape.nonlinear:
                return None
            added = weight(at, v)
            return self._tape.spread(self._gaussian(self._tape.rooms[at], f"look {at}") * added, at)

        v = self._gaussian(self._images.shape[1:], "look") * broadcast_batch(self._most_B, self._images.shape[1:])
        self._tape.push(v, visit, max(self._tape.leaves))
        return lengths

    def _parts_of(self, weights: Mapping[int, Tensor], theta: Sizes) -> dict[int, Tensor]:
        """Return the parts of the image and of leaves with these theta in the seminorm of the margin's forms."""
        if not self._forms:
            return {}
        joint = self._silent(weights)
        parts = {IMAGE: self._of_image_B}
        for at in joint.sources(max(self._forms)):
            part_B = self._seen(at, weights[at]) if self._budget.large else self._part(joint, at)
            parts[at] = theta[at].sqrt() * part_B
        return parts

    @cached_property
    def _of_image_B(self) -> Tensor:
        """The part of the image, which does not depend on weights."""
        return self._part(self._silent({}), IMAGE)

    def _seen(self, at: int, weight: Tensor) -> Tensor:
        """Estimate the part of a leaf to a factor of about two, at almost no cost."""
        length_B = (self._pulled[at] * weight).flatten(1).norm(dim=1)
        return SEEN * length_B / self._energy_B.sqrt()

    def _part(self, joint: Joint, source: int) -> Tensor:
        """Return the part of one source with theta = 1."""
        last = max(self._forms)
        start = self._draw(torch.Size([joint.room(last)]), f"part {source}", self._most_B[:, None])
        return self._ritz(joint, self._forms, start * joint.part(source, last))

    def _silent(self, weights: Mapping[int, Tensor]) -> Joint:
        """Return the maps without noise."""
        return Joint(self._tape, self._images, self._most_B, weights, Noise({}, {}))

    def _sensitivity(self) -> tuple[dict[int, QuadraticForm], Vectors, Tensor]:
        """Return the forms of the margin, their sensitivity to each leaf, and their energy, from random changes G.

        The sensitivity is |B_k^T J^T C A G|, entry by entry, and the energy <A G, C A G>.
        """
        joint, last = self._silent({}), max(self._formed)
        u = self._gaussian(torch.Size([joint.room(last)]), "sensitivity")
        forms, joining, energies = dict[int, QuadraticForm](), Vectors(), list[Tensor]()

        def visit(at: int, v: Tensor) -> None:
            if at in self._formed:
                reach = self._reach(at, v, self._around(torch.ones_like(self._most_B)))
                forms[at] = self._formed[at].of_gradient(self._g[at], reach)
                joining[at] = forms[at].apply(v).nan_to_num(0.0, 0.0, 0.0)
                energies.append((v * joining[at]).flatten(2).sum(-1).mean(0))

        joint.push(u, visit, last)
        _, seen = self._tape.pull(None, joining, [at for at in self._tape.nonlinear if at < last])
        pulled = {at: self._tape.collected(seen, at).square().mean(0).sqrt() for at in seen}
        return forms, pulled, torch.stack(energies).sum(0)

    def _reach(self, at: int, v: Tensor, times_B: Tensor) -> Tensor:
        """Estimate the reach of a leaf's functionals from random changes v of its input."""
        forms = self._formed[at]
        length = (forms.squares(v) / len(v)).sqrt()
        reach = broadcast_batch(times_B, length.shape[1:]) * length
        return within(self._sizes[at], forms, reach) if at in self._sizes else reach

    def _gaussian(self, room: torch.Size, word: str) -> Tensor:
        """Return random vectors (M, B, *room)."""
        return self._draw(torch.Size([self._budget.samples, *room]), word, self._most_B[:, None]).movedim(1, 0)

    def _ritz(self, joint: Joint, forms: Mapping[int, QuadraticForm], start_BN: Tensor) -> Tensor:
        """Estimate lambda_max^(1/2) of the forms, on the part of u where the start is not 0."""
        part_BN, gram = start_BN != 0, joint.gram(forms)

        def apply(u_BN: Tensor) -> Tensor:
            return (gram(u_BN[None])[0] * part_BN).nan_to_num(0.0, 0.0, 0.0)

        return lanczos.ritz(apply, start_BN, self._budget.steps).clamp_min(1e-300).sqrt()


def _scaled(weights: Mapping[int, Tensor], theta: Sizes, adds: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Scale the weights so that each theta equals the leaf's part in the seminorm, relative to that of the image."""
    scaled = dict(weights)
    for at in set(adds) - {IMAGE}:
        wanted_B = (adds[at] / adds[IMAGE]).nan_to_num(THETA[1]).clamp(*THETA)
        scale_B = (theta[at] / wanted_B).sqrt()
        scaled[at] = (weights[at] * broadcast_batch(scale_B, weights[at].shape[1:])).clamp(*WEIGHTS)
    return scaled


def _floored(size: Tensor) -> Tensor:
    """Return sizes not far below the mean, and above 0."""
    size = size.nan_to_num(1.0, 1.0)
    mean_B = size.flatten(1).mean(1)
    return torch.maximum(size, LEAST * broadcast_batch(mean_B, size.shape[1:])).clamp_min(1e-100)
